from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TimestampedData(_message.Message):
    __slots__ = ("channel_id", "start_timestamp", "timestamp_deltas_scale", "timestamp_deltas", "buffer")
    CHANNEL_ID_FIELD_NUMBER: _ClassVar[int]
    START_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_DELTAS_SCALE_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_DELTAS_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    channel_id: int
    start_timestamp: int
    timestamp_deltas_scale: int
    timestamp_deltas: _containers.RepeatedScalarFieldContainer[int]
    buffer: bytes
    def __init__(self, channel_id: _Optional[int] = ..., start_timestamp: _Optional[int] = ..., timestamp_deltas_scale: _Optional[int] = ..., timestamp_deltas: _Optional[_Iterable[int]] = ..., buffer: _Optional[bytes] = ...) -> None: ...

class PeriodicData(_message.Message):
    __slots__ = ("channel_id", "start_timestamp", "interval", "samples", "buffer")
    CHANNEL_ID_FIELD_NUMBER: _ClassVar[int]
    START_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    channel_id: int
    start_timestamp: int
    interval: int
    samples: int
    buffer: bytes
    def __init__(self, channel_id: _Optional[int] = ..., start_timestamp: _Optional[int] = ..., interval: _Optional[int] = ..., samples: _Optional[int] = ..., buffer: _Optional[bytes] = ...) -> None: ...

class RowData(_message.Message):
    __slots__ = ("channel_ids", "timestamp", "buffer")
    CHANNEL_IDS_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    channel_ids: _containers.RepeatedScalarFieldContainer[int]
    timestamp: int
    buffer: bytes
    def __init__(self, channel_ids: _Optional[_Iterable[int]] = ..., timestamp: _Optional[int] = ..., buffer: _Optional[bytes] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("event_definition_id", "app_name", "timestamp", "status_text", "raw_data")
    EVENT_DEFINITION_ID_FIELD_NUMBER: _ClassVar[int]
    APP_NAME_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    STATUS_TEXT_FIELD_NUMBER: _ClassVar[int]
    RAW_DATA_FIELD_NUMBER: _ClassVar[int]
    event_definition_id: int
    app_name: str
    timestamp: int
    status_text: str
    raw_data: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, event_definition_id: _Optional[int] = ..., app_name: _Optional[str] = ..., timestamp: _Optional[int] = ..., status_text: _Optional[str] = ..., raw_data: _Optional[_Iterable[float]] = ...) -> None: ...

class EventsList(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    def __init__(self, events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ...) -> None: ...

class RowDataList(_message.Message):
    __slots__ = ("row_data",)
    ROW_DATA_FIELD_NUMBER: _ClassVar[int]
    row_data: _containers.RepeatedCompositeFieldContainer[RowData]
    def __init__(self, row_data: _Optional[_Iterable[_Union[RowData, _Mapping]]] = ...) -> None: ...

class PeriodicDataList(_message.Message):
    __slots__ = ("periodic_data",)
    PERIODIC_DATA_FIELD_NUMBER: _ClassVar[int]
    periodic_data: _containers.RepeatedCompositeFieldContainer[PeriodicData]
    def __init__(self, periodic_data: _Optional[_Iterable[_Union[PeriodicData, _Mapping]]] = ...) -> None: ...

class TimestampedDataList(_message.Message):
    __slots__ = ("timestamped_data",)
    TIMESTAMPED_DATA_FIELD_NUMBER: _ClassVar[int]
    timestamped_data: _containers.RepeatedCompositeFieldContainer[TimestampedData]
    def __init__(self, timestamped_data: _Optional[_Iterable[_Union[TimestampedData, _Mapping]]] = ...) -> None: ...
