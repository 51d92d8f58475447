"""Joining a session that is being written: all orders in which the steps of its writer and of a reader can meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, count

import pytest

from tailrace.valkey.shards import Arg, Shards, StoreOptions, load_functions, mapping
from tailrace.views.sessions.store import SessionChange, SessionOptions, SessionStore, Verdict, Write

_fresh = count()


class Meeting:
    """A session with one update, a writer that adds more, and a reader that joins."""

    def __init__(self, store: SessionStore) -> None:
        self.store, self.stream, self.identity = store, f"joined-{next(_fresh)}", f"joining-{next(_fresh)}"
        self._number = 7
        self._seen = b""
        self._writes: dict[int, Write] = {}
        self.tail = self.known = ""
        for step in (self.put, self.append):
            step(0)

    def put(self, n: int) -> None:
        fields: dict[str, Arg] = {
            "streamSessionId": self._number,
            "streamName": self.stream,
            "state": "open",
            "json": str(n),
        }
        change = SessionChange(self.identity, self._number, self._seen, b"", (self._number, n, 0), fields)
        self._writes[n] = Write(self.stream, "t:0", n - 1, n, [change], [(self._number, str(n).encode())])
        assert self.store.put([self._writes[n]]) == [Verdict.OK]

    def append(self, n: int) -> None:
        changes = [SessionChange(self.identity, self._number, self._seen, b"", (self._number, n, 0), {})]
        write = Write(self.stream, "t:0", n - 1, n, changes, [(self._number, str(n).encode())])
        assert self.store.append([write]) == [Verdict.OK]
        self._seen = self.store.read(self.stream, "t:0", [self.identity])[1][self.identity]

    def look_at_tail(self) -> None:
        key = self.store.shards.keys.stream(self.stream)
        info = mapping(self.store.shards.run_keyed([(key, ("XINFO", "STREAM", key))])[0])
        found = {str(k, "utf-8") if isinstance(k, bytes) else k: v for k, v in info.items()}["last-generated-id"]
        self.tail = found.decode() if isinstance(found, bytes) else found

    def look_at_hash(self) -> None:
        ((json,),) = self.store.hash_fields([self.identity], ["json"])
        assert json is not None
        self.known = json.decode()

    def missed(self, updates: int) -> list[int]:
        """Return the updates that a reader misses: neither in the hash it read nor after the tail it saw."""
        key = self.store.shards.keys.stream(self.stream)
        entries = self.store.shards.run_keyed([(key, ("XRANGE", key, f"({self.tail}", "+"))])[0]
        got = {int(mapping(fields)[b"data"]) for _, fields in entries}
        return [n for n in range(1, updates + 1) if n > int(self.known) and n not in got]


def orders(writer: list[Callable[[], None]], reader: list[Callable[[], None]]) -> Iterator[list[Callable[[], None]]]:
    """All ways in which the steps of both can follow each other."""
    steps = len(writer) + len(reader)
    for places in combinations(range(steps), len(reader)):
        mine, theirs = iter(reader), iter(writer)
        yield [next(mine) if at in places else next(theirs) for at in range(steps)]


def losses(store: SessionStore, updates: int, *, hash_first: bool, tail_first: bool) -> list[list[int]]:
    """Return the missed updates for each order of steps."""
    found: list[list[int]] = []
    n_orders = sum(1 for _ in combinations(range(2 * updates + 2), 2))
    for i in range(n_orders):
        meeting = Meeting(store)

        def update_steps(n: int, meeting: Meeting = meeting) -> list[Callable[[], None]]:
            steps = [lambda: meeting.put(n), lambda: meeting.append(n)]
            return steps if hash_first else steps[::-1]

        reader = [meeting.look_at_tail, meeting.look_at_hash]
        writer = [step for n in range(1, updates + 1) for step in update_steps(n)]
        for step in list(orders(writer, reader if tail_first else reader[::-1]))[i]:
            step()
        found.append(meeting.missed(updates))
    return found


@pytest.fixture
def sessions(any_store: StoreOptions) -> SessionStore:
    shards = Shards(any_store).open()
    load_functions(shards)
    return SessionStore(shards, SessionOptions())


def test_whoever_reads_the_tail_and_then_the_hash_misses_nothing(sessions: SessionStore) -> None:
    one, two = (losses(sessions, n, hash_first=True, tail_first=True) for n in (1, 2))
    assert one == [[]] * 6
    assert two == [[]] * 15


@pytest.mark.parametrize(("hash_first", "tail_first", "lost"), [(True, False, 1), (False, True, 1), (False, False, 4)])
def test_any_other_order_of_steps_loses_updates(
    sessions: SessionStore, hash_first: bool, tail_first: bool, lost: int
) -> None:
    found = losses(sessions, 1, hash_first=hash_first, tail_first=tail_first)
    assert sum(1 for missed in found if missed) == lost


def test_a_writer_that_died_between_its_steps_leaves_the_hash_ahead_and_not_behind(sessions: SessionStore) -> None:
    meeting = Meeting(sessions)
    meeting.put(1)
    meeting.look_at_tail()
    meeting.look_at_hash()
    assert meeting.known == "1"
    # Whoever comes after it does both again, and the reader gets twice what it knows.
    meeting.put(1)
    meeting.append(1)
    assert meeting.missed(1) == []
