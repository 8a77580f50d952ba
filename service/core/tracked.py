"""The one mutable record of a live request inside the core."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from service.core.lifecycle import REQUEST, RequestState, step
from service.core.types import Lane, Request


@dataclass(slots=True, eq=False)
class Tracked:
    """A live request. Written by the scheduler only; policies read it.

    seq: arrival order, the tie-breaker everywhere.
    lane: fixed at admission for the best instance known then.
    position: tokens that have KV on `instance_id`; before the first pass 0.
    target_s: absolute time by which the first token is due; inf without a target.
    service_s: predicted seconds of the prefill that is left, alone: at admission, and after each chunk.
    waiting_since_s: arrival, or the end of its last pass; ageing counts from here.
    avoids: the instance that failed it, while another one can take it (`elsewhere`).
    request_id, kv_tokens_max: kept beside the request, because they are read many times a pass.
    """

    request: Request
    seq: int
    lane: Lane
    target_s: float
    service_s: float
    waiting_since_s: float
    state: RequestState = RequestState.QUEUED
    position: int = 0
    instance_id: str | None = None
    generated: int = 0
    last_token_s: float = -math.inf
    failures: int = 0
    avoids: str | None = None
    request_id: str = field(init=False)
    kv_tokens_max: int = field(init=False)  # KV tokens that the request may come to hold

    def __post_init__(self) -> None:
        self.request_id = self.request.request_id
        self.kv_tokens_max = self.request.prompt_tokens + self.request.max_new_tokens

    @property
    def remaining(self) -> int:
        """Prompt tokens without KV yet, as far as is known."""
        return self.request.prompt_tokens - self.position

    @property
    def ttft_target_s(self) -> float | None:
        """Seconds from arrival to `target_s`; None without a target."""
        target_s = self.target_s - self.request.arrival_s
        return round(target_s, 9) if math.isfinite(target_s) else None

    @property
    def latest_start_s(self) -> float:
        """After this moment the target can't be met, even alone."""
        return self.target_s - self.service_s

    def move(self, state: RequestState) -> None:
        if state not in REQUEST[self.state]:
            step(REQUEST, self.state, state, f"request {self.request_id}")  # raises, and says which
        self.state = state
