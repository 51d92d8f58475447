"""Every key name of the Valkey layout, in one place. The Lua functions append the same suffixes to the shard's tag.

State is spread over a fixed number of shards. A shard is one hash tag, so it is one slot, on one node, and one
function call can change all of it atomically. ``view`` is a word without colons and an index is digits, so that a
name, which may be any text, comes last and no two names share a key.

    <prefix>:{<shard>}                                  the tag itself; declared as the key of every function call
    …:meta                       hash    run_id, epoch, shards, format; in shard 0 also begun:<view>, once it has
    …:number                     string  the last number given out in the shard
    …:fence                      hash    view -> driver epoch that owns it
    …:marks:<view>               hash    source -> last offset applied
    …:times:<view>               hash    source -> running-maximum time, and its mark (home shard; folds, tags: all)
    …:counts:<view>              hash    in, stored, dead, skipped:<reason>; for folds also input:<rule>,
                                         new:<rule>, emitted:<rule>, premature:<rule>, reason:<rule>:<reason>
    …:fold:<rule>:<form>         hash    group -> version (8 bytes) and state of its open folds; gone when they are
    …:due:<rule>:<form>          zset    group -> when its first fold is due
    …:closed:<rule>:<form>       zset    group -> when it last fell quiet; for a while
    …:numbers:<tag>              hash    source of events -> last number in the tag, last of its own, ms, partition
    …:cleaned:<tag>              hash    source of events -> up to where they were taken out of the tag for good
    …:cleaned                    set     the tags that have one
    …:conflicts                  stream  c: what a source written from two places did; capped
    …:frontier                   hash    rule -> the frontier that its folds were last settled at
    …:names:<view>               zset    every name with a log, in lexical order
    …:log:<view>:<name>          hash    the log's open segment, its floor, one field per closed segment; expires when
                                         the last of them did
    …:seg:<view>:<index>:<name>  stream  <last number>-<events> -> r: run or packed piece, t: running-maximum time
    …:staged:<token>:<view>:<index>:<name>  stream  pieces that upkeep has not put in their place yet, expires
    …:gone:<view>                string  epoch and number of the latest end of a log that expired as a whole
    …:tail                       stream  name -> view of every log touched, capped
    …:outbox                     stream  <number>-0 -> e, i, t, k, v, h: what must reach Kafka
    <prefix>:{0}:topics          hash    topic -> generation and topic id
    <prefix>:{0}:drivers         string  the last driver epoch given out
    <prefix>:{0}:status:<view>   string  the driver's last report, expires
    <prefix>:{0}:lease:<what>    hash    owner, token, until: who may do it now
    <prefix>:{0}:upkeep          hash    job -> report of its last run
    <prefix>:{0}:rules           hash    fold rule -> as it is applied, and its counters when its windows changed
    <prefix>:{0}:wanted          hash    fold rule -> windows that were asked for while it runs
    <prefix>:{0}:searches        hash    search id -> number of its life, ms when it began, the search
    <prefix>:{0}:searches:version  string  rises whenever that changes
    <prefix>:{0}:lives           string  the last number given to a life or a stretch
    <prefix>:{0}:past            hash    number of a life -> search id, also when it is over
    <prefix>:{0}:idle            zset    search id that nobody follows -> since when, by the store's clock
    <prefix>:{0}:uses            zset    search id -> logarithm of how much it is used, over all windows, decaying
    <prefix>:{0}:dropping        hash    life that is over -> numbers of its stretches, until their logs are dropped
    <prefix>:{0}:dropped         hash    the same -> ms when they were dropped, numbers; until they are looked for again
    <prefix>:{0}:pins            hash    life -> source -> the offset at which its live matches begin
    <prefix>:{0}:stretches:<life>  list  ranges of the past that were asked for, each with its number
    <prefix>:{0}:scanned:<life>  set     the numbers of those that are done
    <prefix>:{0}:scanning        zset    life and number of those that are not -> when they were asked for
    <prefix>:{0}:read:<life>     hash    number of a stretch -> bytes that were read for it
    <prefix>:{0}:lost:<life>     hash    number of a stretch, source and first offset -> end and reason of what
                                         Kafka had dropped before it was scanned
    <prefix>:{0}:processes       zset    service process -> its last heartbeat, by the store's clock
    <prefix>:{0}:process         hash    service process -> what it said of itself
    <prefix>:{0}:leases:<process>  hash  connection -> search id that it follows, and the window it began in
    <prefix>:{0}:lapsed:<process>  list  connections whose search was ended; the process is told for a minute
    <prefix>:{0}:connections:<search>  hash  process and connection -> what was asked for, since when
    <prefix>:{0}:followers       hash    search id -> how many connections follow it
    <prefix>:{0}:popular:<window>  hash  search id -> different connections in a window of ten minutes; expires
    <prefix>:{0}:positions:<search>  hash  name of a client -> where it is; goes with the search
    <prefix>:{0}:readers         hash    name of a reader, mode and tags -> where it is in them, and when it was there
    …:kept:<shelf>               stream  <last offset>-<records> -> r: run of matched records, for all searches; a shelf
                                         is a source, or the source of a stretch; expires
    …:kept                       hash    shelf -> bytes of that
    <prefix>:{0}:gaps            stream  ranges that Kafka no longer had when they were to be read, capped

Telemetry sessions rest under names that others know too, without our prefix, and in no shard. What is ours beside a
stream has the stream's key as its hash tag, so it is in the stream's slot, and one call can change both; names of
streams have no braces.

    stream:<stream>              stream  id: number of the session, data: burst
    streams                      set     the names of all streams
    lastStreamSessionId          string  the last number given to a session
    sessions:<identity>          hash    where a session is, and what is known of it; expires. Fields: streamSessionId,
                                         streamName, streamPosition, lastUpdated, json, tStart, tEnd; and ours: state,
                                         merged, order, writer, opened, heard, shared. The key's template is a setting
    <prefix>:{stream:<stream>}                          the tag of what is ours beside a stream
    …:marks                      hash    writer -> the last of its offsets, or sequence numbers, that is in the stream
    …:sessions                   hash    identity -> version (8 bytes) and state of its session; a zero byte -> the
                                         highest number given out here; a zero byte and a writer -> its notes
    …:claims                     hash    identity -> number, position, writer and offset of an opening that is under way
    …:ledger                     stream  id of the last entry of a write -> w: writer, f: mark before, m: mark after it,
                                         a: id of its first entry, or how far that is before, within a millisecond;
                                         stays for longer than the entries do
    …:trimmed                    hash    number of a session -> id of the newest of its entries that was trimmed;
                                         newest -> that of all of them; ours -> up to where the stream's beginning is
                                         trimmed, as the end of a range; whole -> id from which on the ledger has every
                                         write
    <prefix>:sessions            zset    identity -> ms when its session was last updated
    <prefix>:config:<identifier>  string  configuration, as JSON; never changed; expires when no session has it
"""

from __future__ import annotations

import msgspec

FORMAT = 2
"""Number of this layout; stored with it and compared at start."""

TRIMMED_NEWEST, TRIMMED_BY_US, LEDGER_WHOLE = "newest", "ours", "whole"
"""Fields of what was trimmed of a stream that are no numbers of sessions."""


class Keys(msgspec.Struct, frozen=True):
    """The key names of one installation."""

    prefix: str = "tr"

    def tag(self, shard: int) -> str:
        """Return the shard's tag, which every key of the shard begins with."""
        return f"{self.prefix}:{{{shard}}}"

    def meta(self, shard: int) -> str:
        return f"{self.tag(shard)}:meta"

    def marks(self, shard: int, view: str) -> str:
        return f"{self.tag(shard)}:marks:{view}"

    def times(self, shard: int, view: str) -> str:
        return f"{self.tag(shard)}:times:{view}"

    def counts(self, shard: int, view: str) -> str:
        return f"{self.tag(shard)}:counts:{view}"

    def names(self, shard: int, view: str) -> str:
        return f"{self.tag(shard)}:names:{view}"

    def log(self, shard: int, view: str, name: str) -> str:
        return f"{self.tag(shard)}:log:{view}:{name}"

    def segment(self, shard: int, view: str, index: int, name: str) -> str:
        return f"{self.tag(shard)}:seg:{view}:{index}:{name}"

    def tail(self, shard: int) -> str:
        return f"{self.tag(shard)}:tail"

    def outbox(self, shard: int) -> str:
        return f"{self.tag(shard)}:outbox"

    def fold(self, shard: int, rule: str) -> str:
        return f"{self.tag(shard)}:fold:{rule}"

    def due(self, shard: int, rule: str) -> str:
        return f"{self.tag(shard)}:due:{rule}"

    def closed(self, shard: int, rule: str) -> str:
        return f"{self.tag(shard)}:closed:{rule}"

    def frontier(self, shard: int) -> str:
        return f"{self.tag(shard)}:frontier"

    def numbers(self, shard: int, tag: str) -> str:
        return f"{self.tag(shard)}:numbers:{tag}"

    def erasures(self, shard: int, tag: str) -> str:
        return f"{self.tag(shard)}:cleaned:{tag}"

    def erased_tags(self, shard: int) -> str:
        return f"{self.tag(shard)}:cleaned"

    def conflicts(self, shard: int) -> str:
        return f"{self.tag(shard)}:conflicts"

    def rules(self) -> str:
        return f"{self.tag(0)}:rules"

    def wanted(self) -> str:
        return f"{self.tag(0)}:wanted"

    def topics(self) -> str:
        return f"{self.tag(0)}:topics"

    def drivers(self) -> str:
        return f"{self.tag(0)}:drivers"

    def status(self, view: str) -> str:
        return f"{self.tag(0)}:status:{view}"

    def staged(self, shard: int, token: int, view: str, index: int, name: str) -> str:
        return f"{self.tag(shard)}:staged:{token}:{view}:{index}:{name}"

    def upkeep(self) -> str:
        return f"{self.tag(0)}:upkeep"

    def gaps(self) -> str:
        return f"{self.tag(0)}:gaps"

    def searches(self) -> str:
        return f"{self.tag(0)}:searches"

    def searches_version(self) -> str:
        return f"{self.tag(0)}:searches:version"

    def past(self) -> str:
        return f"{self.tag(0)}:past"

    def pins(self) -> str:
        return f"{self.tag(0)}:pins"

    def stretches(self, life: str) -> str:
        return f"{self.tag(0)}:stretches:{life}"

    def scanned(self, life: str) -> str:
        return f"{self.tag(0)}:scanned:{life}"

    def scanning(self) -> str:
        return f"{self.tag(0)}:scanning"

    def read(self, life: str) -> str:
        return f"{self.tag(0)}:read:{life}"

    def lost(self, life: str) -> str:
        return f"{self.tag(0)}:lost:{life}"

    def kept(self, shard: int, shelf: str) -> str:
        return f"{self.tag(shard)}:kept:{shelf}"

    def kept_sizes(self, shard: int) -> str:
        return f"{self.tag(shard)}:kept"

    def idle(self) -> str:
        return f"{self.tag(0)}:idle"

    def uses(self) -> str:
        return f"{self.tag(0)}:uses"

    def popular(self, window: int) -> str:
        return f"{self.tag(0)}:popular:{window}"

    def dropping(self) -> str:
        return f"{self.tag(0)}:dropping"

    def dropped(self) -> str:
        return f"{self.tag(0)}:dropped"

    def processes(self) -> str:
        return f"{self.tag(0)}:processes"

    def process(self) -> str:
        return f"{self.tag(0)}:process"

    def connections(self, search: str) -> str:
        return f"{self.tag(0)}:connections:{search}"

    def followers(self) -> str:
        return f"{self.tag(0)}:followers"

    def positions(self, search: str) -> str:
        return f"{self.tag(0)}:positions:{search}"

    def readers(self) -> str:
        return f"{self.tag(0)}:readers"

    def stream(self, stream: str) -> str:
        return f"stream:{stream}"

    def streams(self) -> str:
        return "streams"

    def last_session(self) -> str:
        return "lastStreamSessionId"

    def session(self, template: str, identity: str) -> str:
        return template.replace("{identity}", identity)

    def stream_tag(self, stream: str) -> str:
        """Return what every key of ours beside a stream begins with."""
        return f"{self.prefix}:{{{self.stream(stream)}}}"

    def stream_marks(self, stream: str) -> str:
        return f"{self.stream_tag(stream)}:marks"

    def stream_sessions(self, stream: str) -> str:
        return f"{self.stream_tag(stream)}:sessions"

    def claims(self, stream: str) -> str:
        return f"{self.stream_tag(stream)}:claims"

    def ledger(self, stream: str) -> str:
        return f"{self.stream_tag(stream)}:ledger"

    def trimmed(self, stream: str) -> str:
        return f"{self.stream_tag(stream)}:trimmed"

    def sessions(self) -> str:
        return f"{self.prefix}:sessions"

    def config(self, identifier: str) -> str:
        return f"{self.prefix}:config:{identifier}"
