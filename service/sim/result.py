"""What a run gives back: the life of every request, the figures of every instance, the gaps between tokens.

Everything here follows from virtual time alone, so the same input gives the identical result. Counts that
depend on the machine that simulates (processor time, polls) are not in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from service.core.reconcile import RoleMove
from service.core.scheduler import PrefillScheduler
from service.core.types import Command, Event, Lane, Outcome, Reason, Request, Role

GAP_BINS_PER_E = 50  # bins of the gap histogram per factor e: each is 2 % wide


@dataclass(slots=True)
class SimRecord:
    """The life of one request in virtual time (seconds), written by the kernel only.

    lane: the one it is reported under, the same for every policy. Times are those of the front end.
    """

    request: Request
    lane: Lane
    new_tokens: int = 0  # prompt tokens computed
    history_tokens: int = 0  # prompt tokens reused
    output_tokens: int = 0
    first_pass_s: float | None = None  # start of the first pass that it is in
    first_token_s: float | None = None
    last_token_s: float | None = None
    end_s: float | None = None
    outcome: Outcome | None = None  # None: still live when the run ended
    reason: Reason | None = None  # why it ended, unless it completed
    known_on: int | None = None  # number of the process whose engine holds it

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.request.arrival_s

    @property
    def waiting_s(self) -> float | None:
        """From arrival to the start of its first pass."""
        return None if self.first_pass_s is None else self.first_pass_s - self.request.arrival_s


class Observer(Protocol):
    """Hears of every end as it happens; for figures that need no records, and for an early stop."""

    def ended(self, record: SimRecord) -> bool:
        """`record` is complete. True stops the run at this instant."""


class GapHistogram:
    """Gaps between the tokens of a request (ITL), in bins that are 2 % wide. Seconds."""

    __slots__ = ("bins", "count", "max_s", "sum_s")

    def __init__(self) -> None:
        self.bins: dict[int, int] = {}  # floor(50 ln gap) -> count
        self.count = 0
        self.sum_s = 0.0
        self.max_s = 0.0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GapHistogram):
            return NotImplemented
        return (self.bins, self.count, self.sum_s) == (other.bins, other.count, other.sum_s)

    __hash__ = None  # type: ignore[assignment]

    def add(self, gap_s: float) -> None:
        index = math.floor(GAP_BINS_PER_E * math.log(max(gap_s, 1e-9)))
        self.bins[index] = self.bins.get(index, 0) + 1
        self.count += 1
        self.sum_s += gap_s
        self.max_s = max(self.max_s, gap_s)

    def quantile_s(self, share: float) -> float | None:
        """The gap that `share` of all stay within, to 1 %; None without gaps."""
        if self.count == 0:
            return None
        rank, seen = share * self.count, 0
        for index in sorted(self.bins):
            seen += self.bins[index]
            if seen >= rank:
                return math.exp((index + 0.5) / GAP_BINS_PER_E)
        return self.max_s

    @property
    def mean_s(self) -> float | None:
        return self.sum_s / self.count if self.count else None


@dataclass(slots=True)
class InstanceFigures:
    """What one instance did, all its lives together. Failed passes count as busy and in nothing else."""

    instance_id: str
    up_s: float = 0.0  # seconds that it was up
    prefill_s: float = 0.0  # seconds in prefill passes, failed ones too
    decode_s: float = 0.0
    prefill_passes: int = 0
    decode_passes: int = 0
    failed_passes: int = 0
    new_tokens: int = 0  # prompt tokens computed
    reused_tokens: int = 0  # prompt tokens taken from the prefix cache
    executed_tokens: int = 0  # of prefill passes, after padding
    decode_tokens: int = 0

    @property
    def busy_s(self) -> float:
        return self.prefill_s + self.decode_s

    @property
    def padding_ratio(self) -> float:
        """Share of the executed prefill tokens that was padding."""
        return 1.0 - self.new_tokens / self.executed_tokens if self.executed_tokens else 0.0


@dataclass(slots=True)
class Samples:
    """The state at regular moments, one list a figure, all of the same length (for plots).

    sp, lp, mixed: instances up, by role.
    """

    time_s: list[float] = field(default_factory=list)
    short_requests: list[int] = field(default_factory=list)
    long_requests: list[int] = field(default_factory=list)
    short_tokens: list[int] = field(default_factory=list)
    long_tokens: list[int] = field(default_factory=list)
    window_s: list[float] = field(default_factory=list)
    depth_tokens: list[int] = field(default_factory=list)
    busy: list[int] = field(default_factory=list)  # instances with a running pass
    sp: list[int] = field(default_factory=list)
    lp: list[int] = field(default_factory=list)
    mixed: list[int] = field(default_factory=list)

    def take(self, scheduler: PrefillScheduler, now_s: float) -> None:
        """Add the state of `scheduler` now."""
        policy, instances = scheduler.policy, list(scheduler.instances.values())
        (short_requests, short_tokens), (long_requests, long_tokens) = map(policy.lane_load, Lane)
        window_s, depth_tokens = policy.window()
        self.time_s.append(now_s)
        self.short_requests.append(short_requests)
        self.short_tokens.append(short_tokens)
        self.long_requests.append(long_requests)
        self.long_tokens.append(long_tokens)
        self.window_s.append(window_s)
        self.depth_tokens.append(depth_tokens)
        self.busy.append(sum(i.running is not None for i in instances))
        for role, counts in ((Role.SP, self.sp), (Role.LP, self.lp), (Role.MIXED, self.mixed)):
            counts.append(sum(i.role is role for i in instances))


@dataclass(frozen=True, slots=True)
class SimResult:
    """log: (now, event or command) in the order in which they happened; empty when not asked for.

    records: by request id, in order of arrival; without `keep_records` those that are still live.
    submitted: requests that arrived. role_moves: (seconds, move), as the controller gave them.
    stopped: the observer ended the run early. samples: None when not asked for.
    """

    log: list[tuple[float, Event | Command]]
    records: dict[str, SimRecord]
    end_s: float
    submitted: int
    instances: tuple[InstanceFigures, ...]
    itl: GapHistogram
    role_moves: tuple[tuple[float, RoleMove], ...]
    stopped: bool
    samples: Samples | None

    @property
    def decode_tokens(self) -> int:
        return sum(figures.decode_tokens for figures in self.instances)

    @property
    def padding_ratio(self) -> float:
        """Share of all executed prefill tokens that was padding."""
        executed = sum(figures.executed_tokens for figures in self.instances)
        return 1.0 - sum(f.new_tokens for f in self.instances) / executed if executed else 0.0
