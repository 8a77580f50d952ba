"""One child process for many engines: what a start does to an executor, without the start of a process.

A contract suite makes some hundred engines of one kind. Each finds the executor empty, as after a start:
the fake package empties it for a prompt that no test uses. Closing leaves the process up, `end` ends it.
One engine at a time.

An executor runs ahead of who listens: a short request is over before the next pass. The contract is about
single passes, so here a call gets a second answer only when all calls have had their first, answers come
one a call at a time, and a `receive` that does not wait gets nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from engines.executor.types import Answer, Call, CallKind, ExecutorLink, Facts, LinkLost, Report
from tests.executor_fakes.skin.bindings import RESET

_RESET_S = 10.0


class SharedLink:
    """make: the real link, not started."""

    def __init__(self, make: Callable[[], ExecutorLink]) -> None:
        self._make = make
        self._link: ExecutorLink | None = None
        self._facts: Facts | None = None
        self._lives = 0
        self._open = False
        self._told: list[Report] = []  # heard and not handed out: all but answers
        self._answers: dict[str, deque[Answer]] = {}
        self._fresh: set[str] = set()  # calls that have had no answer yet

    def start(self) -> Facts:
        if self._link is None or self._facts is None:
            self._link = self._make()
            self._facts = self._link.start()
        self._lives += 1
        self._open = True
        self._told, self._answers, self._fresh = [], {}, set()
        reset = self._named("reset")
        self._link.enqueue([Call(reset, CallKind.GENERATE, RESET, 1)])
        while True:
            heard = self._link.receive(_RESET_S)
            if not heard:
                raise LinkLost("the executor was not emptied")
            if any(isinstance(each, Answer) and each.call_id == reset and each.final for each in heard):
                return self._facts

    def enqueue(self, calls: Sequence[Call]) -> None:
        self._fresh |= {call.call_id for call in calls}
        self._running().enqueue([replace(call, call_id=self._named(call.call_id)) for call in calls])

    def cancel(self, call_id: str) -> None:
        self._fresh.discard(call_id)
        self._running().cancel(self._named(call_id))

    def receive(self, timeout_s: float) -> Sequence[Report]:
        link = self._running()
        if timeout_s <= 0:
            return ()
        if not self._fits():
            self._hear(link.receive(timeout_s))
        first = self._fresh & self._answers.keys()
        if not self._fits() and (first or self._told):
            return self._handed_out(first)
        return self._handed_out(set(self._answers))

    def _hear(self, heard: Sequence[Report]) -> None:
        mine = self._named("")
        for each in heard:
            if not isinstance(each, Answer):
                self._told.append(each)
            elif each.call_id.startswith(mine):
                answer = replace(each, call_id=each.call_id[len(mine) :])
                self._answers.setdefault(answer.call_id, deque()).append(answer)

    def _fits(self) -> bool:
        """Whether there is an answer to every call that has had none yet, and one at all."""
        return bool(self._answers) and self._fresh <= self._answers.keys()

    def _handed_out(self, call_ids: set[str]) -> Sequence[Report]:
        """What was told, and one answer to each of these calls."""
        reports, self._told = self._told, []
        for call_id in [each for each in self._answers if each in call_ids]:
            answers = self._answers[call_id]
            reports.append(answers.popleft())
            if not answers:
                del self._answers[call_id]
        self._fresh -= call_ids
        return reports

    def close(self) -> None:
        self._open = False

    def interrupt(self) -> None:
        self.close()

    def end(self) -> None:
        """End the process."""
        self._open = False
        if self._link is not None:
            self._link.close()
        self._link = self._facts = None

    def _named(self, call_id: str) -> str:
        return f"{self._lives}/{call_id}"

    def _running(self) -> ExecutorLink:
        if self._link is None or not self._open:
            raise LinkLost("the executor is not up")
        return self._link
