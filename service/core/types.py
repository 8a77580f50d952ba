"""Events that go into the core and commands that come out of it.

All times are seconds on the driver's own monotonic clock. Commands of one poll are in the order in which
they must be carried out; the last one is always `WaitUntil` or `Idle`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from engines.cost_model import CostModel
from engines.profiles import Profiles
from engines.types import Capabilities, KvEvent, Pass, PassResult


class Lane(StrEnum):
    SHORT = "short"
    LONG = "long"


class Role(StrEnum):
    """What an instance prefers to run; a pool is all instances of a role."""

    SP = "sp"  # short prefills
    LP = "lp"  # long prefills
    MIXED = "mixed"  # both


class Outcome(StrEnum):
    """How a request ended. Also the metric label and the ErrorInfo reason."""

    COMPLETED = "COMPLETED"
    REJECTED_CAPACITY = "REJECTED_CAPACITY"  # a bound of the queue is reached; retry later
    REJECTED_TOO_LARGE = "REJECTED_TOO_LARGE"  # can never fit any instance
    REJECTED_LATE = "REJECTED_LATE"  # late_policy refuse: its target is out of reach
    REJECTED_DRAINING = "REJECTED_DRAINING"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"  # the gRPC deadline passed
    CANCELLED = "CANCELLED"  # by the client
    ENGINE_FAILED = "ENGINE_FAILED"  # its pass failed, and it was not to be run again
    UNAVAILABLE = "UNAVAILABLE"  # who ran it, or was to, is gone


class Reason(StrEnum):
    """Why a command was given."""

    # dispatch
    DEPTH_REACHED = "depth_reached"  # queued short tokens reached D
    WINDOW_OVER = "window_over"  # W ran out
    SLACK_OUT = "slack_out"  # some slack fell to sigma
    HEAD_WAITED = "head_waited"  # the head waited T_max
    NO_GAIN = "no_gain"  # waiting is predicted to gain nothing
    LONG_CHUNK = "long_chunk"  # a pass of long-lane tokens
    BUDGET_FILLED = "budget_filled"  # token-budget batching (fcfs)
    AGED = "aged"  # led by a request that waited past the ageing bound
    DECODE_DUE = "decode_due"  # the ITL bound or the decode share asks for a step
    DECODE_ONLY = "decode_only"  # nothing to prefill
    # wait
    WAITING_FOR_DEPTH = "waiting_for_depth"
    WAITING_FOR_KV = "waiting_for_kv"
    WAITING_FOR_INSTANCE = "waiting_for_instance"  # another one is predicted to be better
    STAGE_LATER = "stage_later"  # the running pass still has longer than the staging lead
    # revoke
    URGENT_ARRIVAL = "urgent_arrival"
    # reject, abort
    QUEUE_COUNT = "queue_count"
    QUEUE_TOKENS = "queue_tokens"
    QUEUE_AGE = "queue_age"
    TENANT_SHARE = "tenant_share"  # the queue is full, and its tenant holds more than its part
    NEVER_FITS = "never_fits"
    TARGET_UNREACHABLE = "target_unreachable"
    DEADLINE_PASSED = "deadline_passed"
    CLIENT_CANCELLED = "client_cancelled"
    INSTANCE_LOST = "instance_lost"
    PASS_FAILED = "pass_failed"
    DRAINING = "draining"
    NO_INSTANCE = "no_instance"


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the core sees it: sizes, wishes and the hashes of its blocks, no token ids.

    ttft_target_s: seconds from arrival to the first token; None: the default of its lane.
    deadline_s: the absolute gRPC deadline; passing it ends the request. None: none.
    """

    request_id: str
    prompt_tokens: int
    max_new_tokens: int
    arrival_s: float
    block_hashes: tuple[int, ...] = ()
    ttft_target_s: float | None = None
    deadline_s: float | None = None
    deadline_free: bool = False
    priority: int = 0
    tenant: str = ""
    session: str = ""


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """What the core must know of an instance."""

    instance_id: str
    capabilities: Capabilities
    profiles: Profiles
    cost: CostModel
    role: Role = Role.MIXED


# --- events -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit:
    request: Request


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client went away, or (with `finished`) wants no more tokens: a stop text was reached."""

    request_id: str
    finished: bool = False


@dataclass(frozen=True, slots=True)
class PassStarted:
    instance_id: str
    pass_id: int


@dataclass(frozen=True, slots=True)
class PassFinished:
    instance_id: str
    result: PassResult


@dataclass(frozen=True, slots=True)
class PassFailed:
    """A pass failed, the instance goes on. `lost` names the requests whose KV is gone."""

    instance_id: str
    pass_id: int
    lost: tuple[str, ...]
    error: str


@dataclass(frozen=True, slots=True)
class PassRevoked:
    """The worker dropped a staged pass before it started."""

    instance_id: str
    pass_id: int


@dataclass(frozen=True, slots=True)
class InstanceUp:
    spec: InstanceSpec


@dataclass(frozen=True, slots=True)
class InstanceDown:
    instance_id: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class InstanceDraining:
    """The instance is about to leave: it takes nothing new, what it runs and holds goes on. It stays so until
    InstanceDown, or InstanceResumed."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class InstanceResumed:
    """The instance stays after all: it takes new requests again, with all that it still holds."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class RoleChanged:
    """The instance prefers other work from now on. A label: what it runs and holds goes on."""

    instance_id: str
    role: Role


@dataclass(frozen=True, slots=True)
class KvChanged:
    instance_id: str
    events: tuple[KvEvent, ...]


@dataclass(frozen=True, slots=True)
class DrainBegan:
    """New requests are refused from here on; what is queued or runs goes on."""


Event = (
    Submit
    | Cancel
    | PassStarted
    | PassFinished
    | PassFailed
    | PassRevoked
    | InstanceUp
    | InstanceDown
    | InstanceDraining
    | InstanceResumed
    | RoleChanged
    | KvChanged
    | DrainBegan
)

# --- commands ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DispatchNumbers:
    """The figures behind a dispatch, for spans and metrics. Tokens and seconds."""

    predicted_s: float = 0.0
    slack_s_min: float | None = None  # tightest slack in the pass at dispatch, None: no target in it
    window_s: float = 0.0  # W
    depth_tokens: int = 0  # D
    depth_bound_tokens: int = 0  # the largest D that the short target leaves time for
    queued_short_tokens: int = 0
    queued_long_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Run `pass_` on the instance; `staged`: after the one that runs, revocable until it starts."""

    instance_id: str
    pass_: Pass
    staged: bool
    reason: Reason
    numbers: DispatchNumbers = field(default_factory=DispatchNumbers)


@dataclass(frozen=True, slots=True)
class Revoke:
    """Take a staged pass back if it has not started. The worker answers PassRevoked or has started it."""

    instance_id: str
    pass_id: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Reject:
    """The request ends here without (further) tokens."""

    request_id: str
    outcome: Outcome
    reason: Reason
    detail: str = ""
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """Tell the instance to forget a request and free its blocks."""

    instance_id: str
    request_id: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Poll again at `time_s`, or after the next event if that comes first."""

    time_s: float
    reason: Reason


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing to do before the next event."""


Command = Dispatch | Revoke | Reject | Abort | WaitUntil | Idle
