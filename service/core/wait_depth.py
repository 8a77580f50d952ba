"""AWD, adaptive wait-depth: how long the short queue may wait (W) for how deep a pass (D, in tokens).

At every dispatch opportunity on an idle instance (LAPS, section 4.2):

    W_SLA = min over queued (target - now - predicted pass time - safety)
    W_GR  = (D - queued tokens)+ / arrival rate of short tokens            (infinite at rate 0)
    W     = clip(min(W_SLA, W_GR), W_min, W_max)

and dispatch when the tokens reach D, W has run out, any slack is at most sigma, or the head waited T_max.

Two changes to the paper. D can only shrink there (it becomes the depth of every pass that ran out of time);
here it follows the tokens that W_max would gather at the present rate, so it recovers as the rate does. And
waiting is for gain only: with n queued in a pass of c(q) and the next request of l tokens expected in w,

    now    n c(q) + (c(q) - w)+ + c(l)        the newcomer waits for the pass and then runs alone
    wait   n (w + c(q + l)) + c(q + l)        all run together, later

are the summed times to first token; we wait only where `wait` is the smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from service.core.settings import SchedulerSettings
from service.core.types import Reason


class RateEstimator:
    """Exponentially forgetting rate of arrivals and of their tokens, per second."""

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._count = 0.0
        self._tokens = 0.0
        self._at_s = -math.inf

    def add(self, tokens: int, now_s: float) -> None:
        fade = self._fade(now_s)
        self._count = self._count * fade + 1.0
        self._tokens = self._tokens * fade + tokens
        self._at_s = max(self._at_s, now_s)

    def requests_per_s(self, now_s: float) -> float:
        return self._count * self._fade(now_s) / self._memory_s

    def tokens_per_s(self, now_s: float) -> float:
        return self._tokens * self._fade(now_s) / self._memory_s

    def mean_tokens(self) -> float:
        return self._tokens / self._count if self._count else 0.0

    def _fade(self, now_s: float) -> float:
        return math.exp(-max(0.0, now_s - self._at_s) / self._memory_s)


@dataclass(frozen=True, slots=True)
class ShortQueue:
    """The short queue at a dispatch opportunity."""

    requests: int
    tokens: int
    head_wait_s: float
    slack_s_min: float  # inf without targets; predicted pass time and safety already taken off
    pass_s: float  # predicted time of the pass as it would be now


@dataclass(frozen=True, slots=True)
class Go:
    reason: Reason


@dataclass(frozen=True, slots=True)
class Hold:
    until_s: float


class WaitDepth:
    """State of the window: W and D, and since when the present opportunity is open."""

    def __init__(self, settings: SchedulerSettings, depth_tokens_max: int) -> None:
        self._settings = settings
        self._depth_tokens_max = max(1, depth_tokens_max)
        self._rate = RateEstimator(settings.rate_memory_s)
        self._opened_s: float | None = None
        self.depth_tokens = float(self._depth_tokens_max)
        self.window_s = settings.window_s_max

    def bound(self, depth_tokens_max: int) -> None:
        """D grows to this at most from the next dispatch on."""
        self._depth_tokens_max = max(1, depth_tokens_max)

    def arrived(self, tokens: int, now_s: float) -> None:
        self._rate.add(tokens, now_s)

    def decide(self, queue: ShortQueue, now_s: float, pass_s: Callable[[int], float]) -> Go | Hold:
        """Dispatch now or hold. `pass_s(tokens)` predicts a pass of so many tokens."""
        knobs = self._settings
        if queue.tokens >= self.depth_tokens:
            return Go(Reason.DEPTH_REACHED)
        if queue.slack_s_min <= knobs.sigma_s:
            return Go(Reason.SLACK_OUT)
        if queue.head_wait_s >= knobs.head_wait_s_max:
            return Go(Reason.HEAD_WAITED)
        self.window_s = self._window(queue, now_s)
        opened_s = self._opened_s if self._opened_s is not None else now_s
        until_s = min(
            opened_s + self.window_s,
            now_s + knobs.head_wait_s_max - queue.head_wait_s,
            now_s + queue.slack_s_min - knobs.sigma_s,
        )
        if until_s <= now_s:
            return Go(Reason.WINDOW_OVER)
        if not self._gains(queue, now_s, pass_s):
            return Go(Reason.NO_GAIN)
        self._opened_s = opened_s
        return Hold(until_s)

    def dispatched(self, tokens: int, slack_depth_tokens: int, now_s: float) -> None:
        """After a pass with `tokens` short tokens: D moves half-way to what W_max gathers at this rate.

        `slack_depth_tokens` bounds it: the largest pass that the tightest slack allows.
        """
        reachable = tokens + self._rate.tokens_per_s(now_s) * self._settings.window_s_max
        goal = max(1.0, min(reachable, self._depth_tokens_max, slack_depth_tokens))
        self.depth_tokens += 0.5 * (goal - self.depth_tokens)
        self._opened_s = None

    def emptied(self) -> None:
        """Nobody short waits any more: the opportunity is over, whether it was used or cancelled."""
        self._opened_s = None

    def _window(self, queue: ShortQueue, now_s: float) -> float:
        rate = self._rate.tokens_per_s(now_s)
        missing = max(0.0, self.depth_tokens - queue.tokens)
        to_depth_s = missing / rate if rate > 0.0 else math.inf
        knobs = self._settings
        return min(max(min(queue.slack_s_min, to_depth_s), knobs.window_s_min), knobs.window_s_max)

    def _gains(self, queue: ShortQueue, now_s: float, pass_s: Callable[[int], float]) -> bool:
        rate = self._rate.requests_per_s(now_s)
        if rate <= 0.0:
            return False
        gap_s, tokens = 1.0 / rate, max(1, round(self._rate.mean_tokens()))
        together_s = pass_s(queue.tokens + tokens)
        now_sum = queue.requests * queue.pass_s + max(0.0, queue.pass_s - gap_s) + pass_s(tokens)
        wait_sum = queue.requests * (gap_s + together_s) + together_s
        return wait_sum < now_sum
