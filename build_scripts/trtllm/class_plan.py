"""What can be planned of an executor that packs: which T-classes carry passes, and how large the last one is.

Its split points are constants (`engines.trtllm_profiles`), so there are no edges to choose, and nothing is
padded. A class that carries no pass need not be warm. The last class is as large as the largest pass that is
worth having: one that takes `pass_s_max`, what a pass with long tokens may take while shorts arrive, and not
below the knee, where tokens are not yet paid for. What is above it is activation memory that the KV pool
lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engines.cell_plan import Traffic, cell_s
from engines.cost_model import CostModel
from engines.trtllm_profiles import SPLIT_POINTS, map_cell

_STEP = 64  # the last class is a multiple of it
LAST_CLASS_MAX = 16_384  # larger ones fail to build with several profiles


@dataclass(frozen=True, slots=True)
class ClassUse:
    """passes_ratio, seconds_ratio: shares of the passes, and of their time, that the class carries."""

    t_class: int
    passes_ratio: float
    seconds_ratio: float


def last_class(cost: CostModel, pass_s_max: float) -> int:
    """Tokens of the largest pass that is worth having; see the module text."""
    lowest = SPLIT_POINTS[0] + _STEP
    fitting = [t for t in range(lowest, LAST_CLASS_MAX + 1, _STEP) if cell_s(cost, t, 1) <= pass_s_max]
    knee = -(-cost.knee_tokens() // _STEP) * _STEP
    return min(LAST_CLASS_MAX, max(lowest, knee, *fitting[-1:]))


def class_use(traffic: Traffic, cost: CostModel, classes: Sequence[int]) -> tuple[ClassUse, ...]:
    """How much of `traffic` each class carries. Raises ValueError for a group above the last class."""
    passes, seconds = [0.0] * len(classes), [0.0] * len(classes)
    for (length, rows), weight in traffic.groups.items():
        index = map_cell(length, rows, tuple(classes)).class_index
        if index is None:
            raise ValueError(f"classes end at {classes[-1]}, but a pass has {length * rows} tokens")
        passes[index] += weight
        seconds[index] += weight * cell_s(cost, length, rows)
    return tuple(
        ClassUse(t_class, p / sum(passes), s / sum(seconds))
        for t_class, p, s in zip(classes, passes, seconds, strict=True)
    )
