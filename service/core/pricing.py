"""What a pass will cost on one instance: the cost model after padding.

The scheduler asks for it many times a request, mostly for a row of waiting requests and one more, or one
less. What a packed engine pays depends on sums over its items alone (`cost_model`), so `Pricer.row` keeps
running sums and prices any stretch of a row in constant time. A rectangular engine, or one that replays
captured rectangles, pays for its longest row: there the stretch is looked through, and the shapes already met
are kept.

A *part* is an item that ends before its prompt does; it costs more where it is a request of its own.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from engines.cost_model import CostModel
from engines.profiles import Profiles
from engines.types import Layout, Padding

Item = tuple[int, int]  # new tokens, history tokens
_SHAPES_MAX = 4096  # prices kept; far more than a grid or a list of classes has


class PassRow(Protocol):
    """Prices of passes made of a row of items, each as `Pricer.pass_s` of those items."""

    def __len__(self) -> int: ...

    def cost(self, start: int, end: int) -> float:
        """Seconds of a pass of the fixed items and `items[start:end]`."""

    def cost_with(self, new_tokens: int, history: int, *, part: bool = False) -> float:
        """Seconds of a pass of all items and one more."""

    def append(self, new_tokens: int, history: int, *, part: bool = False) -> None:
        """Make the row one item longer."""


class Pricer:
    """Predicted seconds of passes on an instance; `math.inf` where no profile takes the pass."""

    def __init__(self, cost: CostModel, profiles: Profiles) -> None:
        self.profiles = profiles
        self._kept_s: dict[tuple[int, ...], float] = {}
        self._best_edges: dict[tuple[int, float], int] = {}  # while nothing rides
        self._riders = (0, 0, 0)  # T, A, R of what rides in every pass
        self._packed = profiles.layout is Layout.PACKED
        self._tokens_max = profiles.t_classes[-1] if self._packed else 0
        self._request_tokens_max = profiles.request_tokens_max
        self._unpadded = self._packed and profiles.padding is Padding.NOTHING and not profiles.h_classes
        grid = {length for length, _ in profiles.cells}
        self.chunk_edges = tuple(sorted(grid)) if profiles.padding is Padding.CELL else profiles.t_classes
        self.believe(cost, cost.knee_tokens())

    def believe(self, cost: CostModel, knee_tokens: int) -> None:
        """Price by `cost` from here on; `knee_tokens` is its knee. Rows made before keep their prices."""
        self.cost = cost
        self._cost_s = cost.sums_pricer()
        self.knee_tokens = min(knee_tokens, self._request_tokens_max)
        self._kept_s.clear()
        self._best_edges.clear()

    def pass_s(self, items: Sequence[Item], parts: int = 0) -> float:
        """`items` are (new tokens, history tokens) per request; no items cost nothing."""
        if not items:
            return 0.0
        if not self._packed:
            longest, history = max(items)[0], max(past for _, past in items)
            return self._rectangle_s(len(items), longest, history, parts)
        if self.profiles.captured and (shape := self.profiles.replayed(items)) is not None:
            return self.cost.pass_s(shape, parts)
        tokens = attention = history = 0
        for new, past in items:
            tokens += new
            attention += new * (new + 2 * past)
            history += past
        return self.sums_s(tokens, attention, history, parts)

    def sums_s(self, tokens: int, attention: int, history: int, parts: int = 0) -> float:
        """`pass_s` on a packed engine from T, A and R (see `engines.cost_model`)."""
        if self._unpadded:
            if tokens > self._tokens_max:
                return math.inf
            if self._riders[0]:
                more, pairs, past = self._riders
                return self._cost_s(tokens + more, attention + pairs, history + past, parts)
            return self._cost_s(tokens, attention, history, parts)
        sums = self.profiles.packed_sums(tokens, attention, history)
        return math.inf if sums is None else self._cost_s(*sums, parts)

    def sums(self) -> tuple[Callable[[int, int, int, int], float], int]:
        """(`sums_s` as it is while the same requests ride, the largest T for it): the way around what need
        not be asked for each price of a row."""
        if self._unpadded and not self._riders[0]:
            return self._cost_s, self._tokens_max
        return self.sums_s, sys.maxsize

    def ride(self, histories: Collection[int]) -> None:
        """From here on one more token for each of `histories` rides in every pass, on top of its limits: what
        decodes beside prefill, on an engine that never pads."""
        requests, history = len(histories), sum(histories)
        self._riders = (requests, requests + 2 * history, history)

    def alone_s(self, items: Sequence[Item]) -> float:
        """`pass_s` of a pass in which nothing rides."""
        riders, self._riders = self._riders, (0, 0, 0)
        try:
            return self.pass_s(items)
        finally:
            self._riders = riders

    def row(self, items: Sequence[Item], fixed: Sequence[Item] = (), *, parts: int = 0) -> PassRow:
        """Prices of stretches of `items`, all of `fixed` in each pass; `parts` of the fixed are parts."""
        sums = self._packed and not self.profiles.captured
        return (_PackedRow if sums else _RectangleRow)(self, items, fixed, parts)

    def request_s(self, new_tokens: int, history: int) -> float:
        """Seconds for one request alone, in chunks of the largest profile where it needs several."""
        total_s, tokens_max = 0.0, self._request_tokens_max
        while new_tokens > tokens_max:
            total_s += self.pass_s(((tokens_max, history),), parts=1)
            new_tokens -= tokens_max
            history += tokens_max
        return total_s + self.pass_s(((new_tokens, history),)) if new_tokens > 0 else total_s

    def chunk_sizes(self, tokens_in_pass: int, remaining: int) -> list[int]:
        """Chunks worth considering beside `tokens_in_pass`: up to each class edge, or all that remains."""
        before = tokens_in_pass if self.profiles.layout is Layout.PACKED else 0
        sizes = [edge - before for edge in self.chunk_edges if edge > before]
        chunks = [size for size in sizes if size < remaining]
        if any(size >= remaining for size in sizes):
            chunks.append(remaining)
        return chunks

    def best_edge(self, history: int, allowed_s: float) -> int:
        """The class edge with the best tokens/s of a chunk that takes no longer than `allowed_s`, and none
        below the knee."""
        key = (history, allowed_s)
        known = self._best_edges.get(key)
        if known is None or self._riders[0]:
            known = self._find_edge(history, allowed_s)
            if not self._riders[0]:
                if len(self._best_edges) >= _SHAPES_MAX:
                    self._best_edges.clear()
                self._best_edges[key] = known
        return known

    def _find_edge(self, history: int, allowed_s: float) -> int:
        best_rate, best = 0.0, 0
        for edge in self.chunk_edges:
            chunk_s = self.pass_s(((edge, history),), parts=1)
            if best >= self.knee_tokens and chunk_s > allowed_s:
                break
            if math.isfinite(chunk_s) and (best < self.knee_tokens or edge / chunk_s >= best_rate):
                best_rate, best = edge / chunk_s, edge
        return best

    def _rectangle_s(self, rows: int, longest: int, history: int, parts: int) -> float:
        key = (rows, longest, history, parts)
        kept = self._kept_s.get(key)
        if kept is None:
            shape = self.profiles.rectangle(rows, longest, history)
            kept = math.inf if shape is None else self.cost.pass_s(shape, parts)
            if len(self._kept_s) >= _SHAPES_MAX:
                self._kept_s.clear()
            self._kept_s[key] = kept
        return kept


class _PackedRow:
    """T, A and R of the fixed and the first n items, for every n; those of a stretch are differences."""

    __slots__ = ("_attention", "_fixed", "_history", "_parts", "_sums_s", "_tokens", "_tokens_max")

    def __init__(self, pricer: Pricer, items: Iterable[Item], fixed: Sequence[Item], parts: int) -> None:
        self._sums_s, self._tokens_max = pricer.sums()
        tokens = attention = history = 0
        for new, past in fixed:
            tokens += new
            attention += new * (new + 2 * past)
            history += past
        self._fixed = tokens > 0
        self._tokens, self._attention, self._history = [tokens], [attention], [history]
        for new, past in items:
            tokens += new
            attention += new * (new + 2 * past)
            history += past
            self._tokens.append(tokens)
            self._attention.append(attention)
            self._history.append(history)
        self._parts = [parts] * len(self._tokens)

    def __len__(self) -> int:
        return len(self._tokens) - 1

    def cost(self, start: int, end: int) -> float:
        if end <= start and not self._fixed:
            return 0.0
        tokens, attention, history, parts = self._tokens, self._attention, self._history, self._parts
        sum_tokens = tokens[end] - tokens[start] + tokens[0]
        if sum_tokens > self._tokens_max:
            return math.inf
        return self._sums_s(
            sum_tokens,
            attention[end] - attention[start] + attention[0],
            history[end] - history[start] + history[0],
            parts[end] - parts[start] + parts[0],
        )

    def cost_with(self, new_tokens: int, history: int, *, part: bool = False) -> float:
        sum_tokens = self._tokens[-1] + new_tokens
        if sum_tokens > self._tokens_max:
            return math.inf
        return self._sums_s(
            sum_tokens,
            self._attention[-1] + new_tokens * (new_tokens + 2 * history),
            self._history[-1] + history,
            self._parts[-1] + part,
        )

    def append(self, new_tokens: int, history: int, *, part: bool = False) -> None:
        self._tokens.append(self._tokens[-1] + new_tokens)
        self._attention.append(self._attention[-1] + new_tokens * (new_tokens + 2 * history))
        self._history.append(self._history[-1] + history)
        self._parts.append(self._parts[-1] + part)


class _RectangleRow:
    """Looks through the stretch: the longest item and the longest history are no sums."""

    __slots__ = ("_fixed", "_fixed_parts", "_items", "_parts", "_pricer")

    def __init__(self, pricer: Pricer, items: Iterable[Item], fixed: Sequence[Item], parts: int) -> None:
        self._pricer = pricer
        self._items = list(items)
        self._fixed = list(fixed)
        self._parts = [False] * len(self._items)
        self._fixed_parts = parts

    def __len__(self) -> int:
        return len(self._items)

    def cost(self, start: int, end: int) -> float:
        parts = self._fixed_parts + sum(self._parts[start:end])
        return self._pricer.pass_s([*self._fixed, *self._items[start:end]], parts)

    def cost_with(self, new_tokens: int, history: int, *, part: bool = False) -> float:
        items = [*self._fixed, *self._items, (new_tokens, history)]
        return self._pricer.pass_s(items, self._fixed_parts + sum(self._parts) + part)

    def append(self, new_tokens: int, history: int, *, part: bool = False) -> None:
        self._items.append((new_tokens, history))
        self._parts.append(part)
