"""The Valkey layout: the name of every key. The Lua functions append the same suffixes to the shard's tag.

State is spread over a fixed number of shards. A shard is one hash tag, so it is in one slot, on one node, and one
function call can change all of it atomically. ``view`` is a word without colons and an index is digits; a name may be
any text, so it comes last, and no two names share a key. "partition" is the text of ``log.event.Partition``.

    <prefix>:{<shard>}                                  the tag itself; declared as the key of every function call
    …:meta                       hash    run_id, epoch, shards, format; in shard 0 also begun:<view>
    …:number                     string  last number assigned in the shard
    …:fence                      hash    view -> driver epoch that owns it
    …:marks:<view>               hash    partition -> last offset applied
    …:times:<view>               hash    partition -> running-maximum time, and its mark (home shard; folds, tags: all)
    …:counts:<view>              hash    in, stored, dead, skipped:<reason>; for folds also input:<rule>,
                                         new:<rule>, emitted:<rule>, premature:<rule>, reason:<rule>:<reason>
    …:fold:<rule>:<form>         hash    group -> version (8 bytes) and state of its open folds; removed with the last
    …:due:<rule>:<form>          zset    group -> time at which its first fold is due
    …:closed:<rule>:<form>       zset    group -> time at which its last fold closed; for a while
    …:numbers:<tag>              hash    source -> last number in the tag, last of its own, ms, partition
    …:cleaned:<tag>              hash    source -> position up to which it is erased from the tag for good
    …:cleaned                    set     tags that have such an erasure
    …:conflicts                  stream  c: conflict of a source that several partitions write; capped
    …:frontier                   hash    rule -> watermark at which its folds were last settled
    …:names:<view>               zset    every name with a log, in lexical order
    …:log:<view>:<name>          hash    registry of a log: its open segment, of which what each run changes is one
                                         field, its floor, one field per closed segment; expires after the last
    …:seg:<view>:<index>:<name>  stream  <last number>-<events> -> r: run or packed piece, t: running-maximum time
    …:staged:<token>:<view>:<index>:<name>  stream  pieces that upkeep has not swapped in yet; expires
    …:gone:<view>                string  epoch and number of the latest end of a log that expired as a whole
    …:tail                       stream  name -> view of every log touched; capped
    …:outbox                     stream  <number>-0 -> e, i, t, k, v, h: records to publish to Kafka
    <prefix>:{0}:topics          hash    topic -> generation and topic id
    <prefix>:{0}:drivers         string  last driver epoch assigned
    <prefix>:{0}:status:<view>   string  last report of the driver; expires
    <prefix>:{0}:rota:<view>     hash    epoch of the driver whose first view it is, version, beat: ms when it was last
                                         heard, stop, hand:<n> -> partitions that the hand is to read, as JSON
    <prefix>:{0}:hands:<view>    hash    token:<n>, beat:<n>, next:<n>, report:<n> of each hand; holder:<partition> -> n
    <prefix>:{0}:done:<view>     hash    partition -> offset up to which, not including it, all is applied to all views
    <prefix>:{0}:lease:<what>    hash    owner, token, until
    <prefix>:{0}:upkeep          hash    job -> report of its last run
    <prefix>:{0}:rules           hash    fold rule -> the rule in force, and its counters when its windows changed
    <prefix>:{0}:wanted          hash    fold rule -> windows requested while it runs
    <prefix>:{0}:searches        hash    search id -> number of its life, ms when it began, the search
    <prefix>:{0}:searches:version  string  rises whenever a search changes
    <prefix>:{0}:lives           string  last number assigned to a life or a stretch
    <prefix>:{0}:past            hash    number of a life, also of one that is over -> search id
    <prefix>:{0}:idle            zset    search id without followers -> since when, by the store's clock
    <prefix>:{0}:uses            zset    search id -> logarithm of its use over all windows, decaying
    <prefix>:{0}:dropping        hash    life that is over -> numbers of its stretches, until their logs are dropped
    <prefix>:{0}:dropped         hash    life whose logs were dropped -> ms, numbers; until they are checked again
    <prefix>:{0}:pins            hash    life -> partition -> offset at which its live matches begin
    <prefix>:{0}:stretches:<life>  list  stretches requested, each with its number
    <prefix>:{0}:scanned:<life>  set     numbers of the stretches that are scanned
    <prefix>:{0}:scanning        zset    life and number of a stretch still to scan -> time of the request
    <prefix>:{0}:read:<life>     hash    number of a stretch -> bytes read for it
    <prefix>:{0}:lost:<life>     hash    number of a stretch, partition and first offset -> end and reason of a range
                                         that Kafka had dropped before the scan
    <prefix>:{0}:processes       zset    service process -> its last heartbeat, by the store's clock
    <prefix>:{0}:process         hash    service process -> its description
    <prefix>:{0}:leases:<process>  hash  connection -> search id that it follows, and the window it began in
    <prefix>:{0}:lapsed:<process>  list  connections whose search was ended; kept for a minute for the process
    <prefix>:{0}:connections:<search>  hash  process and connection -> its request, since when
    <prefix>:{0}:followers       hash    search id -> number of connections that follow it
    <prefix>:{0}:popular:<window>  hash  search id -> different connections in a window of ten minutes; expires
    <prefix>:{0}:positions:<search>  hash  client name -> its position; removed with the search
    <prefix>:{0}:readers         hash    reader name, mode and tags -> its position, and when it was last there
    …:kept:<shelf>               stream  <last offset>-<records> -> r: run of matched records, shared by all searches;
                                         a shelf is a partition, or a partition in a stretch; expires
    …:kept                       hash    shelf -> its bytes
    <prefix>:{0}:gaps            stream  ranges that Kafka had dropped before they were read; capped

Telemetry sessions use keys that other software reads too: without the prefix, and in no shard. Our own keys beside a
stream have the stream's key as hash tag, so they are in its slot, and one call can change both; stream names have no
braces.

    stream:<stream>              stream  id: number of the session, data: burst
    streams                      set     names of all streams
    lastStreamSessionId          string  last number assigned to a session
    sessions:<identity>          hash    position and description of a session; expires. Fields: streamSessionId,
                                         streamName, streamPosition, lastUpdated, json, tStart, tEnd; and ours: state,
                                         merged, order, writer, opened, heard, shared. The key's template is a setting
    <prefix>:{stream:<stream>}                          the tag of our keys beside a stream
    …:marks                      hash    writer -> last of its offsets, or sequence numbers, that is in the stream
    …:sessions                   hash    identity -> version (8 bytes) and state of its session; a zero byte -> highest
                                         number assigned here; a zero byte and a writer -> its notes
    …:claims                     hash    identity -> number, position, writer and offset of an opening under way
    …:ledger                     stream  id of the last entry of a write -> w: writer, f: mark before it, m: mark after
                                         it, a: id of its first entry, or its distance within a millisecond; outlives
                                         the entries
    …:trimmed                    hash    number of a session -> id of its newest entry that was trimmed; newest -> the
                                         newest of all sessions; ours -> end of the range that we trimmed at the
                                         beginning of the stream; whole -> id from which on the ledger has every write
    <prefix>:sessions            zset    identity -> ms when its session was last updated
    <prefix>:config:<identifier>  string  configuration as JSON; never changed; expires when no session has it
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

FORMAT = 2
"""Number of this layout, stored with it and compared at start."""
TRIMMED_NEWEST, TRIMMED_BY_US, LEDGER_WHOLE = "newest", "ours", "whole"
"""Fields of ``trimmed`` that are not numbers of sessions."""


def _shard_key(word: str) -> Callable[[Keys, int], str]:
    return lambda keys, shard: f"{keys.tag(shard)}:{word}"


def _shard_key_of(word: str) -> Callable[[Keys, int, str], str]:
    return lambda keys, shard, name: f"{keys.tag(shard)}:{word}:{name}"


def _key(word: str) -> Callable[[Keys], str]:
    return lambda keys: f"{keys.tag(0)}:{word}"


def _key_of(word: str) -> Callable[[Keys, str], str]:
    return lambda keys, name: f"{keys.tag(0)}:{word}:{name}"


def _stream_key(word: str) -> Callable[[Keys, str], str]:
    return lambda keys, stream: f"{keys.stream_tag(stream)}:{word}"


class Keys(msgspec.Struct, frozen=True):
    """The key names of one installation: methods that take the shard, if any, and then a name, if any."""

    prefix: str = "tr"

    def tag(self, shard: int) -> str:
        """Return the tag of a shard, with which every key of the shard begins."""
        return f"{self.prefix}:{{{shard}}}"

    # In every shard; those in the second group have one key for each view, rule, tag or shelf.
    meta = _shard_key("meta")
    tail = _shard_key("tail")
    outbox = _shard_key("outbox")
    frontier = _shard_key("frontier")
    erased_tags = _shard_key("cleaned")
    conflicts = _shard_key("conflicts")
    kept_sizes = _shard_key("kept")

    marks = _shard_key_of("marks")
    times = _shard_key_of("times")
    counts = _shard_key_of("counts")
    names = _shard_key_of("names")
    fold = _shard_key_of("fold")
    due = _shard_key_of("due")
    numbers = _shard_key_of("numbers")
    erasures = _shard_key_of("cleaned")
    kept = _shard_key_of("kept")

    def log(self, shard: int, view: str, name: str) -> str:
        return f"{self.tag(shard)}:log:{view}:{name}"

    def segment(self, shard: int, view: str, index: int, name: str) -> str:
        return f"{self.tag(shard)}:seg:{view}:{index}:{name}"

    def staged(self, shard: int, token: int, view: str, index: int, name: str) -> str:
        return f"{self.tag(shard)}:staged:{token}:{view}:{index}:{name}"

    # In shard 0; those in the second group have one key for each view, life or search.
    rules = _key("rules")
    wanted = _key("wanted")
    topics = _key("topics")
    upkeep = _key("upkeep")
    gaps = _key("gaps")
    searches = _key("searches")
    searches_version = _key("searches:version")
    past = _key("past")
    pins = _key("pins")
    scanning = _key("scanning")
    idle = _key("idle")
    uses = _key("uses")
    dropping = _key("dropping")
    dropped = _key("dropped")
    processes = _key("processes")
    followers = _key("followers")
    readers = _key("readers")

    status = _key_of("status")
    rota = _key_of("rota")
    hands = _key_of("hands")
    done = _key_of("done")
    stretches = _key_of("stretches")
    scanned = _key_of("scanned")
    read = _key_of("read")
    lost = _key_of("lost")
    connections = _key_of("connections")
    positions = _key_of("positions")

    def popular(self, window: int) -> str:
        return f"{self.tag(0)}:popular:{window}"

    # Telemetry sessions, and our keys beside their streams.
    def stream(self, stream: str) -> str:
        return f"stream:{stream}"

    def streams(self) -> str:
        return "streams"

    def last_session(self) -> str:
        return "lastStreamSessionId"

    def session(self, template: str, identity: str) -> str:
        return template.replace("{identity}", identity)

    def sessions(self) -> str:
        return f"{self.prefix}:sessions"

    def config(self, identifier: str) -> str:
        return f"{self.prefix}:config:{identifier}"

    def stream_tag(self, stream: str) -> str:
        """Return the tag of a stream, with which all our keys beside it begin."""
        return f"{self.prefix}:{{{self.stream(stream)}}}"

    stream_marks = _stream_key("marks")
    stream_sessions = _stream_key("sessions")
    claims = _stream_key("claims")
    ledger = _stream_key("ledger")
    trimmed = _stream_key("trimmed")
