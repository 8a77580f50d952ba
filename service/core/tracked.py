"""The one mutable record of a live request inside the core."""

from __future__ import annotations

import math
from dataclasses import dataclass

from service.core.lifecycle import REQUEST, RequestState, step
from service.core.types import Lane, Request


@dataclass(slots=True, eq=False)
class Tracked:
    """A live request. Written by the scheduler only; policies read it.

    seq: arrival order, the tie-breaker everywhere.
    lane: fixed at admission for the best instance known then.
    position: tokens that have KV on `instance_id`; before the first pass 0.
    target_s: absolute time by which the first token is due; inf without a target.
    service_s: predicted seconds of its whole prefill alone, at admission (for the latest useful start).
    waiting_since_s: arrival, or the end of its last pass; ageing counts from here.
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

    @property
    def request_id(self) -> str:
        return self.request.request_id

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

    @property
    def kv_tokens_max(self) -> int:
        """KV tokens that the request may come to hold."""
        return self.request.prompt_tokens + self.request.max_new_tokens

    def move(self, state: RequestState) -> None:
        self.state = step(REQUEST, self.state, state, f"request {self.request_id}")
