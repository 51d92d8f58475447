"""Random telemetry of two partitions, and what it must come to, worked out record by record."""

from __future__ import annotations

import random
from typing import Any

from tailrace.valkey.marks import conserved, read_counts
from tailrace.views.sessions.write import VIEW
from tests.views.sessions.recorded import MS, T0, Samples, Track, doubles
from tests.writing import Record


class Life:
    """Expected contents of a stream for a session, from its opening to its end."""

    def __init__(self, session: str) -> None:
        self.session, self.state = session, "open"
        self.samples: Samples = {}
        self.events: list[tuple[int, str]] = []
        self.versions: list[str] = []


class History:
    """Records, in the order of their offsets in each partition; each session is one partition's."""

    def __init__(self, track: Track, chance: random.Random, n: int, partitions: int = 2) -> None:
        self.track, self.chance = track, chance
        self.records: list[Record] = []
        self.lives: dict[int, list[Life]] = {partition: [] for partition in range(partitions)}
        """Of each partition, in the order of their openings."""
        self.dead = self.skipped = 0
        self._live: dict[str, Life] = {}
        self._clock: dict[tuple[str, int], int] = {}
        kinds = (self._open, self._close, self._update, self._bad, *[self._data] * 12)
        for _ in range(n):
            partition = chance.randrange(partitions)
            chance.choice(kinds)(partition, f"{chance.choice('ab')}{partition}")

    def of(self, partition: int) -> list[Record]:
        return [record for record in self.records if record.partition == partition]

    def check(self) -> None:
        """Compare the streams with what the records say."""
        for partition, lives in self.lives.items():
            found = self.track.sessions(partition)
            assert [session.jsons[0]["identity"] for session in found] == [life.session for life in lives]
            for session, life in zip(found, lives, strict=True):
                assert session.samples == life.samples
                assert session.events == life.events
                times = [t for samples in session.samples.values() for t, _ in samples] + [t for t, _ in session.events]
                assert not times or session.ranges[-1] == (min(times), max(times))
                assert session.ranges == sorted(set(session.ranges), key=lambda span: span[1] - span[0])
                assert session.kinds[0] == ["session_json"]
                assert life.state == "open" or session.kinds[-1] == ["session_json"]
                assert [json["state"] for json in session.jsons] == ["open"] * (len(session.jsons) - 1) + [life.state]
                versions = list(dict.fromkeys(json["version"] for json in session.jsons if "version" in json))
                assert versions == life.versions
            for life in {life.session: life for life in lives}.values():
                assert self.track.hash(life.session)["state"] == life.state
        counts = read_counts(self.track.shards, VIEW)
        assert conserved(counts) == 0
        assert counts.get("in", 0) == len(self.records)
        assert counts.get("dead", 0) == self.dead == len(self.track.letters())
        assert counts.get("skipped:nothing-to-close", 0) == self.skipped

    def _is_over(self, session: str) -> bool:
        return session in self._live and self._live[session].state != "open"

    def _life(self, partition: int, session: str) -> Life:
        if session not in self._live:
            self._live[session] = Life(session)
            self.lives[partition].append(self._live[session])
        return self._live[session]

    def _open(self, partition: int, session: str) -> None:
        self.records.append(self.track.open(session, partition, group=session))
        if self._is_over(session):
            del self._live[session]
        self._life(partition, session)

    def _update(self, partition: int, session: str) -> None:
        version = f"1.0.{len(self.records)}"
        self.records.append(self.track.record(session, "session", partition, json={"version": version}))
        if self._is_over(session):
            self.dead += 1
        else:
            self._life(partition, session).versions.append(version)

    def _close(self, partition: int, session: str) -> None:
        state = self.chance.choice(("closed", "truncated", "failed"))
        self.records.append(self.track.close(session, partition, state=state))
        if session not in self._live or self._is_over(session):
            self.skipped += 1
        else:
            self._live[session].state = state

    def _bad(self, partition: int, session: str) -> None:
        value = self.chance.choice((b'{"type":"what"}', b"[1]", b'{"type":"data","periodic":[{"channel":"x"}]}'))
        self.records.append(self.track.raw(value, session, partition))
        self.dead += 1

    def _data(self, partition: int, session: str) -> None:
        parts: dict[str, list[Any]] = {}
        for _ in range(self.chance.randrange(1, 4)):
            kind = self.chance.choice(("periodic", "timestamped", "rows", "events"))
            parts.setdefault(kind, []).append(self._part(kind, session))
        self.records.append(self.track.data(session, partition, **parts))
        if self._is_over(session):
            self.dead += 1
            return
        life = self._life(partition, session)
        for part in parts.get("periodic", ()):
            times = [part["start"] + i * MS for i in range(len(part["values"]))]
            life.samples.setdefault(part["channel"], []).extend(zip(times, doubles(*part["values"]), strict=True))
        for part in parts.get("timestamped", ()):
            times = [int(time) for time in part["times"]]
            life.samples.setdefault(part["channel"], []).extend(zip(times, doubles(*part["values"]), strict=True))
        for part in parts.get("rows", ()):
            for channel, value in zip(part["channels"], part["values"], strict=True):
                life.samples.setdefault(channel, []).append((part["time"], *doubles(value)))
        life.events += [(part["time"], part["text"]) for part in parts.get("events", ())]

    def _part(self, kind: str, session: str) -> dict[str, Any]:
        chance = self.chance
        channel = chance.randrange(3)
        start = self._clock.get((session, channel), T0) + MS * chance.choice((0, 0, 0, 7, -20))
        values = [float(chance.randrange(1000)) for _ in range(chance.choice((1, 2, 5, 400)))]
        self._clock[session, channel] = start + len(values) * MS
        if kind == "events":
            return {"id": 1, "app": "x", "time": start, "text": f"e{start}"}
        if kind == "rows":
            return {"channels": [channel, channel + 3], "time": start, "values": [values[0], 7]}
        if kind == "timestamped":
            return {"channel": channel, "times": [str(start + i * MS) for i in range(len(values))], "values": values}
        return {"channel": channel, "start": start, "interval": MS, "values": values}
