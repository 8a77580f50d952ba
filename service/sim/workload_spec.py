"""What a run is fed with, in plain data: suites and commands write these, `sources` makes them a source."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from service.sim.arrivals import Burst, Flip, check_shares
from service.sim.lengths import TOKENS_MAX

# Drawn sessions by name: the length sets of the first and of the later turns.
SESSION_SETS = {"agent": ("agent_first_turn", "agent_later_turns")}


class Arrivals(StrEnum):
    RECORDED = "recorded"  # the times of the trace, at another rate if one is given
    POISSON = "poisson"
    GAMMA = "gamma"  # renewal process with Gamma gaps of coefficient of variation `cv`
    CLOSED = "closed"  # `concurrency` clients, each with one request at a time
    SESSIONS = "sessions"  # conversations; begin at a rate, or `concurrency` of them at a time


class Start(StrEnum):
    """Where a trace is entered. A trace is a ring: after its last row comes the first with other hashes."""

    DRAWN = "drawn"  # at a row (session) drawn from the seed, so that seeds differ
    FIRST = "first"


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """What is sent. Equal specs and seeds give equal requests.

    parts: (name, share). A name is a length set, a known trace, the path of a trace file, or with sessions
        "agent". Shares are of requests, with sessions of sessions, and need not sum to 1.
    cv: of the gaps of gamma arrivals and of the begins of sessions.
    concurrency: clients of a closed loop; sessions at a time (then no rate is given).
    flips: shares that change at a time. bursts: times with a multiple of the rate; open loops only.
    output_tokens: of every request, or None as recorded. 1 is prefill only.
    prompt_tokens_max: draws are clipped to it, longer rows left out, sessions end before it.
    turns_mean, think_s_mean: of drawn sessions (geometric, exponential). think_s_max: also of recorded.
    block_tokens: of the hashes of sessions, unless the trace has its own.
    """

    parts: tuple[tuple[str, float], ...]
    arrivals: Arrivals | str = Arrivals.POISSON
    cv: float = 1.0
    concurrency: int = 0
    flips: tuple[Flip, ...] = ()
    bursts: tuple[Burst, ...] = ()
    output_tokens: int | None = 1
    prompt_tokens_max: int = TOKENS_MAX
    turns_mean: float = 8.0
    think_s_mean: float = 2.0
    think_s_max: float = 60.0
    block_tokens: int = 64
    start: Start | str = Start.DRAWN

    def __post_init__(self) -> None:
        object.__setattr__(self, "arrivals", _choice(Arrivals, "arrivals", self.arrivals))
        object.__setattr__(self, "start", _choice(Start, "start", self.start))
        check_shares("parts: shares", self.shares)
        for name in ("prompt_tokens_max", "block_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.output_tokens is not None and self.output_tokens < 1:
            raise ValueError(f"output_tokens must be at least 1 or None, got {self.output_tokens}")
        for name, low in (("cv", 0.0), ("turns_mean", 1.0), ("think_s_mean", 0.0), ("think_s_max", 0.0)):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= low and (name != "cv" or value > 0.0)):
                raise ValueError(f"{name} must be finite and at least {low:g} (cv above 0), got {value}")
        self._check_arrivals()

    def _check_arrivals(self) -> None:
        if self.arrivals is Arrivals.CLOSED and self.concurrency < 1:
            raise ValueError(f"concurrency must be at least 1 in a closed loop, got {self.concurrency}")
        if self.arrivals not in (Arrivals.CLOSED, Arrivals.SESSIONS) and self.concurrency:
            raise ValueError("concurrency is for closed and sessions only; leave it at 0")
        if self.concurrency and self.bursts:
            raise ValueError("bursts: a closed loop has no rate; leave them out or give a rate")
        if self.arrivals is Arrivals.RECORDED and len(self.parts) != 1:
            raise ValueError("arrivals recorded: exactly one part, a trace; use poisson or gamma for a mix")

    @property
    def shares(self) -> tuple[float, ...]:
        return tuple(share for _, share in self.parts)


_T = TypeVar("_T", bound=StrEnum)


def _choice(kind: type[_T], name: str, value: str) -> _T:
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"{name} must be one of {', '.join(kind)}, got {value!r}") from None
