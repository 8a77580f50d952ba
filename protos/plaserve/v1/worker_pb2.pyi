import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from protos.plaserve.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PassKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PASS_KIND_UNSPECIFIED: _ClassVar[PassKind]
    PASS_KIND_PREFILL: _ClassVar[PassKind]
    PASS_KIND_DECODE: _ClassVar[PassKind]
PASS_KIND_UNSPECIFIED: PassKind
PASS_KIND_PREFILL: PassKind
PASS_KIND_DECODE: PassKind

class ControlRequest(_message.Message):
    __slots__ = ("epoch", "hello", "dispatch", "revoke", "abort", "drain")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_FIELD_NUMBER: _ClassVar[int]
    REVOKE_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    hello: Hello
    dispatch: DispatchPass
    revoke: RevokePass
    abort: AbortRequest
    drain: Drain
    def __init__(self, epoch: _Optional[int] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., dispatch: _Optional[_Union[DispatchPass, _Mapping]] = ..., revoke: _Optional[_Union[RevokePass, _Mapping]] = ..., abort: _Optional[_Union[AbortRequest, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("scheduler_id",)
    SCHEDULER_ID_FIELD_NUMBER: _ClassVar[int]
    scheduler_id: str
    def __init__(self, scheduler_id: _Optional[str] = ...) -> None: ...

class DispatchPass(_message.Message):
    __slots__ = ("pass_id", "kind", "items", "staged", "new_requests")
    PASS_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    NEW_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    pass_id: int
    kind: PassKind
    items: _containers.RepeatedCompositeFieldContainer[PassItem]
    staged: bool
    new_requests: _containers.RepeatedCompositeFieldContainer[WorkerRequest]
    def __init__(self, pass_id: _Optional[int] = ..., kind: _Optional[_Union[PassKind, str]] = ..., items: _Optional[_Iterable[_Union[PassItem, _Mapping]]] = ..., staged: _Optional[bool] = ..., new_requests: _Optional[_Iterable[_Union[WorkerRequest, _Mapping]]] = ...) -> None: ...

class PassItem(_message.Message):
    __slots__ = ("request_id", "new_token_count", "history_token_count")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NEW_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    HISTORY_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    new_token_count: int
    history_token_count: int
    def __init__(self, request_id: _Optional[str] = ..., new_token_count: _Optional[int] = ..., history_token_count: _Optional[int] = ...) -> None: ...

class WorkerRequest(_message.Message):
    __slots__ = ("request_id", "token_ids", "max_new_tokens", "sampling", "retain", "front_end")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    RETAIN_FIELD_NUMBER: _ClassVar[int]
    FRONT_END_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_new_tokens: int
    sampling: _inference_pb2.Sampling
    retain: bool
    front_end: str
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., max_new_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_inference_pb2.Sampling, _Mapping]] = ..., retain: _Optional[bool] = ..., front_end: _Optional[str] = ...) -> None: ...

class RevokePass(_message.Message):
    __slots__ = ("pass_id",)
    PASS_ID_FIELD_NUMBER: _ClassVar[int]
    pass_id: int
    def __init__(self, pass_id: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("timeout",)
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    timeout: _duration_pb2.Duration
    def __init__(self, timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ControlResponse(_message.Message):
    __slots__ = ("epoch", "ready", "started", "finished", "failed", "revoked", "statistics", "kv_events", "stale_epoch")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_FIELD_NUMBER: _ClassVar[int]
    STALE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    ready: WorkerReady
    started: PassStarted
    finished: PassFinished
    failed: PassFailed
    revoked: PassRevoked
    statistics: WorkerStatistics
    kv_events: KvEvents
    stale_epoch: StaleEpoch
    def __init__(self, epoch: _Optional[int] = ..., ready: _Optional[_Union[WorkerReady, _Mapping]] = ..., started: _Optional[_Union[PassStarted, _Mapping]] = ..., finished: _Optional[_Union[PassFinished, _Mapping]] = ..., failed: _Optional[_Union[PassFailed, _Mapping]] = ..., revoked: _Optional[_Union[PassRevoked, _Mapping]] = ..., statistics: _Optional[_Union[WorkerStatistics, _Mapping]] = ..., kv_events: _Optional[_Union[KvEvents, _Mapping]] = ..., stale_epoch: _Optional[_Union[StaleEpoch, _Mapping]] = ...) -> None: ...

class WorkerReady(_message.Message):
    __slots__ = ("instance_id", "manifest_json", "capabilities_json")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_JSON_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_JSON_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    manifest_json: str
    capabilities_json: str
    def __init__(self, instance_id: _Optional[str] = ..., manifest_json: _Optional[str] = ..., capabilities_json: _Optional[str] = ...) -> None: ...

class PassStarted(_message.Message):
    __slots__ = ("pass_id",)
    PASS_ID_FIELD_NUMBER: _ClassVar[int]
    pass_id: int
    def __init__(self, pass_id: _Optional[int] = ...) -> None: ...

class PassFinished(_message.Message):
    __slots__ = ("pass_id", "items", "executed_token_count", "executed_history_count", "elapsed_duration")
    PASS_ID_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    EXECUTED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    EXECUTED_HISTORY_COUNT_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_DURATION_FIELD_NUMBER: _ClassVar[int]
    pass_id: int
    items: _containers.RepeatedCompositeFieldContainer[ItemResult]
    executed_token_count: int
    executed_history_count: int
    elapsed_duration: _duration_pb2.Duration
    def __init__(self, pass_id: _Optional[int] = ..., items: _Optional[_Iterable[_Union[ItemResult, _Mapping]]] = ..., executed_token_count: _Optional[int] = ..., executed_history_count: _Optional[int] = ..., elapsed_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ItemResult(_message.Message):
    __slots__ = ("request_id", "position", "computed_token_count", "reused_token_count", "token_id", "finish_reason", "error")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    position: int
    computed_token_count: int
    reused_token_count: int
    token_id: int
    finish_reason: _inference_pb2.FinishReason
    error: str
    def __init__(self, request_id: _Optional[str] = ..., position: _Optional[int] = ..., computed_token_count: _Optional[int] = ..., reused_token_count: _Optional[int] = ..., token_id: _Optional[int] = ..., finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., error: _Optional[str] = ...) -> None: ...

class PassFailed(_message.Message):
    __slots__ = ("pass_id", "error", "lost_request_ids")
    PASS_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LOST_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    pass_id: int
    error: str
    lost_request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, pass_id: _Optional[int] = ..., error: _Optional[str] = ..., lost_request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class PassRevoked(_message.Message):
    __slots__ = ("pass_id",)
    PASS_ID_FIELD_NUMBER: _ClassVar[int]
    pass_id: int
    def __init__(self, pass_id: _Optional[int] = ...) -> None: ...

class WorkerStatistics(_message.Message):
    __slots__ = ("kv_blocks_total", "kv_blocks_free", "kv_blocks_cached", "live_request_count", "pass_count")
    KV_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    LIVE_REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    PASS_COUNT_FIELD_NUMBER: _ClassVar[int]
    kv_blocks_total: int
    kv_blocks_free: int
    kv_blocks_cached: int
    live_request_count: int
    pass_count: int
    def __init__(self, kv_blocks_total: _Optional[int] = ..., kv_blocks_free: _Optional[int] = ..., kv_blocks_cached: _Optional[int] = ..., live_request_count: _Optional[int] = ..., pass_count: _Optional[int] = ...) -> None: ...

class KvEvents(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[KvEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[KvEvent, _Mapping]]] = ...) -> None: ...

class KvEvent(_message.Message):
    __slots__ = ("removed", "block_hashes")
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    removed: bool
    block_hashes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, removed: _Optional[bool] = ..., block_hashes: _Optional[_Iterable[int]] = ...) -> None: ...

class StaleEpoch(_message.Message):
    __slots__ = ("highest_epoch",)
    HIGHEST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    highest_epoch: int
    def __init__(self, highest_epoch: _Optional[int] = ...) -> None: ...

class StreamTokensRequest(_message.Message):
    __slots__ = ("front_end",)
    FRONT_END_FIELD_NUMBER: _ClassVar[int]
    front_end: str
    def __init__(self, front_end: _Optional[str] = ...) -> None: ...

class StreamTokensResponse(_message.Message):
    __slots__ = ("deltas",)
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    deltas: _containers.RepeatedCompositeFieldContainer[TokenDelta]
    def __init__(self, deltas: _Optional[_Iterable[_Union[TokenDelta, _Mapping]]] = ...) -> None: ...

class TokenDelta(_message.Message):
    __slots__ = ("request_id", "token_ids", "finish_reason")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: _inference_pb2.FinishReason
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ...) -> None: ...
