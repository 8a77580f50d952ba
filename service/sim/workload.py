"""What arrives: rows of a trace before they meet a model, and sources of requests for the kernel.

A `Source` is asked for the next arrival it knows of, and told when a request ended: an open loop ignores the
latter, a closed loop answers with the request that its client sends next, a session with its next turn.

The lane that a request is *reported* under comes from here and is the same for every policy: short with at
most `REPORT_SHORT_TOKENS` tokens that no earlier request of the workload brought (an unlimited prefix cache
is assumed), long otherwise. What a policy itself takes for short is its own affair.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from service.core.types import Lane, Request

REPORT_SHORT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace or drawn from a length set.

    arrival_s: seconds from the first row. prompt_tokens includes what is cached; output_tokens at least 1.
    block_hashes: chain hashes of the full blocks of the prompt (and on into the answer where the trace knows
        them), `block_tokens` of the trace each. Equal hashes mean equal content from the start of the prompt.
    session: rows of a session are sent one after the other. think_s: from the end of the turn before.
    reused_tokens: leading tokens shared with the turn before, for sessions recorded without hashes.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    block_hashes: tuple[int, ...] = ()
    session: str = ""
    think_s: float = 0.0
    reused_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """Rows in order of arrival. block_tokens: what a hash stands for; 0 where rows have none."""

    name: str
    rows: tuple[TraceRow, ...]
    block_tokens: int = 0
    source: str = ""  # where it is from, for reports


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request (its `arrival_s` is when it reaches the front end) and the lane it is reported under."""

    request: Request
    lane: Lane


class Source(Protocol):
    """Arrivals for one run. The kernel merges `next_arrival` with what `ended` gives, by time."""

    def next_arrival(self) -> Arrival | None:
        """The next one planned, in order of arrival; None when there are no more."""

    def ended(self, request: Request, now_s: float) -> Iterable[Arrival]:
        """What arrives because `request` ended, completed or not; each at `now_s` or later."""
