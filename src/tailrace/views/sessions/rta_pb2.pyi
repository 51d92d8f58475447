from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StreamDataBurst(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: _containers.RepeatedCompositeFieldContainer[StreamData]
    def __init__(self, data: _Optional[_Iterable[_Union[StreamData, _Mapping]]] = ...) -> None: ...

class StreamData(_message.Message):
    __slots__ = ("session_json", "time_range", "timestamped_data", "periodic_data", "row_data", "event")
    SESSION_JSON_FIELD_NUMBER: _ClassVar[int]
    TIME_RANGE_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMPED_DATA_FIELD_NUMBER: _ClassVar[int]
    PERIODIC_DATA_FIELD_NUMBER: _ClassVar[int]
    ROW_DATA_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    session_json: str
    time_range: StreamTimeRange
    timestamped_data: TimestampedData
    periodic_data: PeriodicData
    row_data: RowData
    event: Event
    def __init__(self, session_json: _Optional[str] = ..., time_range: _Optional[_Union[StreamTimeRange, _Mapping]] = ..., timestamped_data: _Optional[_Union[TimestampedData, _Mapping]] = ..., periodic_data: _Optional[_Union[PeriodicData, _Mapping]] = ..., row_data: _Optional[_Union[RowData, _Mapping]] = ..., event: _Optional[_Union[Event, _Mapping]] = ...) -> None: ...

class StreamTimeRange(_message.Message):
    __slots__ = ("start_time", "end_time")
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    END_TIME_FIELD_NUMBER: _ClassVar[int]
    start_time: int
    end_time: int
    def __init__(self, start_time: _Optional[int] = ..., end_time: _Optional[int] = ...) -> None: ...

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

class StreamRequest(_message.Message):
    __slots__ = ("subscribe",)
    SUBSCRIBE_FIELD_NUMBER: _ClassVar[int]
    subscribe: StreamSubscription
    def __init__(self, subscribe: _Optional[_Union[StreamSubscription, _Mapping]] = ...) -> None: ...

class StreamSubscription(_message.Message):
    __slots__ = ("all_events", "all_data_channels", "data_channel_ids")
    ALL_EVENTS_FIELD_NUMBER: _ClassVar[int]
    ALL_DATA_CHANNELS_FIELD_NUMBER: _ClassVar[int]
    DATA_CHANNEL_IDS_FIELD_NUMBER: _ClassVar[int]
    all_events: bool
    all_data_channels: bool
    data_channel_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, all_events: _Optional[bool] = ..., all_data_channels: _Optional[bool] = ..., data_channel_ids: _Optional[_Iterable[int]] = ...) -> None: ...
