"""LAPS as its talk tells it (MLSys 2026): W and D both follow the observed arrival rate.

For each batch, with r the arrival rate of short requests, n those that wait and S the predicted time of the
batch,

    W_SLA = min over the batch and the next (target - now - S - safety)
    W_GR  = (D - n)+ / r                              (infinite at rate 0)
    W     = clip(min(W_SLA, W_GR), W_min, W_max)

The batch goes when D requests wait, W is over, the tightest slack falls to sigma, or the head has waited
T_max. After each dispatch D becomes what W_max gathers at that rate, r W_max, at least 1 and at most the
largest captured graph. The slides give no formula for D; this one is ours. D says when to go: who waits by
then joins, up to the largest graph.

Grouping is a knob: `latency_first` pads one batch to its longest, `memory_first` (latency_first=0) runs one
bucket a pass. The controller is `laps_controllers.PressureController` with a difference instead of a ratio.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from service.core.settings import SchedulerSettings
from service.core.types import Reason
from service.core.wait_depth import Go, Hold, RateEstimator
from service.policies.laps_common import Batch, Boundary, LapsOptions, LapsPolicy, clip
from service.policies.laps_controllers import PressureController, PressureKnobs


@dataclass(frozen=True, slots=True)
class SlidesKnobs(PressureKnobs):
    """threshold_tokens: L_m; 0: by the cost model of the instance. chunk_tokens: C_l, not published.
    latency_first: 1 or 0 (memory_first). The others: see `PressureKnobs`; W_min, W_max, sigma and T_max are
    settings.
    """

    threshold_tokens: int = 256
    chunk_tokens: int = 2048
    latency_first: int = 1


class SlidesWindow:
    """W and D of the slides; a `laps_common.Window`."""

    def __init__(self, settings: SchedulerSettings, depth_max: int) -> None:
        self._settings = settings
        self._rate = RateEstimator(settings.rate_memory_s)
        self._opened_s = 0.0
        self._chosen = False  # W, for the window that is open
        self.depth = depth_max  # D
        self.depth_max = depth_max
        self.window_s = settings.window_s_max

    def arrived(self, now_s: float) -> None:
        self._rate.add(1, now_s)

    def open(self, now_s: float) -> None:
        self._opened_s, self._chosen = now_s, False

    def decide(self, batch: Batch, now_s: float) -> Go | Hold:
        if batch.queued >= self.depth or batch.depth >= self.depth_max:
            return Go(Reason.DEPTH_REACHED)
        slack_out_s = batch.due_s - batch.pass_s - self._settings.sigma_s
        if slack_out_s <= now_s:
            return Go(Reason.SLACK_OUT)
        head_over_s = batch.head_since_s + self._settings.head_wait_s_max
        if head_over_s <= now_s:
            return Go(Reason.HEAD_WAITED)
        if not self._chosen:
            self.window_s, self._chosen = self._window(batch, now_s), True
        over_s = self._opened_s + self.window_s
        return Go(Reason.WINDOW_OVER) if over_s <= now_s else Hold(min(over_s, slack_out_s, head_over_s))

    def dispatched(self, depth: int, now_s: float) -> None:
        gathered = round(self._rate.requests_per_s(now_s) * self._settings.window_s_max)
        self.depth = min(max(1, gathered), self.depth_max)

    def _window(self, batch: Batch, now_s: float) -> float:
        rate = self._rate.requests_per_s(now_s)
        to_depth_s = (self.depth - batch.queued) / rate if rate > 0.0 else math.inf
        safe_s = batch.due_s - now_s - batch.pass_s - self._settings.safety_s
        return clip(min(safe_s, to_depth_s), self._settings)


def make_policy(settings: SchedulerSettings, knobs: SlidesKnobs) -> LapsPolicy:
    options = LapsOptions(Boundary(knobs.threshold_tokens), knobs.chunk_tokens, not knobs.latency_first)
    return LapsPolicy(settings, options, lambda depth: SlidesWindow(settings, depth))


def make_controller(settings: SchedulerSettings, knobs: SlidesKnobs) -> PressureController:
    return PressureController(knobs, ratio_test=False)
