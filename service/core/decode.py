"""When an instance that prefills decodes too: when a step runs, and over which requests.

The rule for engines that alternate, the same for every policy so that starving decode can't look like a win:

* ITL bound: a step runs before a prefill pass that would end too late for the oldest last token;
* share: prefill time earns decode a claim of share/(1 - share) of it, and a step runs when the claim
  covers it;
* a step runs whenever there is nothing to prefill.

Prefill keeps its turn: after one round of steps forced by the ITL bound a prefill pass comes first, so a
bound that can't be kept degrades to alternation instead of starving the queue.

An engine that decodes beside prefill adds a step to each prefill pass by itself: there a step of its own runs
only when there is nothing to prefill, and every pass is priced with the step in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engines.types import Capabilities, DecodeMode
from service.core.pricing import Pricer
from service.core.settings import SchedulerSettings
from service.core.tracked import Tracked


@dataclass(frozen=True, slots=True)
class DecodeStep:
    requests: tuple[Tracked, ...]
    predicted_s: float


class DecodeRule:
    """Decode of one instance."""

    def __init__(self, settings: SchedulerSettings, capabilities: Capabilities, pricer: Pricer) -> None:
        self._settings = settings
        self._requests_max = capabilities.requests_max
        self._pricer = pricer
        self._beside = capabilities.decode is DecodeMode.BESIDE
        self._claim_s = 0.0
        self._steps_since_prefill = 0
        self.running: dict[str, Tracked] = {}

    def ride(self) -> None:
        """Before a prefill pass is planned: its price holds what the engine decodes beside it."""
        if self._beside:
            self._pricer.ride([tracked.position for tracked in self.running.values()])

    def step(self) -> DecodeStep | None:
        """The next step: oldest last token first, as many as one profile takes."""
        chosen: list[Tracked] = []
        history, history_max = 0, self._pricer.profiles.history_max
        for tracked in sorted(self.running.values(), key=lambda t: (t.last_token_s, t.seq)):
            if len(chosen) == min(self._requests_max, self._pricer.profiles.tokens_max):
                break
            if history_max is not None and chosen and history + tracked.position > history_max:
                continue
            chosen.append(tracked)
            history += tracked.position
        if not chosen:
            return None
        step_s = self._pricer.alone_s([(1, t.position) for t in chosen])
        while math.isinf(step_s) and len(chosen) > 1:  # a grid may have fewer rows than requests_max
            chosen.pop()
            step_s = self._pricer.alone_s([(1, t.position) for t in chosen])
        return DecodeStep(tuple(chosen), step_s)

    def must_step(
        self, step: DecodeStep, prefill_s: float, now_s: float, *, after_prefill: bool = False
    ) -> bool:
        """Whether `step` goes before a prefill pass of `prefill_s` that would start at `now_s`.

        after_prefill: a prefill pass still runs, so prefill will have had its turn (staging).
        """
        if self._beside:
            return False
        if self._claim_s >= step.predicted_s:
            return True
        oldest_s = min(t.last_token_s for t in step.requests)
        late = now_s + prefill_s + step.predicted_s - oldest_s > self._settings.itl_bound_s
        rounds = -(-len(self.running) // len(step.requests))
        return late and (after_prefill or self._steps_since_prefill < rounds)

    def pass_s_max(self) -> float:
        """Longest prefill pass that keeps the ITL bound right after a step; inf with nothing decoding."""
        if self._beside and self.running:
            return self._settings.itl_bound_s
        step = self.step()
        if step is None:
            return math.inf
        return max(0.0, self._settings.itl_bound_s - step.predicted_s)

    def ran_step(self, elapsed_s: float) -> None:
        self._claim_s = max(0.0, self._claim_s - elapsed_s)
        self._steps_since_prefill += 1

    def ran_prefill(self, elapsed_s: float) -> None:
        self._steps_since_prefill = 0
        if not self.running:
            self._claim_s = 0.0
            return
        share = self._settings.decode_share_min
        earned_s = elapsed_s * share / (1.0 - share)
        self._claim_s = min(self._claim_s + earned_s, self._settings.itl_bound_s)
