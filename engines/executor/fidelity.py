"""Whether a pass ran as it was planned: in one iteration, by the executor's own statistics.

Statistics come in the order in which iterations ended, but nothing says when, and some never come. They are
not waited for. Those that came while a pass ran are of it, since one pass runs at a time; what comes between
its end and the next is still counted to it, too late for its result, in time for the count of split passes.
Iterations that computed no prompt tokens are of decoding requests and left out.
"""

from __future__ import annotations

from engines.executor.types import Iteration
from engines.types import Ran


class Fidelity:
    """The iterations of the pass that runs, or ran last."""

    def __init__(self) -> None:
        self._planned = 0  # prompt tokens that the pass still has to account for
        self._iterations = self._requests = self._tokens = 0

    def begin(self, tokens: int) -> None:
        """A pass of so many prompt tokens is sent."""
        self._planned = tokens
        self._iterations = self._requests = self._tokens = 0

    def saw(self, iteration: Iteration) -> bool:
        """True when it is the second of one pass: the pass was split."""
        if iteration.context_tokens < 1 or self._tokens >= self._planned:
            return False
        self._iterations += 1
        self._requests += iteration.context_requests
        self._tokens += iteration.context_tokens
        return self._iterations == 2

    def ran(self, computed: int) -> Ran | None:
        """How the pass ran, where all of its `computed` prompt tokens are accounted for."""
        self._planned = computed
        if not computed or self._tokens < computed:
            return None
        return Ran(self._iterations, self._requests, self._tokens)
