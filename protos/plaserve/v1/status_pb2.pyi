import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("version", "model", "backend", "policy", "bundle_id", "uptime_duration", "draining", "submitted_count", "outcome_counts", "queued_count", "running_count", "lanes", "instances", "window_duration", "depth_tokens", "boundary_tokens", "knee_tokens")
    class OutcomeCountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_ID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_DURATION_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_COUNTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_COUNT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_COUNT_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    WINDOW_DURATION_FIELD_NUMBER: _ClassVar[int]
    DEPTH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KNEE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    version: str
    model: str
    backend: str
    policy: str
    bundle_id: str
    uptime_duration: _duration_pb2.Duration
    draining: bool
    submitted_count: int
    outcome_counts: _containers.ScalarMap[str, int]
    queued_count: int
    running_count: int
    lanes: _containers.RepeatedCompositeFieldContainer[LaneStatus]
    instances: _containers.RepeatedCompositeFieldContainer[InstanceStatus]
    window_duration: _duration_pb2.Duration
    depth_tokens: int
    boundary_tokens: int
    knee_tokens: int
    def __init__(self, version: _Optional[str] = ..., model: _Optional[str] = ..., backend: _Optional[str] = ..., policy: _Optional[str] = ..., bundle_id: _Optional[str] = ..., uptime_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., draining: _Optional[bool] = ..., submitted_count: _Optional[int] = ..., outcome_counts: _Optional[_Mapping[str, int]] = ..., queued_count: _Optional[int] = ..., running_count: _Optional[int] = ..., lanes: _Optional[_Iterable[_Union[LaneStatus, _Mapping]]] = ..., instances: _Optional[_Iterable[_Union[InstanceStatus, _Mapping]]] = ..., window_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., depth_tokens: _Optional[int] = ..., boundary_tokens: _Optional[int] = ..., knee_tokens: _Optional[int] = ...) -> None: ...

class LaneStatus(_message.Message):
    __slots__ = ("lane", "queued_count", "queued_token_count")
    LANE_FIELD_NUMBER: _ClassVar[int]
    QUEUED_COUNT_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    lane: str
    queued_count: int
    queued_token_count: int
    def __init__(self, lane: _Optional[str] = ..., queued_count: _Optional[int] = ..., queued_token_count: _Optional[int] = ...) -> None: ...

class InstanceStatus(_message.Message):
    __slots__ = ("instance_id", "state", "pass_count", "decoding_count", "kv_blocks_total", "kv_blocks_free", "kv_blocks_cached")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PASS_COUNT_FIELD_NUMBER: _ClassVar[int]
    DECODING_COUNT_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    state: str
    pass_count: int
    decoding_count: int
    kv_blocks_total: int
    kv_blocks_free: int
    kv_blocks_cached: int
    def __init__(self, instance_id: _Optional[str] = ..., state: _Optional[str] = ..., pass_count: _Optional[int] = ..., decoding_count: _Optional[int] = ..., kv_blocks_total: _Optional[int] = ..., kv_blocks_free: _Optional[int] = ..., kv_blocks_cached: _Optional[int] = ...) -> None: ...
