"""Which shapes an engine was built for, and what a pass costs it after padding.

One pure function, `Profiles.executed`, maps the items of a pass to the shape the engine really runs. The
builder, the scheduler, the simulator and the tests all use it, so padding can't be counted in two ways.

layout x padding:
  packed, nothing     T = sum of L; each request attends to its own history only (TensorRT-LLM). Or a captured
                      rectangle, see `captured`
  packed, class       T up to the next T-class, history up to the next H-class. The embedded engine separates
                      requests by a block mask over the whole row, so it pays for one long request of that
                      size
  rectangular, cell   B x longest L, both up to the next edge of the grid
  rectangular, class  B x longest L, the product up to the next T-class
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from engines.cost_model import PassShape
from engines.types import Layout, Padding

CAPTURED_PADDING_MAX = 2.0  # what the report of the LAPS artifact recommends


@dataclass(frozen=True, slots=True)
class Profiles:
    """The shapes of one engine.

    t_classes, h_classes: ascending edges in tokens, new and history. Empty h_classes: any history.
    cells: (L, B) cells of a rectangular grid, used with Padding.CELL only.
    captured: (L, B) cells with a captured graph, of an engine that packs and never pads otherwise. A pass
        that fits one, and is padded to `CAPTURED_PADDING_MAX` times its tokens at most, is padded to the
        smallest and replayed without launch cost, as LAPS does.
    block_mask: the packed row attends through one T x (H + T) mask (see the module text).
    """

    layout: Layout
    padding: Padding
    t_classes: tuple[int, ...]
    h_classes: tuple[int, ...] = ()
    cells: tuple[tuple[int, int], ...] = ()
    block_mask: bool = False
    captured: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for name in ("t_classes", "h_classes"):
            edges = getattr(self, name)
            if list(edges) != sorted(set(edges)) or any(e < 0 for e in edges):
                raise ValueError(f"{name} must be ascending and not negative: {edges}")
        if not self.t_classes:
            raise ValueError("t_classes is empty: name at least the largest pass in tokens")
        if self.captured and (self.layout, self.padding) != (Layout.PACKED, Padding.NOTHING):
            raise ValueError("captured: graphs are for an engine that packs and does not pad otherwise")
        if self.padding is Padding.CELL and not self.cells:
            raise ValueError("cells is empty: padding 'cell' needs the (L, B) cells that were built")
        largest = max((length * rows for length, rows in self.cells), default=0)
        if largest > self.tokens_max:
            raise ValueError(f"cells: one holds {largest} tokens, but t_classes ends at {self.tokens_max}")

    @property
    def tokens_max(self) -> int:
        """Largest T of one pass."""
        return self.t_classes[-1]

    @property
    def request_tokens_max(self) -> int:
        """Largest number of new tokens of one request in a pass; alone and without history it always fits."""
        if self.padding is Padding.CELL:
            return max(length for length, _ in self.cells)
        return self.tokens_max

    @property
    def history_max(self) -> int | None:
        """Largest summed history of one pass; None: no limit."""
        return self.h_classes[-1] if self.h_classes else None

    def t_class(self, tokens: int) -> int | None:
        """The class that `tokens` maps to; None above the largest."""
        return _edge(self.t_classes, tokens)

    def h_class(self, history: int) -> int | None:
        return _edge(self.h_classes, history) if self.h_classes else history

    def executed(self, items: Sequence[tuple[int, int]]) -> PassShape | None:
        """The shape that runs for `items` = (new tokens, history tokens) per request; None if none fits.

        Raises ValueError for no items.
        """
        if not items:
            raise ValueError("a pass needs at least one item")
        if self.captured and (rectangle := self.replayed(items)) is not None:
            return rectangle
        if self.layout is Layout.PACKED:
            tokens = attention = history = 0
            for new, past in items:
                tokens += new
                attention += new * (new + 2 * past)
                history += past
            return self.packed(tokens, attention, history, len(items))
        return self.rectangle(len(items), max(new for new, _ in items), max(past for _, past in items))

    def packed(self, tokens: int, attention: float, history: int, requests: int) -> PassShape | None:
        """`executed` of a packed engine from T, A, R and the number of requests."""
        sums = self.packed_sums(tokens, attention, history)
        if sums is None:
            return None
        padded = self.padding is not Padding.NOTHING and not self.block_mask and sums[0] > tokens
        if self.block_mask and self.padding is not Padding.NOTHING:
            requests = 1
        return PassShape(*sums, requests + padded)

    def packed_sums(self, tokens: int, attention: float, history: int) -> tuple[int, float, int] | None:
        """(T, A, R) that a packed engine runs for these, in constant time; None if no profile takes them."""
        if tokens > self.t_classes[-1] or (self.h_classes and history > self.h_classes[-1]):
            return None
        if self.padding is Padding.NOTHING:
            return tokens, attention, history
        t_class = self.t_classes[bisect_left(self.t_classes, tokens)]
        if self.block_mask:
            h_class = self.h_classes[bisect_left(self.h_classes, history)] if self.h_classes else history
            return t_class, t_class * (t_class + 2 * h_class), h_class
        pad = t_class - tokens  # one more request, of padding
        return t_class, attention + pad * pad, history

    def replayed(self, items: Sequence[tuple[int, int]]) -> PassShape | None:
        """The smallest captured graph that a pass fits; None where none does or padding would exceed."""
        longest = max(new for new, _ in items)
        fitting = [
            (length * b, length, b) for length, b in self.captured if length >= longest and b >= len(items)
        ]
        if not fitting:
            return None
        tokens, length, b = min(fitting)
        if tokens > CAPTURED_PADDING_MAX * sum(new for new, _ in items):
            return None
        history = max(past for _, past in items)
        return PassShape(tokens, tokens * (length + 2 * history), b * history, b, captured=True)

    def rectangle(self, rows: int, longest: int, history: int) -> PassShape | None:
        """`executed` of a rectangular engine from its rows, the longest of them and the longest history."""
        pad = 0
        if self.padding is Padding.CELL:
            fitting = [(length * b, length, b) for length, b in self.cells if length >= longest and b >= rows]
            if not fitting:
                return None
            _, longest, rows = min(fitting)
        else:
            t_class = self.t_class(rows * longest)
            if t_class is None:
                return None
            if self.padding is Padding.CLASS:
                pad = t_class - rows * longest
        h_class = self.h_class(history)
        if h_class is None:
            return None
        attention = rows * longest * (longest + 2 * h_class) + pad * pad
        return PassShape(rows * longest + pad, attention, rows * h_class, rows + (pad > 0))


def _edge(edges: tuple[int, ...], value: int) -> int | None:
    index = bisect_left(edges, value)
    return edges[index] if index < len(edges) else None
