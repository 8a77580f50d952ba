"""LAPS with its two algorithms exactly as printed (arXiv 2601.11589).

Algorithm 1, AWD. At the start W = clip(min over queued (target - now - S), W_min, W_max), with S the
predicted time of the batch, and D is the largest depth of any captured graph. Then, for each batch: gather
while the timer is below W and the depth below D; stop at once when the slack of one in the batch, or of the
next, falls to sigma. With d the depth reached and tau the time it took,

    d >= D    W = clip(tau, W_min, W_max)
    d < D     D = d

So D never grows: one batch that ran out of time with a single request makes every batch a single request.
That is what is printed, and it is kept; `laps_slides` is the variant that recovers. The timer runs from the
batch before, or from the first request where none waited (the printed loop runs over an empty queue).

Algorithm 2 is `laps_controllers.PressureController` with `ratio_test=True`.
"""

from __future__ import annotations

from dataclasses import dataclass

from service.core.settings import SchedulerSettings
from service.core.types import Reason
from service.core.wait_depth import Go, Hold
from service.policies.laps_common import Batch, Boundary, LapsOptions, LapsPolicy, clip
from service.policies.laps_controllers import PressureController, PressureKnobs


@dataclass(frozen=True, slots=True)
class PrintedKnobs(PressureKnobs):
    """threshold_tokens: L_m, about 256 on H200 by the slides; 0: by the cost model of the instance.
    chunk_tokens: C_l, not published. The others: see `PressureKnobs`; W_min, W_max and sigma are settings.
    """

    threshold_tokens: int = 256
    chunk_tokens: int = 2048


class PrintedWindow:
    """W and D of Algorithm 1; a `laps_common.Window`."""

    def __init__(self, settings: SchedulerSettings, depth_max: int) -> None:
        self._settings = settings
        self._depth = depth_max
        self._started = False  # W has its first value
        self._opened_s = 0.0
        self.window_s = settings.window_s_max

    @property
    def depth_max(self) -> int:
        """D."""
        return self._depth

    def arrived(self, now_s: float) -> None:
        pass

    def open(self, now_s: float) -> None:
        self._opened_s = now_s

    def decide(self, batch: Batch, now_s: float) -> Go | Hold:
        if not self._started:
            self._started = True
            self.window_s = clip(batch.due_s - now_s - batch.pass_s, self._settings)
        if batch.depth >= self._depth:
            return Go(Reason.DEPTH_REACHED)
        slack_out_s = batch.due_s - batch.pass_s - self._settings.sigma_s
        if slack_out_s <= now_s:
            return Go(Reason.SLACK_OUT)
        over_s = self._opened_s + self.window_s
        return Go(Reason.WINDOW_OVER) if over_s <= now_s else Hold(min(over_s, slack_out_s))

    def dispatched(self, depth: int, now_s: float) -> None:
        if depth >= self._depth:
            self.window_s = clip(now_s - self._opened_s, self._settings)
        else:
            self._depth = depth


def make_policy(settings: SchedulerSettings, knobs: PrintedKnobs) -> LapsPolicy:
    options = LapsOptions(Boundary(knobs.threshold_tokens), knobs.chunk_tokens)
    return LapsPolicy(settings, options, lambda depth: PrintedWindow(settings, depth))


def make_controller(settings: SchedulerSettings, knobs: PrintedKnobs) -> PressureController:
    return PressureController(knobs, ratio_test=True)
