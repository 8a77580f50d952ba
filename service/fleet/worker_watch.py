"""Who hears what the engine of a worker does, and the plain counts of it that metrics are read from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from engines.types import Pass, PassKind, PassResult


class WorkerObserver(Protocol):
    """Called on the loop, must return at once and never raise. Seconds are those of the loop's clock."""

    def brought(self, request_id: str, carrier: Mapping[str, str]) -> None:
        """A request is new here. carrier: its trace context, empty without one."""

    def left(self, request_id: str) -> None:
        """It ended here, by whatever way."""

    def ran(self, pass_: Pass, result: PassResult, start_s: float, end_s: float) -> None: ...

    def failed(self, pass_: Pass, error: str, start_s: float, end_s: float) -> None: ...


class WorkerCounts:
    """A `WorkerObserver`. Since the start; engine_s: seconds that the engine says."""

    def __init__(self) -> None:
        self.passes = Counter(dict.fromkeys(PassKind, 0))
        self.tokens = Counter(dict.fromkeys(PassKind, 0))
        self.engine_s = dict.fromkeys(PassKind, 0.0)
        self.passes_failed = 0

    def brought(self, request_id: str, carrier: Mapping[str, str]) -> None: ...

    def left(self, request_id: str) -> None: ...

    def ran(self, pass_: Pass, result: PassResult, start_s: float, end_s: float) -> None:
        self.passes[result.kind] += 1
        self.tokens[result.kind] += sum(item.computed for item in result.items)
        self.engine_s[result.kind] += result.elapsed_s

    def failed(self, pass_: Pass, error: str, start_s: float, end_s: float) -> None:
        self.passes_failed += 1
