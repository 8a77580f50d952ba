"""What the surfaces (rpc, bench) see of the runtime, and what telemetry hears from it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from engines.types import EngineRequest, EngineStats, FinishReason, Pass, PassResult
from service.core.types import Dispatch, Lane, Outcome, Reason, Request


@dataclass(slots=True)
class RequestRecord:
    """The life of one request on the service clock (seconds, `loop.time()`), written by the pump only."""

    request: Request
    lane: Lane | None = None  # None: refused at the door
    ttft_target_s: float | None = None  # seconds from arrival, its own or that of its lane
    new_tokens: int = 0  # L: prompt tokens computed
    history_tokens: int = 0  # H: prompt tokens reused
    output_tokens: int = 0
    pass_ids: list[int] = field(default_factory=list)  # prefill passes
    first_dispatch_reason: Reason | None = None
    first_pass_start_s: float | None = None
    prefill_end_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    first_pass_s: float = 0.0  # measured seconds of the pass that gave the first token
    itl_s: list[float] = field(default_factory=list)  # gaps between tokens
    end_s: float | None = None
    outcome: Outcome | None = None
    reason: Reason | None = None
    detail: str = ""
    finish: FinishReason | None = None
    retry_after_s: float | None = None

    @property
    def target_met(self) -> bool | None:
        """Whether the first token came within `ttft_target_s`; None without a target."""
        if self.ttft_target_s is None:
            return None
        return (
            self.first_token_s is not None
            and self.first_token_s - self.request.arrival_s <= self.ttft_target_s
        )


@dataclass(frozen=True, slots=True)
class Token:
    token_id: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The last thing a handle yields."""

    record: RequestRecord


class RequestHandle(Protocol):
    """One submitted request. Iterating yields its tokens and then exactly one `Ended`."""

    @property
    def record(self) -> RequestRecord: ...

    def __aiter__(self) -> AsyncIterator[Token | Ended]: ...

    def cancel(self, *, finished: bool = False) -> None:
        """Stop. `finished`: the client has what it wanted (a stop text), so the outcome is COMPLETED."""


@dataclass(frozen=True, slots=True)
class InstanceSnapshot:
    instance_id: str
    state: str
    decoding: int
    stats: EngineStats
    correction: tuple[float, float] = (1.0, 1.0)  # of its cost model: memory and compute side


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The books and the present state. submitted = sum(outcomes) + queued + running, always."""

    submitted: int
    outcomes: dict[Outcome, int]
    queued: int
    running: int
    lane_queued: dict[Lane, int]
    lane_queued_tokens: dict[Lane, int]
    window_s: float
    depth_tokens: int
    boundary_tokens: int
    knee_tokens: int
    draining: bool
    instances: tuple[InstanceSnapshot, ...]

    @classmethod
    def empty(cls) -> Snapshot:
        """Of who has had no request and knows no instance."""
        lanes = dict.fromkeys(Lane, 0)
        return cls(0, {}, 0, 0, lanes, dict(lanes), 0.0, 0, 0, 0, False, ())


class Observer(Protocol):
    """Hears what happens; called on the loop, must return at once and never raise."""

    def submitted(self, record: RequestRecord) -> None: ...

    def dispatched(self, command: Dispatch, now_s: float) -> None: ...

    def pass_finished(self, pass_: Pass, result: PassResult, start_s: float, end_s: float) -> None: ...

    def pass_lost(self, pass_: Pass, reason: Reason, detail: str, start_s: float, end_s: float) -> None:
        """A dispatched pass that never finishes: revoked before it started, failed, or its instance lost."""

    def ended(self, record: RequestRecord) -> None: ...


class Runtime(Protocol):
    """The running service behind the surfaces."""

    async def start(self) -> None: ...

    def submit(self, request: Request, engine_request: EngineRequest) -> RequestHandle:
        """Hand a request to the scheduler. Refusals come through the handle, at the next loop turn."""

    def snapshot(self) -> Snapshot: ...

    async def drain(self, timeout_s: float) -> int:
        """Refuse new work, finish the old, stop; returns how many requests were cut off at `timeout_s`."""

    async def close(self) -> None: ...
