"""The link to an executor, with what an engine needs besides: a loss is remembered, restarts are bounded.

Some things must not fail when the executor is gone: a request is cancelled, a hand-over adopted. What they
meet is kept, and raised by the next call that may fail.

A start may take minutes. Who wants the service to end need not wait for it: `interrupt` comes from another
thread, and from then on nothing is started any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engines.base import EngineError
from engines.executor.health import RestartBudget
from engines.executor.types import (
    BackendUnavailable,
    Call,
    ExecutorLink,
    ExecutorSettings,
    Facts,
    Incident,
    LinkLost,
    Report,
)

Note = Callable[[Incident, str], None]


class Supervisor:
    """lost: how the link was lost, where that could not be raised. gone: why the engine can't be used."""

    def __init__(self, link: ExecutorLink, settings: ExecutorSettings, note: Note) -> None:
        self._link = link
        self._note = note
        self._budget = RestartBudget(settings)
        self.lost: LinkLost | None = None
        self.gone: str | None = "the engine is not started"
        self._stopping: str | None = None

    def start(self) -> Facts:
        """Raises LinkLost, BackendUnavailable."""
        facts = self._link.start()
        self.lost = None
        self.gone = self._stopping
        return facts

    def interrupt(self, why: str) -> None:
        """From any thread. What waits for the executor raises LinkLost soon."""
        self._stopping = self.gone = why
        self._link.interrupt()

    def enqueue(self, calls: Sequence[Call]) -> None:
        """Raises LinkLost."""
        self._link.enqueue(calls)

    def enqueue_quietly(self, call: Call) -> None:
        self._quietly(lambda: self._link.enqueue([call]))

    def cancel(self, call_id: str) -> None:
        self._quietly(lambda: self._link.cancel(call_id))

    def receive(self, timeout_s: float) -> Sequence[Report]:
        """Raises LinkLost, also one that was met before."""
        if self.lost is not None:
            raise self.lost
        return self._link.receive(timeout_s)

    def end(self) -> None:
        """End the executor, to start it again."""
        self._link.close()

    def give_up_if(self, broken: str | None) -> None:
        """Raises LinkLost for an executor that is broken, after it was ended."""
        if broken is not None:
            self.end()
            raise LinkLost(broken)

    def restart(self, why: str, now_s: float) -> Facts:
        """Raises EngineError when it does not come up within what is allowed, or never can."""
        while self._stopping is None and self._budget.take(now_s):
            try:
                facts = self.start()
            except LinkLost as lost:
                why = str(lost)
                self._note(Incident.EXECUTOR_LOST, f"it did not come up again: {why}")
            except BackendUnavailable as error:
                why = str(error)
                break
            else:
                self._note(Incident.RESTARTED, "the executor is up again")
                return facts
        lost_for_good = f"the executor is lost and was restarted too often, or can't be: {why}"
        self.gone = self._stopping or lost_for_good
        raise EngineError(self.gone)

    def close(self, why: str) -> None:
        self.gone = why
        self._link.close()

    def _quietly(self, action: Callable[[], None]) -> None:
        if self.lost is not None or self.gone is not None:
            return
        try:
            action()
        except LinkLost as lost:
            self.lost = lost
