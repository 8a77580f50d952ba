"""The passes that a scheduler has on a worker, so that nothing but their answers is believed.

At most two, in the order in which they were dispatched: the first runs, or is about to, as far as is known.
The pump and the core take events for true: one for a pass that was never dispatched would end the scheduler,
not the worker.
"""

from __future__ import annotations

from collections import deque

from engines.types import Pass
from service.core.slot import SlotError
from service.core.types import Event, PassFailed, PassFinished, PassRevoked, PassStarted
from service.fleet.convert import BadMessage


class PassLedger:
    def __init__(self) -> None:
        self._passes: deque[Pass] = deque()
        self._started = False  # the first of them

    @property
    def running(self) -> Pass | None:
        return self._passes[0] if self._started else None

    def dispatch(self, pass_: Pass, staged: bool) -> None:
        """Raises SlotError for what the worker could not take."""
        if len(self._passes) > staged:
            ids = [known.pass_id for known in self._passes]
            raise SlotError(f"pass {pass_.pass_id}: passes {ids} are not answered yet")
        self._passes.append(pass_)

    def check(self, event: Event) -> bool:
        """Whether the event ends a pass. Raises BadMessage for one that can't be true."""
        match event:
            case PassStarted(_, pass_id):
                if self._started or not self._passes or self._passes[0].pass_id != pass_id:
                    raise BadMessage(f"PassStarted.pass_id: {pass_id} is not the next one")
                self._started = True
            case PassFinished(_, result):
                pass_ = self._over(result.pass_id, "PassFinished")
                if pass_.kind is not result.kind:
                    raise BadMessage(f"PassFinished.kind: pass {pass_.pass_id} is a {pass_.kind} pass")
                left_out = {i.request_id for i in pass_.items} - {i.request_id for i in result.items}
                if left_out:
                    raise BadMessage(f"PassFinished.items: {sorted(left_out)[0]!r} is left out")
                return True
            case PassFailed(_, pass_id, _, _):
                self._over(pass_id, "PassFailed")
                return True
            case PassRevoked(_, pass_id):
                if len(self._passes) <= self._started or self._passes[-1].pass_id != pass_id:
                    raise BadMessage(f"PassRevoked.pass_id: {pass_id} is not staged")
                self._passes.pop()
            case _:
                pass
        return False

    def _over(self, pass_id: int, what: str) -> Pass:
        running = self.running
        if running is None or running.pass_id != pass_id:
            raise BadMessage(f"{what}.pass_id: {pass_id} does not run")
        self._started = False
        return self._passes.popleft()
