import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from protos.plaserve.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetLoadRequest(_message.Message):
    __slots__ = ("observer_id",)
    OBSERVER_ID_FIELD_NUMBER: _ClassVar[int]
    observer_id: str
    def __init__(self, observer_id: _Optional[str] = ...) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("epoch", "active", "instances", "short_requests_per_s", "long_requests_per_s", "short_work_s_per_s", "long_work_s_per_s", "arrival_count", "first_look")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    SHORT_REQUESTS_PER_S_FIELD_NUMBER: _ClassVar[int]
    LONG_REQUESTS_PER_S_FIELD_NUMBER: _ClassVar[int]
    SHORT_WORK_S_PER_S_FIELD_NUMBER: _ClassVar[int]
    LONG_WORK_S_PER_S_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_COUNT_FIELD_NUMBER: _ClassVar[int]
    FIRST_LOOK_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    active: bool
    instances: _containers.RepeatedCompositeFieldContainer[InstanceLoad]
    short_requests_per_s: float
    long_requests_per_s: float
    short_work_s_per_s: float
    long_work_s_per_s: float
    arrival_count: int
    first_look: bool
    def __init__(self, epoch: _Optional[int] = ..., active: _Optional[bool] = ..., instances: _Optional[_Iterable[_Union[InstanceLoad, _Mapping]]] = ..., short_requests_per_s: _Optional[float] = ..., long_requests_per_s: _Optional[float] = ..., short_work_s_per_s: _Optional[float] = ..., long_work_s_per_s: _Optional[float] = ..., arrival_count: _Optional[int] = ..., first_look: _Optional[bool] = ...) -> None: ...

class InstanceLoad(_message.Message):
    __slots__ = ("instance_id", "role", "backlog_s", "at_risk_ratio", "utilisation", "waiting_count", "cached_s")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_S_FIELD_NUMBER: _ClassVar[int]
    AT_RISK_RATIO_FIELD_NUMBER: _ClassVar[int]
    UTILISATION_FIELD_NUMBER: _ClassVar[int]
    WAITING_COUNT_FIELD_NUMBER: _ClassVar[int]
    CACHED_S_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    role: str
    backlog_s: float
    at_risk_ratio: float
    utilisation: float
    waiting_count: int
    cached_s: float
    def __init__(self, instance_id: _Optional[str] = ..., role: _Optional[str] = ..., backlog_s: _Optional[float] = ..., at_risk_ratio: _Optional[float] = ..., utilisation: _Optional[float] = ..., waiting_count: _Optional[int] = ..., cached_s: _Optional[float] = ...) -> None: ...

class FrontEndMessage(_message.Message):
    __slots__ = ("hello", "submit", "cancel")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    hello: FrontEndHello
    submit: SubmitRequest
    cancel: CancelRequest
    def __init__(self, hello: _Optional[_Union[FrontEndHello, _Mapping]] = ..., submit: _Optional[_Union[SubmitRequest, _Mapping]] = ..., cancel: _Optional[_Union[CancelRequest, _Mapping]] = ...) -> None: ...

class FrontEndHello(_message.Message):
    __slots__ = ("front_end_id", "token_address")
    FRONT_END_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    front_end_id: str
    token_address: str
    def __init__(self, front_end_id: _Optional[str] = ..., token_address: _Optional[str] = ...) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("request_id", "token_ids", "block_hashes", "max_new_tokens", "sampling", "retain", "age", "ttft_target", "time_left", "deadline_free", "priority", "tenant", "session", "trace_context")
    class TraceContextEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    RETAIN_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    TTFT_TARGET_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FREE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TRACE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[int]
    max_new_tokens: int
    sampling: _inference_pb2.Sampling
    retain: bool
    age: _duration_pb2.Duration
    ttft_target: _duration_pb2.Duration
    time_left: _duration_pb2.Duration
    deadline_free: bool
    priority: int
    tenant: str
    session: str
    trace_context: _containers.ScalarMap[str, str]
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., block_hashes: _Optional[_Iterable[int]] = ..., max_new_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_inference_pb2.Sampling, _Mapping]] = ..., retain: _Optional[bool] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., ttft_target: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., time_left: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., deadline_free: _Optional[bool] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., session: _Optional[str] = ..., trace_context: _Optional[_Mapping[str, str]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_id", "finished")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    finished: bool
    def __init__(self, request_id: _Optional[str] = ..., finished: _Optional[bool] = ...) -> None: ...

class SchedulerMessage(_message.Message):
    __slots__ = ("epoch", "welcome", "accepted", "placed", "tokens", "ended")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    PLACED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    welcome: SchedulerWelcome
    accepted: RequestAccepted
    placed: RequestPlaced
    tokens: RequestTokens
    ended: RequestEnded
    def __init__(self, epoch: _Optional[int] = ..., welcome: _Optional[_Union[SchedulerWelcome, _Mapping]] = ..., accepted: _Optional[_Union[RequestAccepted, _Mapping]] = ..., placed: _Optional[_Union[RequestPlaced, _Mapping]] = ..., tokens: _Optional[_Union[RequestTokens, _Mapping]] = ..., ended: _Optional[_Union[RequestEnded, _Mapping]] = ...) -> None: ...

class SchedulerWelcome(_message.Message):
    __slots__ = ("scheduler_id", "model", "backend", "policy", "bundle_id", "capabilities_json", "active")
    SCHEDULER_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_ID_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_JSON_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    scheduler_id: str
    model: str
    backend: str
    policy: str
    bundle_id: str
    capabilities_json: str
    active: bool
    def __init__(self, scheduler_id: _Optional[str] = ..., model: _Optional[str] = ..., backend: _Optional[str] = ..., policy: _Optional[str] = ..., bundle_id: _Optional[str] = ..., capabilities_json: _Optional[str] = ..., active: _Optional[bool] = ...) -> None: ...

class RequestAccepted(_message.Message):
    __slots__ = ("request_id", "lane", "ttft_target")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    TTFT_TARGET_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    lane: _inference_pb2.Lane
    ttft_target: _duration_pb2.Duration
    def __init__(self, request_id: _Optional[str] = ..., lane: _Optional[_Union[_inference_pb2.Lane, str]] = ..., ttft_target: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RequestPlaced(_message.Message):
    __slots__ = ("request_id", "instance_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    instance_id: str
    def __init__(self, request_id: _Optional[str] = ..., instance_id: _Optional[str] = ...) -> None: ...

class RequestTokens(_message.Message):
    __slots__ = ("request_id", "first_index", "token_ids")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    first_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., first_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class RequestEnded(_message.Message):
    __slots__ = ("request_id", "outcome", "reason", "detail", "finish_reason", "retry_after", "output_token_count", "new_token_count", "history_token_count", "pass_ids", "dispatch_reason", "first_pass_start", "prefill_end", "first_pass")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    NEW_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    HISTORY_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    PASS_IDS_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_REASON_FIELD_NUMBER: _ClassVar[int]
    FIRST_PASS_START_FIELD_NUMBER: _ClassVar[int]
    PREFILL_END_FIELD_NUMBER: _ClassVar[int]
    FIRST_PASS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    outcome: str
    reason: str
    detail: str
    finish_reason: _inference_pb2.FinishReason
    retry_after: _duration_pb2.Duration
    output_token_count: int
    new_token_count: int
    history_token_count: int
    pass_ids: _containers.RepeatedScalarFieldContainer[int]
    dispatch_reason: str
    first_pass_start: _duration_pb2.Duration
    prefill_end: _duration_pb2.Duration
    first_pass: _duration_pb2.Duration
    def __init__(self, request_id: _Optional[str] = ..., outcome: _Optional[str] = ..., reason: _Optional[str] = ..., detail: _Optional[str] = ..., finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., retry_after: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., output_token_count: _Optional[int] = ..., new_token_count: _Optional[int] = ..., history_token_count: _Optional[int] = ..., pass_ids: _Optional[_Iterable[int]] = ..., dispatch_reason: _Optional[str] = ..., first_pass_start: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., prefill_end: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., first_pass: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...
