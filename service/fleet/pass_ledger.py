"""The passes that a scheduler has on a worker, so that nothing but their answers is believed.

It is the worker's own slot, moved by what the worker says. The pump and the core take events for true: one
for a pass that was never dispatched would end the scheduler, not the worker.
"""

from __future__ import annotations

from engines.types import Pass
from service.core.slot import WorkerSlot
from service.core.types import Event, PassFailed, PassFinished, PassRevoked, PassStarted
from service.fleet.convert import BadMessage


class PassLedger:
    def __init__(self) -> None:
        self._slot = WorkerSlot()

    @property
    def running(self) -> Pass | None:
        return self._slot.running

    def dispatch(self, pass_: Pass, staged: bool) -> None:
        """Raises SlotError for what the worker could not take."""
        self._slot.dispatch(pass_, staged)

    def check(self, event: Event) -> bool:
        """Whether the event ends a pass. Raises BadMessage for one that can't be true."""
        match event:
            case PassStarted(_, pass_id):
                staged = self._slot.staged
                if staged is None or staged.pass_id != pass_id or self._slot.start_next() is None:
                    raise BadMessage(f"PassStarted.pass_id: {pass_id} is not the next one")
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
                if not self._slot.revoke(pass_id):
                    raise BadMessage(f"PassRevoked.pass_id: {pass_id} is not staged")
            case _:
                pass
        return False

    def _over(self, pass_id: int, what: str) -> Pass:
        running = self._slot.running
        if running is None or running.pass_id != pass_id:
            raise BadMessage(f"{what}.pass_id: {pass_id} does not run")
        return self._slot.finish()
