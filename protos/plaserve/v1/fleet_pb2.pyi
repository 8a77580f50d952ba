import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_SP: _ClassVar[Role]
    ROLE_LP: _ClassVar[Role]
    ROLE_MIXED: _ClassVar[Role]
ROLE_UNSPECIFIED: Role
ROLE_SP: Role
ROLE_LP: Role
ROLE_MIXED: Role

class FleetInstance(_message.Message):
    __slots__ = ("instance_id", "shard_id", "role", "target_role", "state", "pinned", "pressure", "queued_count", "last_seen_time", "address", "backlog_s", "utilisation", "reason", "target_shard", "engine", "move_phase", "move_duration", "move_error", "move_cost_s")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TARGET_ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_FIELD_NUMBER: _ClassVar[int]
    QUEUED_COUNT_FIELD_NUMBER: _ClassVar[int]
    LAST_SEEN_TIME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_S_FIELD_NUMBER: _ClassVar[int]
    UTILISATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TARGET_SHARD_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    MOVE_PHASE_FIELD_NUMBER: _ClassVar[int]
    MOVE_DURATION_FIELD_NUMBER: _ClassVar[int]
    MOVE_ERROR_FIELD_NUMBER: _ClassVar[int]
    MOVE_COST_S_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    shard_id: str
    role: Role
    target_role: Role
    state: str
    pinned: bool
    pressure: float
    queued_count: int
    last_seen_time: _timestamp_pb2.Timestamp
    address: str
    backlog_s: float
    utilisation: float
    reason: str
    target_shard: str
    engine: str
    move_phase: str
    move_duration: _duration_pb2.Duration
    move_error: str
    move_cost_s: float
    def __init__(self, instance_id: _Optional[str] = ..., shard_id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., target_role: _Optional[_Union[Role, str]] = ..., state: _Optional[str] = ..., pinned: _Optional[bool] = ..., pressure: _Optional[float] = ..., queued_count: _Optional[int] = ..., last_seen_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., address: _Optional[str] = ..., backlog_s: _Optional[float] = ..., utilisation: _Optional[float] = ..., reason: _Optional[str] = ..., target_shard: _Optional[str] = ..., engine: _Optional[str] = ..., move_phase: _Optional[str] = ..., move_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., move_error: _Optional[str] = ..., move_cost_s: _Optional[float] = ...) -> None: ...

class FleetShard(_message.Message):
    __slots__ = ("shard_id", "leader", "epoch", "standbys", "retired", "sp_count", "lp_count", "mixed_count", "coming_count", "leaving_count", "queued_count", "backlog_s", "utilisation", "note")
    SHARD_ID_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STANDBYS_FIELD_NUMBER: _ClassVar[int]
    RETIRED_FIELD_NUMBER: _ClassVar[int]
    SP_COUNT_FIELD_NUMBER: _ClassVar[int]
    LP_COUNT_FIELD_NUMBER: _ClassVar[int]
    MIXED_COUNT_FIELD_NUMBER: _ClassVar[int]
    COMING_COUNT_FIELD_NUMBER: _ClassVar[int]
    LEAVING_COUNT_FIELD_NUMBER: _ClassVar[int]
    QUEUED_COUNT_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_S_FIELD_NUMBER: _ClassVar[int]
    UTILISATION_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    shard_id: str
    leader: str
    epoch: int
    standbys: _containers.RepeatedScalarFieldContainer[str]
    retired: bool
    sp_count: int
    lp_count: int
    mixed_count: int
    coming_count: int
    leaving_count: int
    queued_count: int
    backlog_s: float
    utilisation: float
    note: str
    def __init__(self, shard_id: _Optional[str] = ..., leader: _Optional[str] = ..., epoch: _Optional[int] = ..., standbys: _Optional[_Iterable[str]] = ..., retired: _Optional[bool] = ..., sp_count: _Optional[int] = ..., lp_count: _Optional[int] = ..., mixed_count: _Optional[int] = ..., coming_count: _Optional[int] = ..., leaving_count: _Optional[int] = ..., queued_count: _Optional[int] = ..., backlog_s: _Optional[float] = ..., utilisation: _Optional[float] = ..., note: _Optional[str] = ...) -> None: ...

class FleetProcess(_message.Message):
    __slots__ = ("member_id", "kind", "address", "shard_id", "epoch")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SHARD_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    kind: str
    address: str
    shard_id: str
    epoch: int
    def __init__(self, member_id: _Optional[str] = ..., kind: _Optional[str] = ..., address: _Optional[str] = ..., shard_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class RoleMove(_message.Message):
    __slots__ = ("instance_id", "from_role", "to_role", "reason", "pressure_difference", "start_time", "end_time", "outcome", "from_shard", "to_shard")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_ROLE_FIELD_NUMBER: _ClassVar[int]
    TO_ROLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    END_TIME_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    FROM_SHARD_FIELD_NUMBER: _ClassVar[int]
    TO_SHARD_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    from_role: Role
    to_role: Role
    reason: str
    pressure_difference: float
    start_time: _timestamp_pb2.Timestamp
    end_time: _timestamp_pb2.Timestamp
    outcome: str
    from_shard: str
    to_shard: str
    def __init__(self, instance_id: _Optional[str] = ..., from_role: _Optional[_Union[Role, str]] = ..., to_role: _Optional[_Union[Role, str]] = ..., reason: _Optional[str] = ..., pressure_difference: _Optional[float] = ..., start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., end_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., outcome: _Optional[str] = ..., from_shard: _Optional[str] = ..., to_shard: _Optional[str] = ...) -> None: ...

class GetFleetRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetFleetResponse(_message.Message):
    __slots__ = ("instances", "sp_pressure", "lp_pressure", "processes", "controller", "stale", "age", "dry_run", "shards")
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    SP_PRESSURE_FIELD_NUMBER: _ClassVar[int]
    LP_PRESSURE_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    CONTROLLER_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    instances: _containers.RepeatedCompositeFieldContainer[FleetInstance]
    sp_pressure: float
    lp_pressure: float
    processes: _containers.RepeatedCompositeFieldContainer[FleetProcess]
    controller: str
    stale: bool
    age: _duration_pb2.Duration
    dry_run: bool
    shards: _containers.RepeatedCompositeFieldContainer[FleetShard]
    def __init__(self, instances: _Optional[_Iterable[_Union[FleetInstance, _Mapping]]] = ..., sp_pressure: _Optional[float] = ..., lp_pressure: _Optional[float] = ..., processes: _Optional[_Iterable[_Union[FleetProcess, _Mapping]]] = ..., controller: _Optional[str] = ..., stale: _Optional[bool] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., dry_run: _Optional[bool] = ..., shards: _Optional[_Iterable[_Union[FleetShard, _Mapping]]] = ...) -> None: ...

class WatchFleetRequest(_message.Message):
    __slots__ = ("interval",)
    INTERVAL_FIELD_NUMBER: _ClassVar[int]
    interval: _duration_pb2.Duration
    def __init__(self, interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class MoveInstanceRequest(_message.Message):
    __slots__ = ("instance_id", "role", "dry_run", "by", "shard_id")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    SHARD_ID_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    role: Role
    dry_run: bool
    by: str
    shard_id: str
    def __init__(self, instance_id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., dry_run: _Optional[bool] = ..., by: _Optional[str] = ..., shard_id: _Optional[str] = ...) -> None: ...

class MoveInstanceResponse(_message.Message):
    __slots__ = ("move",)
    MOVE_FIELD_NUMBER: _ClassVar[int]
    move: RoleMove
    def __init__(self, move: _Optional[_Union[RoleMove, _Mapping]] = ...) -> None: ...

class DrainInstanceRequest(_message.Message):
    __slots__ = ("instance_id", "timeout", "by")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    timeout: _duration_pb2.Duration
    by: str
    def __init__(self, instance_id: _Optional[str] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., by: _Optional[str] = ...) -> None: ...

class DrainInstanceResponse(_message.Message):
    __slots__ = ("unfinished_count",)
    UNFINISHED_COUNT_FIELD_NUMBER: _ClassVar[int]
    unfinished_count: int
    def __init__(self, unfinished_count: _Optional[int] = ...) -> None: ...

class PinInstanceRequest(_message.Message):
    __slots__ = ("instance_id", "pinned", "role", "by")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    pinned: bool
    role: Role
    by: str
    def __init__(self, instance_id: _Optional[str] = ..., pinned: _Optional[bool] = ..., role: _Optional[_Union[Role, str]] = ..., by: _Optional[str] = ...) -> None: ...

class PinInstanceResponse(_message.Message):
    __slots__ = ("instance",)
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    instance: FleetInstance
    def __init__(self, instance: _Optional[_Union[FleetInstance, _Mapping]] = ...) -> None: ...

class RetireShardRequest(_message.Message):
    __slots__ = ("shard_id", "retired", "by")
    SHARD_ID_FIELD_NUMBER: _ClassVar[int]
    RETIRED_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    shard_id: str
    retired: bool
    by: str
    def __init__(self, shard_id: _Optional[str] = ..., retired: _Optional[bool] = ..., by: _Optional[str] = ...) -> None: ...

class RetireShardResponse(_message.Message):
    __slots__ = ("shard",)
    SHARD_FIELD_NUMBER: _ClassVar[int]
    shard: FleetShard
    def __init__(self, shard: _Optional[_Union[FleetShard, _Mapping]] = ...) -> None: ...

class ListMovesRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListMovesResponse(_message.Message):
    __slots__ = ("moves", "next_page_token")
    MOVES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    moves: _containers.RepeatedCompositeFieldContainer[RoleMove]
    next_page_token: str
    def __init__(self, moves: _Optional[_Iterable[_Union[RoleMove, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...
