"""Running a suite: case by case, skipping what cannot run here, writing each result as it comes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from service.sim.cache import Cache
from service.sim.case import Case
from service.sim.experiment import Lab, Progress
from service.sim.results import CaseResult, summary, write_case, write_rows, write_summary
from service.sim.suite import Suite
from service.sim.traces import MissingTrace
from service.sim.verdicts import Summary


@dataclass(frozen=True, slots=True)
class Skipped:
    """A case whose trace is not here; `why` says where to get it and its digest."""

    case: str
    why: str


@dataclass(frozen=True, slots=True)
class SuiteResult:
    suite: Suite
    results: tuple[CaseResult, ...]
    skipped: tuple[Skipped, ...]

    def summary(self) -> Summary:
        """`results.summary`, as it reads back from JSON."""
        plain: Summary = json.loads(json.dumps(summary(self.results)))
        return plain


def run_suite(
    suite: Suite,
    *,
    cases: Sequence[Case] = (),
    policies: Sequence[str] = (),
    workers: int = 1,
    cache: Cache | None = None,
    directory: Path | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
    began: Callable[[Case], None] = lambda _: None,
) -> SuiteResult:
    """cases, policies: fewer than the suite's. directory: where results are written, each case when it ends.

    Raises ValueError for a case that cannot be scored as the suite says.
    """
    results: list[CaseResult] = []
    skipped: list[Skipped] = []
    with Lab(suite.settings, workers=workers, cache=cache, progress=progress) as lab:
        for case in cases or suite.cases:
            began(case)
            try:
                results.append(lab.run(case, tuple(policies) or suite.policies))
            except MissingTrace as error:
                skipped.append(Skipped(case.name, str(error)))
                continue
            if directory is not None:
                write_case(results[-1], directory / "cases")
    if directory is not None and results:
        write_summary(results, directory / "lab.json")
        write_rows(results, directory / "points.parquet")
    return SuiteResult(suite, tuple(results), tuple(skipped))
