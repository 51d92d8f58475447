"""The messages of the RTA telemetry protocol, defined in ``data.proto`` and ``stream.proto``.

``make protos`` generates the modules beside them. ``views/sessions/burst.py`` builds messages, and
``views/sessions/samples.py`` decodes them.
"""

from __future__ import annotations

from tailrace.views.sessions.rta.data_pb2 import (
    Event,
    EventsList,
    PeriodicData,
    PeriodicDataList,
    RowData,
    RowDataList,
    TimestampedData,
    TimestampedDataList,
)
from tailrace.views.sessions.rta.stream_pb2 import (
    StreamData,
    StreamDataBurst,
    StreamRequest,
    StreamSubscription,
    StreamTimeRange,
)

__all__ = [
    "Event",
    "EventsList",
    "PeriodicData",
    "PeriodicDataList",
    "RowData",
    "RowDataList",
    "StreamData",
    "StreamDataBurst",
    "StreamRequest",
    "StreamSubscription",
    "StreamTimeRange",
    "TimestampedData",
    "TimestampedDataList",
]
