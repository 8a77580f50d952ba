"""Whether an executor that answers to its name still works: progress, leaks, restarts. Pure; time is given.

Process health says little: an executor whose pool has leaked away is alive, runs empty iterations and serves
nothing (TensorRT-LLM pull request 12313). So progress is an answer, or an iteration that ran something. And a
leak is what an executor says it holds beyond all that our calls can hold: it plans each call with its whole
need, so there is a bound. One such report means nothing, since a call that has just ended is freed an
iteration later; many in a row do, and the smallest excess among them is the leak.
"""

from __future__ import annotations

from collections import deque

from engines.executor.types import Answer, ExecutorSettings, Iteration, Report

STANDSTILL_S = 1.0  # a wait that ends so much later than asked was none: a stopped process, a paused machine
_OF_THE_REQUEST = ("refused:", "Encountered an error when fetching new request")


class Progress:
    """The last sign of work, in time that was spent waiting for one: `since` is moved when waiting begins.

    Silence of a wait that was given up counts on in the next one. Else an executor that hangs would outlive
    any number of waits that are each too short.
    """

    def __init__(self, now_s: float) -> None:
        self.since = now_s
        self._silent_s = 0.0

    def begin(self, now_s: float) -> None:
        self.since = now_s - self._silent_s

    def gave_up(self, now_s: float) -> None:
        self._silent_s = now_s - self.since

    def heard(self, report: Report, now_s: float) -> None:
        ran = isinstance(report, Iteration) and report.context_requests + report.generation_requests > 0
        if ran or isinstance(report, Answer):
            self.since, self._silent_s = now_s, 0.0


class Faults:
    """Passes in a row in which the executor gave errors of its own and nothing else.

    After an error in a forward, as of the GPU, TensorRT-LLM answers all requests with it and lives on (read
    in a source near 1.x, terminateActiveRequests); whether the next forward works nobody knows. What it says
    of a request that it does not take is not such an error.
    """

    PASSES_MAX = 3

    def __init__(self) -> None:
        self._row = 0
        self._well = False
        self._error = ""

    def heard(self, answer: Answer) -> None:
        if answer.error is None:
            self._well = True
        elif not answer.error.startswith(_OF_THE_REQUEST):
            self._error = answer.error

    def next_pass(self) -> str | None:
        """Why the executor is broken, when it is."""
        error, well = self._error, self._well
        self._error, self._well = "", False
        if well:
            self._row = 0
        elif error:
            self._row += 1
        broken = self._row >= self.PASSES_MAX
        return f"nothing but errors in {self._row} passes: {error}" if broken else None


class LeakProbe:
    """Finds blocks that an executor holds and no call explains."""

    def __init__(self, iterations: int) -> None:
        self._iterations = max(1, iterations)
        self._row = 0  # reports with an excess, without one in between
        self._least = 0  # the smallest excess of the row
        self.leaked_blocks = 0

    def saw(self, blocks_used: int, blocks_explained: int) -> bool:
        """The pool after an iteration. True when a leak, or more of it, is found."""
        self.leaked_blocks = min(self.leaked_blocks, blocks_used)
        excess = blocks_used - blocks_explained - self.leaked_blocks
        if excess <= 0:
            self._row = 0
            return False
        self._least = min(self._least, excess) if self._row else excess
        self._row += 1
        if self._row < self._iterations:
            return False
        self.leaked_blocks += self._least
        self._row = 0
        return True

    def reset(self) -> None:
        self._row = self.leaked_blocks = 0


class RestartBudget:
    """At most `restarts_max` restarts within `restart_window_s`."""

    def __init__(self, settings: ExecutorSettings) -> None:
        self._max = settings.restarts_max
        self._window_s = settings.restart_window_s
        self._at: deque[float] = deque()

    def take(self, now_s: float) -> bool:
        """Whether one more is allowed now; it counts from then on."""
        while self._at and now_s - self._at[0] >= self._window_s:
            self._at.popleft()
        if len(self._at) >= self._max:
            return False
        self._at.append(now_s)
        return True
