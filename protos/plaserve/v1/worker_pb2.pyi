import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from protos.plaserve.v1 import fleet_pb2 as _fleet_pb2
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
    __slots__ = ("epoch", "hello", "dispatch", "revoke", "abort", "settle", "sequence", "acknowledged")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_FIELD_NUMBER: _ClassVar[int]
    REVOKE_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    SETTLE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    hello: Hello
    dispatch: DispatchPass
    revoke: RevokePass
    abort: AbortRequest
    settle: Settle
    sequence: int
    acknowledged: int
    def __init__(self, epoch: _Optional[int] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., dispatch: _Optional[_Union[DispatchPass, _Mapping]] = ..., revoke: _Optional[_Union[RevokePass, _Mapping]] = ..., abort: _Optional[_Union[AbortRequest, _Mapping]] = ..., settle: _Optional[_Union[Settle, _Mapping]] = ..., sequence: _Optional[int] = ..., acknowledged: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("scheduler_id", "protocol_version", "incarnation", "attempt", "resume", "shard")
    SCHEDULER_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    scheduler_id: str
    protocol_version: int
    incarnation: int
    attempt: int
    resume: bool
    shard: str
    def __init__(self, scheduler_id: _Optional[str] = ..., protocol_version: _Optional[int] = ..., incarnation: _Optional[int] = ..., attempt: _Optional[int] = ..., resume: _Optional[bool] = ..., shard: _Optional[str] = ...) -> None: ...

class Settle(_message.Message):
    __slots__ = ("keep_request_ids",)
    KEEP_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    keep_request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, keep_request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class DispatchPass(_message.Message):
    __slots__ = ("pass_id", "kind", "items", "staged", "new_requests", "layer_block", "layer_blocks")
    PASS_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    NEW_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    LAYER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    LAYER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    pass_id: int
    kind: PassKind
    items: _containers.RepeatedCompositeFieldContainer[PassItem]
    staged: bool
    new_requests: _containers.RepeatedCompositeFieldContainer[WorkerRequest]
    layer_block: int
    layer_blocks: int
    def __init__(self, pass_id: _Optional[int] = ..., kind: _Optional[_Union[PassKind, str]] = ..., items: _Optional[_Iterable[_Union[PassItem, _Mapping]]] = ..., staged: _Optional[bool] = ..., new_requests: _Optional[_Iterable[_Union[WorkerRequest, _Mapping]]] = ..., layer_block: _Optional[int] = ..., layer_blocks: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("request_id", "token_ids", "max_new_tokens", "retain", "front_end", "engine_sampling", "trace_context")
    class TraceContextEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETAIN_FIELD_NUMBER: _ClassVar[int]
    FRONT_END_FIELD_NUMBER: _ClassVar[int]
    ENGINE_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TRACE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_new_tokens: int
    retain: bool
    front_end: str
    engine_sampling: EngineSampling
    trace_context: _containers.ScalarMap[str, str]
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., max_new_tokens: _Optional[int] = ..., retain: _Optional[bool] = ..., front_end: _Optional[str] = ..., engine_sampling: _Optional[_Union[EngineSampling, _Mapping]] = ..., trace_context: _Optional[_Mapping[str, str]] = ...) -> None: ...

class EngineSampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "seed", "ignore_eos")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    seed: int
    ignore_eos: bool
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., ignore_eos: _Optional[bool] = ...) -> None: ...

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

class DrainRequest(_message.Message):
    __slots__ = ("timeout", "by")
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    timeout: _duration_pb2.Duration
    by: str
    def __init__(self, timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., by: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("unfinished_count",)
    UNFINISHED_COUNT_FIELD_NUMBER: _ClassVar[int]
    unfinished_count: int
    def __init__(self, unfinished_count: _Optional[int] = ...) -> None: ...

class ControlResponse(_message.Message):
    __slots__ = ("epoch", "ready", "started", "finished", "failed", "revoked", "statistics", "kv_events", "stale_epoch", "progress", "settled", "role_changed", "front_end_cut", "instance_failed", "draining", "sequence", "acknowledged")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_FIELD_NUMBER: _ClassVar[int]
    STALE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    ROLE_CHANGED_FIELD_NUMBER: _ClassVar[int]
    FRONT_END_CUT_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FAILED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    ready: WorkerReady
    started: PassStarted
    finished: PassFinished
    failed: PassFailed
    revoked: PassRevoked
    statistics: WorkerStatistics
    kv_events: KvEvents
    stale_epoch: StaleEpoch
    progress: Progress
    settled: Settled
    role_changed: RoleChanged
    front_end_cut: FrontEndCut
    instance_failed: InstanceFailed
    draining: WorkerDraining
    sequence: int
    acknowledged: int
    def __init__(self, epoch: _Optional[int] = ..., ready: _Optional[_Union[WorkerReady, _Mapping]] = ..., started: _Optional[_Union[PassStarted, _Mapping]] = ..., finished: _Optional[_Union[PassFinished, _Mapping]] = ..., failed: _Optional[_Union[PassFailed, _Mapping]] = ..., revoked: _Optional[_Union[PassRevoked, _Mapping]] = ..., statistics: _Optional[_Union[WorkerStatistics, _Mapping]] = ..., kv_events: _Optional[_Union[KvEvents, _Mapping]] = ..., stale_epoch: _Optional[_Union[StaleEpoch, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., settled: _Optional[_Union[Settled, _Mapping]] = ..., role_changed: _Optional[_Union[RoleChanged, _Mapping]] = ..., front_end_cut: _Optional[_Union[FrontEndCut, _Mapping]] = ..., instance_failed: _Optional[_Union[InstanceFailed, _Mapping]] = ..., draining: _Optional[_Union[WorkerDraining, _Mapping]] = ..., sequence: _Optional[int] = ..., acknowledged: _Optional[int] = ...) -> None: ...

class WorkerReady(_message.Message):
    __slots__ = ("instance_id", "manifest_json", "capabilities_json", "profiles_json", "cost_json", "role", "boot_id", "protocol_version", "resumed", "running_pass_id", "held_request_ids", "statistics")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_JSON_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_JSON_FIELD_NUMBER: _ClassVar[int]
    PROFILES_JSON_FIELD_NUMBER: _ClassVar[int]
    COST_JSON_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_PASS_ID_FIELD_NUMBER: _ClassVar[int]
    HELD_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    manifest_json: str
    capabilities_json: str
    profiles_json: str
    cost_json: str
    role: _fleet_pb2.Role
    boot_id: str
    protocol_version: int
    resumed: bool
    running_pass_id: int
    held_request_ids: _containers.RepeatedScalarFieldContainer[str]
    statistics: WorkerStatistics
    def __init__(self, instance_id: _Optional[str] = ..., manifest_json: _Optional[str] = ..., capabilities_json: _Optional[str] = ..., profiles_json: _Optional[str] = ..., cost_json: _Optional[str] = ..., role: _Optional[_Union[_fleet_pb2.Role, str]] = ..., boot_id: _Optional[str] = ..., protocol_version: _Optional[int] = ..., resumed: _Optional[bool] = ..., running_pass_id: _Optional[int] = ..., held_request_ids: _Optional[_Iterable[str]] = ..., statistics: _Optional[_Union[WorkerStatistics, _Mapping]] = ...) -> None: ...

class Settled(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Progress(_message.Message):
    __slots__ = ("running_pass_id", "running_duration", "statistics")
    RUNNING_PASS_ID_FIELD_NUMBER: _ClassVar[int]
    RUNNING_DURATION_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    running_pass_id: int
    running_duration: _duration_pb2.Duration
    statistics: WorkerStatistics
    def __init__(self, running_pass_id: _Optional[int] = ..., running_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., statistics: _Optional[_Union[WorkerStatistics, _Mapping]] = ...) -> None: ...

class RoleChanged(_message.Message):
    __slots__ = ("role",)
    ROLE_FIELD_NUMBER: _ClassVar[int]
    role: _fleet_pb2.Role
    def __init__(self, role: _Optional[_Union[_fleet_pb2.Role, str]] = ...) -> None: ...

class FrontEndCut(_message.Message):
    __slots__ = ("front_end", "request_ids", "reason")
    FRONT_END_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    front_end: str
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    def __init__(self, front_end: _Optional[str] = ..., request_ids: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ...) -> None: ...

class InstanceFailed(_message.Message):
    __slots__ = ("error", "moved")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    error: str
    moved: bool
    def __init__(self, error: _Optional[str] = ..., moved: _Optional[bool] = ...) -> None: ...

class WorkerDraining(_message.Message):
    __slots__ = ("reason", "over")
    REASON_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    reason: str
    over: bool
    def __init__(self, reason: _Optional[str] = ..., over: _Optional[bool] = ...) -> None: ...

class PassStarted(_message.Message):
    __slots__ = ("pass_id",)
    PASS_ID_FIELD_NUMBER: _ClassVar[int]
    pass_id: int
    def __init__(self, pass_id: _Optional[int] = ...) -> None: ...

class PassFinished(_message.Message):
    __slots__ = ("pass_id", "items", "executed_token_count", "executed_history_count", "elapsed_duration", "kind", "ran")
    PASS_ID_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    EXECUTED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    EXECUTED_HISTORY_COUNT_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_DURATION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    RAN_FIELD_NUMBER: _ClassVar[int]
    pass_id: int
    items: _containers.RepeatedCompositeFieldContainer[ItemResult]
    executed_token_count: int
    executed_history_count: int
    elapsed_duration: _duration_pb2.Duration
    kind: PassKind
    ran: Ran
    def __init__(self, pass_id: _Optional[int] = ..., items: _Optional[_Iterable[_Union[ItemResult, _Mapping]]] = ..., executed_token_count: _Optional[int] = ..., executed_history_count: _Optional[int] = ..., elapsed_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., kind: _Optional[_Union[PassKind, str]] = ..., ran: _Optional[_Union[Ran, _Mapping]] = ...) -> None: ...

class Ran(_message.Message):
    __slots__ = ("iteration_count", "request_count", "token_count")
    ITERATION_COUNT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    iteration_count: int
    request_count: int
    token_count: int
    def __init__(self, iteration_count: _Optional[int] = ..., request_count: _Optional[int] = ..., token_count: _Optional[int] = ...) -> None: ...

class ItemResult(_message.Message):
    __slots__ = ("request_id", "position", "computed_token_count", "reused_token_count", "finish_reason", "error", "has_token")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    HAS_TOKEN_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    position: int
    computed_token_count: int
    reused_token_count: int
    finish_reason: _inference_pb2.FinishReason
    error: str
    has_token: bool
    def __init__(self, request_id: _Optional[str] = ..., position: _Optional[int] = ..., computed_token_count: _Optional[int] = ..., reused_token_count: _Optional[int] = ..., finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., error: _Optional[str] = ..., has_token: _Optional[bool] = ...) -> None: ...

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
    __slots__ = ("kv_blocks_total", "kv_blocks_free", "kv_blocks_cached", "live_request_count", "pass_count", "incidents")
    KV_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    LIVE_REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    PASS_COUNT_FIELD_NUMBER: _ClassVar[int]
    INCIDENTS_FIELD_NUMBER: _ClassVar[int]
    kv_blocks_total: int
    kv_blocks_free: int
    kv_blocks_cached: int
    live_request_count: int
    pass_count: int
    incidents: _containers.RepeatedCompositeFieldContainer[Incident]
    def __init__(self, kv_blocks_total: _Optional[int] = ..., kv_blocks_free: _Optional[int] = ..., kv_blocks_cached: _Optional[int] = ..., live_request_count: _Optional[int] = ..., pass_count: _Optional[int] = ..., incidents: _Optional[_Iterable[_Union[Incident, _Mapping]]] = ...) -> None: ...

class Incident(_message.Message):
    __slots__ = ("name", "count")
    NAME_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    name: str
    count: int
    def __init__(self, name: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("highest_epoch", "reason")
    HIGHEST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    highest_epoch: int
    reason: str
    def __init__(self, highest_epoch: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class StreamTokensRequest(_message.Message):
    __slots__ = ("front_end", "boot_id", "positions", "acknowledged", "credit_count")
    FRONT_END_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    CREDIT_COUNT_FIELD_NUMBER: _ClassVar[int]
    front_end: str
    boot_id: str
    positions: _containers.RepeatedCompositeFieldContainer[TokenPosition]
    acknowledged: int
    credit_count: int
    def __init__(self, front_end: _Optional[str] = ..., boot_id: _Optional[str] = ..., positions: _Optional[_Iterable[_Union[TokenPosition, _Mapping]]] = ..., acknowledged: _Optional[int] = ..., credit_count: _Optional[int] = ...) -> None: ...

class TokenPosition(_message.Message):
    __slots__ = ("request_id", "token_count")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_count: int
    def __init__(self, request_id: _Optional[str] = ..., token_count: _Optional[int] = ...) -> None: ...

class StreamTokensResponse(_message.Message):
    __slots__ = ("deltas", "sequence", "boot_id")
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    deltas: _containers.RepeatedCompositeFieldContainer[TokenDelta]
    sequence: int
    boot_id: str
    def __init__(self, deltas: _Optional[_Iterable[_Union[TokenDelta, _Mapping]]] = ..., sequence: _Optional[int] = ..., boot_id: _Optional[str] = ...) -> None: ...

class TokenDelta(_message.Message):
    __slots__ = ("request_id", "token_ids", "finish_reason", "first_index")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: _inference_pb2.FinishReason
    first_index: int
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., first_index: _Optional[int] = ...) -> None: ...
