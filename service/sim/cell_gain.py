"""Whether planned cells pay: the same requests on rectangular engines with one set of cells and with another.

A plan is made from the lengths of one seed and run on another, so that it can't know what comes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from engines.cell_plan import Cell
from engines.simulated_settings import Setting
from service.sim.case import Case
from service.sim.figures import PointFigures
from service.sim.point import run_point
from service.sim.run_length import Expected, Load


@dataclass(frozen=True, slots=True)
class CellCase(Case):
    """A case whose engines have these cells and no others. engine must be a kind that pads to cells."""

    cells: tuple[Cell, ...] = ()

    def setting(self) -> Setting:
        capabilities, profiles, cost = Case.setting(self)
        largest = max(length * rows for length, rows in self.cells)
        return capabilities, replace(profiles, cells=self.cells, t_classes=(largest,)), cost


def with_cells(case: Case, cells: Sequence[Cell]) -> CellCase:
    """Raises ValueError where the engine of `case` has no cells."""
    if not case.setting()[1].cells:
        raise ValueError(f"engine {case.engine} has no cells; use padded_grid")
    own = {field.name: getattr(case, field.name) for field in fields(Case)}
    return CellCase(**own, cells=tuple(cells))


def traffic_seen(load: Load, rate_per_s: float) -> Expected:
    """The requests of a window at a rate, with what they have to compute under an unlimited prefix cache.

    Raises ValueError where they are not known before a run.
    """
    expected = load.plan(rate_per_s).expected
    if expected is None:
        raise ValueError("lengths: what arrives depends on answers; plan from open arrivals or a histogram")
    return expected


def lengths_of(seen: Expected) -> dict[int, float]:
    """New tokens -> requests."""
    tokens = np.maximum(seen.jobs.new_tokens, 1).astype(int).tolist()
    return {length: float(count) for length, count in sorted(Counter(tokens).items())}


def run_cells(case: Case, cells: Sequence[Cell], policy: str, rate_per_s: float, load: Load) -> PointFigures:
    """`policy` at a rate on these cells. load: of `case`, so that all sets of cells meet the same requests
    and targets."""
    return run_point(with_cells(case, cells), policy, rate_per_s, load.seed, load.metric, load=load)
