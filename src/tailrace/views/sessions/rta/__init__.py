"""The messages of the telemetry protocol, as ``data.proto`` and ``stream.proto`` write them down.

The code beside them is made by ``make protos``. Rules about messages are elsewhere: how they are made and cut in
``views/sessions/burst.py``, how they are read in ``views/sessions/samples.py``.
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
