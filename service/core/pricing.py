"""What a pass will cost on one instance: cost model after padding, with the classes already looked up."""

from __future__ import annotations

import math
from collections.abc import Sequence

from engines.cost_model import CostModel, PassShape
from engines.profiles import Profiles
from engines.types import Layout, Padding


class Pricer:
    """Predicted seconds of passes on an instance; `math.inf` where no profile takes the pass."""

    def __init__(self, cost: CostModel, profiles: Profiles) -> None:
        self.cost = cost
        self.profiles = profiles
        self._class_s: dict[PassShape, float] = {}
        self.knee_tokens = min(cost.knee_tokens(), profiles.request_tokens_max)
        grid = {length for length, _ in profiles.cells}
        self.chunk_edges = tuple(sorted(grid)) if profiles.padding is Padding.CELL else profiles.t_classes

    def pass_s(self, items: Sequence[tuple[int, int]]) -> float:
        """`items` are (new tokens, history tokens) per request; no items cost nothing."""
        if not items:
            return 0.0
        shape = self.profiles.executed(items)
        if shape is None:
            return math.inf
        if not self.profiles.block_mask:
            return self.cost.pass_s(shape)
        cached = self._class_s.get(shape)  # few distinct shapes where everything is padded to a class
        if cached is None:
            cached = self._class_s[shape] = self.cost.pass_s(shape)
        return cached

    def request_s(self, new_tokens: int, history: int) -> float:
        """Seconds for one request alone, in chunks of the largest profile where it needs several."""
        total_s, tokens_max = 0.0, self.profiles.request_tokens_max
        while new_tokens > 0:
            chunk = min(new_tokens, tokens_max)
            total_s += self.pass_s([(chunk, history)])
            new_tokens -= chunk
            history += chunk
        return total_s

    def chunk_sizes(self, tokens_in_pass: int, remaining: int) -> list[int]:
        """Chunks worth considering beside `tokens_in_pass`: up to each class edge, or all that remains."""
        before = tokens_in_pass if self.profiles.layout is Layout.PACKED else 0
        sizes = [edge - before for edge in self.chunk_edges if edge > before]
        chunks = [size for size in sizes if size < remaining]
        if any(size >= remaining for size in sizes):
            chunks.append(remaining)
        return chunks
