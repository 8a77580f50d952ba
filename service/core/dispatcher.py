"""From a plan to a pass on its way: memory promised, requests moved on, the command given."""

from __future__ import annotations

from collections.abc import Callable

from engines.types import Pass, PassItem, PassKind
from service.core.decode import DecodeStep
from service.core.lifecycle import RequestState
from service.core.policy import InFlight, Instance, PassPlan, PrefillPolicy
from service.core.types import Command, Dispatch, DispatchNumbers, Reason


class Dispatcher:
    """Numbers the passes of one scheduler and hands its commands to `emit`."""

    def __init__(self, policy: PrefillPolicy, emit: Callable[[Command], None]) -> None:
        self._policy = policy
        self._emit = emit
        self._next_pass_id = 1

    def prefill(self, instance: Instance, plan: PassPlan, start_s: float, *, staged: bool) -> None:
        state = RequestState.STAGED if staged else RequestState.PREFILLING
        for tracked, _, _ in plan.items:
            self._policy.remove(tracked)
            instance.kv.reserve(tracked.request_id, tracked.kv_tokens_max)
            tracked.instance_id = instance.instance_id
            tracked.move(state)
        self._policy.dispatched(plan, start_s)
        items = tuple(PassItem(tracked.request_id, new, history) for tracked, new, history in plan.items)
        pass_ = self._pass(PassKind.PREFILL, items, plan.layer_block, plan.layer_blocks)
        flight = InFlight(pass_, plan.reason, plan.predicted_s)
        flight.partials_begun = sum(i.begins_partial for i in plan.items)
        if instance.on_trial:
            instance.takes_new = False
        self._send(instance, flight, plan.numbers, start_s, staged=staged)

    def decode(self, instance: Instance, step: DecodeStep, reason: Reason, start_s: float) -> None:
        items = tuple(PassItem(t.request_id, 1, t.position) for t in step.requests)
        flight = InFlight(self._pass(PassKind.DECODE, items), reason, step.predicted_s)
        self._send(instance, flight, DispatchNumbers(step.predicted_s), start_s, staged=False)

    def _pass(
        self, kind: PassKind, items: tuple[PassItem, ...], layer_block: int = 0, layer_blocks: int = 1
    ) -> Pass:
        pass_id, self._next_pass_id = self._next_pass_id, self._next_pass_id + 1
        return Pass(pass_id, kind, items, layer_block, layer_blocks)

    def _send(
        self, instance: Instance, flight: InFlight, numbers: DispatchNumbers, start_s: float, *, staged: bool
    ) -> None:
        if staged:
            instance.staged = flight
        else:
            flight.start_s = start_s
            instance.running = flight
        self._emit(Dispatch(instance.instance_id, flight.pass_, staged, flight.reason, numbers))
