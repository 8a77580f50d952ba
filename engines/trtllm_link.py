"""The process that holds a TensorRT-LLM executor, as an `ExecutorLink`.

Every way in which a child can end (it died, hangs, closed its socket, sent what is no message) is one
exception, `LinkLost`, that says how and shows the child's last lines. `start` brings up a new child with a
new socket; nothing of the old one is left. `engines.trtllm_process` is one life of a child.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engines.executor.types import BackendUnavailable, Call, Facts, LinkLost, Report, Unread
from engines.trtllm_child.config import ChildConfig
from engines.trtllm_child.wire import Cancel, Configure, Enqueue, Failed, Message, Reports, Started
from engines.trtllm_process import INTERRUPTED, Child, ChildSettings

_LOST_GRACE_S = 0.5  # a child that is given up: to say how it ended, and to obey SIGTERM


class ChildLink:
    """`ExecutorLink` to a child process."""

    def __init__(self, config: ChildConfig, python: Path, settings: ChildSettings | None = None) -> None:
        self._config = config
        self._python = python
        self._settings = settings or ChildSettings()
        self._child: Child | None = None
        self._lost = "it was never started"
        self._interrupted = threading.Event()

    @property
    def pid(self) -> int | None:
        """Of the running child."""
        return self._child.pid if self._child is not None else None

    def start(self) -> Facts:
        self.close()
        if self._interrupted.is_set():
            raise LinkLost(INTERRUPTED)
        deadline = time.monotonic() + self._settings.start_timeout_s
        child = self._child = Child(self._python, self._config.device, self._settings)
        if self._interrupted.is_set():  # it came between
            child.interrupt()
        try:
            child.connect(deadline)
            child.send(Configure(_absolute(self._config)))
            while True:
                heard = child.hear(max(0.0, deadline - time.monotonic()))
                if isinstance(heard, Started):
                    return heard.facts
                if isinstance(heard, Failed):
                    raise BackendUnavailable(heard.reason, heard.remedy)
                if heard is not None:
                    raise LinkLost(f"it said {type(heard).__name__} before it was up")
                if time.monotonic() >= deadline:
                    raise LinkLost(f"it did not come up in {self._settings.start_timeout_s:g} s")
        except LinkLost as lost:
            raise self._gone(str(lost)) from None
        except BaseException:
            self._end(0.0, _LOST_GRACE_S)
            raise

    def enqueue(self, calls: Sequence[Call]) -> None:
        self._send(Enqueue(tuple(calls)))

    def cancel(self, call_id: str) -> None:
        self._send(Cancel(call_id))

    def receive(self, timeout_s: float) -> Sequence[Report]:
        child = self._alive()
        found: list[Report] = []
        wait_s = timeout_s
        try:
            while (heard := child.hear(wait_s)) is not None:
                if not isinstance(heard, Reports):
                    raise LinkLost(f"it said {type(heard).__name__} while it ran")
                found.extend(heard.reports)
                if heard.skipped:
                    found.append(Unread(heard.skipped))
                wait_s = 0.0
        except LinkLost as lost:
            if found:  # told next time: the end stays at the end of what is heard
                return found
            raise self._gone(str(lost)) from None
        return found

    def close(self) -> None:
        child = self._child
        if child is not None:
            asked = child.ask_to_close(self._settings.close_grace_s)
            self._lost = "it was closed"
            grace_s = self._settings.close_grace_s
            self._end(grace_s if asked else 0.0, grace_s)

    def interrupt(self) -> None:
        self._interrupted.set()
        child = self._child
        if child is not None:
            child.interrupt()

    def _send(self, message: Message) -> None:
        try:
            self._alive().send(message)
        except LinkLost as lost:
            if self._child is None:
                raise
            raise self._gone(str(lost)) from None

    def _alive(self) -> Child:
        if self._child is None:
            raise LinkLost(self._lost)
        return self._child

    def _gone(self, why: str) -> LinkLost:
        """The child ended or is given up: put it away; how it ended and what it said last."""
        child = self._child
        if child is None:
            return LinkLost(why)
        ended = child.ended_by_itself(_LOST_GRACE_S)
        self._end(0.0, _LOST_GRACE_S)
        how = f"; it {child.exit_text}" if ended else ""
        said = child.last_lines()
        self._lost = f"TensorRT-LLM child {child.pid} is gone: {why}{how}" + (
            f"; last lines:\n{said}" if said else "; it printed nothing"
        )
        return LinkLost(self._lost)

    def _end(self, patience_s: float, grace_s: float) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end(patience_s, grace_s)


def _absolute(config: ChildConfig) -> ChildConfig:
    path = Path(config.model_dir)
    return replace(config, model_dir=str(path.resolve())) if path.exists() else config
