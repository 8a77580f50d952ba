"""Where a scheduler gets and gives trace contexts; the fleet knows nothing else of tracing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TraceLink:
    """called: wire id and the context that came with it, before it is submitted. carrier: wire id -> the
    context that goes to a worker with it."""

    called: Callable[[str, Mapping[str, str]], None]
    carrier: Callable[[str], Mapping[str, str]]
