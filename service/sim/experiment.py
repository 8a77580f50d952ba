"""Running cases: which pieces of work there are, where they run, which are known already.

A case is three rounds of tasks (`tasks`): bounds for each seed and knobs for each policy, then the score of
each policy on each seed, then a run of each at a share of the best peer's goodput. Tasks of a round are
independent and go to a pool of processes; results are put together in the order of policies and seeds, so
they are the same whatever the number of workers. With a cache every task is kept by what it depends on, and a
suite that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from service.sim import tasks
from service.sim.cache import Cache, key_of
from service.sim.case import Case
from service.sim.code_digest import source_digest
from service.sim.figures import PointFigures
from service.sim.known_traces import KNOWN_TRACES
from service.sim.lab_policies import is_ours, parse
from service.sim.parts import load_parts
from service.sim.results import CaseResult, PolicyResult, dumped, loaded
from service.sim.tasks import LabSettings, SeedBounds, SeedScore
from service.sim.traces import find_trace
from service.sim.tuning import Tuned

_Found = TypeVar("_Found")
_CODE = ("service.sim.tasks",)  # what every task imports


@dataclass(frozen=True, slots=True)
class Progress:
    """A task ended. stage: "bound", "tune", "score" or "point". done, total: of the tasks of the case.
    cached: its result was known before."""

    case: str
    stage: str
    policy: str
    seed: int
    done: int
    total: int
    cached: bool


class Lab:
    """Runs cases, with a pool of `workers` processes (1: in this one). Use it as a context manager."""

    def __init__(
        self,
        settings: LabSettings,
        *,
        workers: int = 1,
        cache: Cache | None = None,
        progress: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        self._settings, self._cache, self._progress = settings, cache, progress
        self._pool: Executor | None = None
        if workers > 1:
            self._pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def run(self, case: Case, policies: Sequence[str]) -> CaseResult:
        """Raises ValueError for a policy or knob that does not exist and for a case that cannot be scored,
        MissingTrace for a trace that is not here."""
        if len(set(policies)) < len(policies):
            raise ValueError(f"policies: each once, got {', '.join(policies)}")
        for policy in policies:
            parse(policy, case.scheduler_settings())
        load_parts(case.workload)
        return _CaseRun(case, policies, self._settings, self._cache, self._progress, self._pool).result()


def run_case(
    case: Case,
    policies: Sequence[str],
    settings: LabSettings,
    progress: Callable[[Progress], None] = lambda _: None,
    *,
    workers: int = 1,
    cache: Cache | None = None,
) -> CaseResult:
    """One case; see `Lab.run`."""
    with Lab(settings, workers=workers, cache=cache, progress=progress) as lab:
        return lab.run(case, policies)


@dataclass(frozen=True, slots=True)
class _Task:
    """kind: of what `make` returns. depends: what it depends on besides case and code, as plain data."""

    stage: str
    policy: str
    seed: int
    kind: type
    make: Callable[..., Any]
    arguments: tuple[Any, ...]
    depends: Mapping[str, object]


class _CaseRun:
    def __init__(
        self,
        case: Case,
        policies: Sequence[str],
        settings: LabSettings,
        cache: Cache | None,
        progress: Callable[[Progress], None],
        pool: Executor | None,
    ) -> None:
        self._case, self._policies, self._settings = case, policies, settings
        self._cache, self._progress, self._pool = cache, progress, pool
        self._searched = not case.closed and not case.rates_per_s
        self._done = 0
        self._total = len(policies) * len(case.seeds)
        if self._searched:
            self._total += len(case.seeds) + (len(policies) if settings.tuning else 0)
            self._total += len(policies) * len(case.seeds) if self._has_peer_rate else 0
        self._code = {policy: source_digest(_CODE, policy) for policy in policies}
        self._code[""] = source_digest(_CODE)
        self._plain_case = plain_case(case)

    @property
    def _has_peer_rate(self) -> bool:
        return self._settings.peer_ratio is not None and not all(map(is_ours, self._policies))

    def result(self) -> CaseResult:
        bounds: list[SeedBounds] = []
        points: list[PointFigures | None] = [None] * (len(self._policies) * len(self._case.seeds))
        tuned: list[Tuned | None] = [None] * len(self._policies)
        if self._searched:
            first = [self._bound(seed) for seed in self._case.seeds]
            second = [self._tune(policy) for policy in self._policies] if self._settings.tuning else []
            found = self._round([*first, *second])
            bounds, tuned = found[: len(first)], found[len(first) :] or tuned
            reference = {b.seed: self._reference_per_s(b) for b in bounds}
            pairs = list(zip(self._policies, tuned, strict=True))
            scores = self._round(
                [self._score(p, t, s, reference[s]) for p, t in pairs for s in self._case.seeds]
            )
            if self._has_peer_rate:
                points = self._at_peer_rate(tuned, scores)
        else:
            scores = self._round([self._fixed(p, s) for p in self._policies for s in self._case.seeds])
        return CaseResult(
            case=self._case,
            settings=self._settings,
            bounds=tuple(bounds),
            policies=tuple(
                PolicyResult(
                    policy=policy,
                    spec=policy if chosen is None else chosen.spec,
                    tuned=chosen,
                    seeds=tuple(self._of(number, scores)),
                    code=self._code[policy],
                    peer_points=tuple(p for p in self._of(number, points) if p is not None),
                )
                for number, (policy, chosen) in enumerate(zip(self._policies, tuned, strict=True))
            ),
            version=version("plaserve"),
        )

    def _of(self, number: int, found: Sequence[_Found]) -> Sequence[_Found]:
        """Of the policy with this number, by seed."""
        seeds = len(self._case.seeds)
        return found[number * seeds : (number + 1) * seeds]

    def _at_peer_rate(
        self, tuned: Sequence[Tuned | None], scores: Sequence[SeedScore]
    ) -> list[PointFigures | None]:
        """A run of every policy on every seed on which a peer has any goodput."""
        assert self._settings.peer_ratio is not None
        level, rates = self._settings.search.levels[0], dict.fromkeys(self._case.seeds, 0.0)
        for number, policy in enumerate(self._policies):
            for score in self._of(number, scores):
                if not is_ours(policy) and score.search is not None:
                    rates[score.seed] = max(rates[score.seed], score.search.at(level).low_per_s)
        rates = {seed: self._settings.peer_ratio * best for seed, best in rates.items() if best}
        places = [
            (policy, chosen, seed)
            for policy, chosen in zip(self._policies, tuned, strict=True)
            for seed in self._case.seeds
        ]
        self._total -= sum(seed not in rates for _, _, seed in places)
        found = iter(self._round([self._point(p, t, s, rates[s]) for p, t, s in places if s in rates]))
        return [next(found) if seed in rates else None for _, _, seed in places]

    # --- tasks ---

    def _bound(self, seed: int) -> _Task:
        settings = self._settings
        depends = {
            "metric": asdict(settings.metric),
            "levels": settings.search.levels,
            "tolerance": settings.bound_tolerance,
        }
        arguments = (self._case, seed, settings)
        return _Task("bound", "", seed, SeedBounds, tasks.bound_seed, arguments, depends)

    def _tune(self, policy: str) -> _Task:
        settings, seed = self._settings, self._case.tuning_seed
        assert settings.tuning is not None
        depends = {"metric": asdict(settings.tuning_metric), "tuning": asdict(settings.tuning)}
        arguments = (self._case, policy, settings)
        return _Task("tune", policy, seed, Tuned, tasks.tune_policy, arguments, depends)

    def _score(self, policy: str, tuned: Tuned | None, seed: int, reference_per_s: float | None) -> _Task:
        settings = self._settings
        spec, start_per_s = (policy, 0.0) if tuned is None else (tuned.spec, tuned.limit_per_s)
        depends = {
            "spec": spec,
            "metric": asdict(settings.metric),
            "search": asdict(settings.search),
            "start": start_per_s,
            "reference": reference_per_s,
        }
        arguments = (self._case, spec, seed, settings, start_per_s, reference_per_s)
        return _Task("score", policy, seed, SeedScore, tasks.score_seed, arguments, depends)

    def _point(self, policy: str, tuned: Tuned | None, seed: int, rate_per_s: float) -> _Task:
        spec = policy if tuned is None else tuned.spec
        depends = {"spec": spec, "metric": asdict(self._settings.metric), "rate": rate_per_s}
        arguments = (self._case, spec, seed, self._settings, rate_per_s)
        return _Task("point", policy, seed, PointFigures, tasks.point_seed, arguments, depends)

    def _fixed(self, policy: str, seed: int) -> _Task:
        depends = {"metric": asdict(self._settings.metric), "rates": self._case.rates_per_s}
        arguments = (self._case, policy, seed, self._settings)
        return _Task("score", policy, seed, SeedScore, tasks.fixed_seed, arguments, depends)

    def _reference_per_s(self, bounds: SeedBounds) -> float | None:
        ratio = self._settings.reference_ratio
        return None if ratio is None else ratio * bounds.bounds[0].per_s

    # --- where they run ---

    def _round(self, wanted: Sequence[_Task]) -> list[Any]:
        """Their results, in order."""
        found: list[Any] = [None] * len(wanted)
        running: dict[Future[Any], int] = {}
        for number, task in enumerate(wanted):
            known = self._cache.get(self._key(task)) if self._cache is not None else None
            if known is not None:
                found[number] = loaded(task.kind, known)
                self._ended(task, cached=True)
            elif self._pool is not None:
                running[self._pool.submit(task.make, *task.arguments)] = number
            else:
                found[number] = self._kept(task, task.make(*task.arguments))
        for future in as_completed(running):
            number = running[future]
            found[number] = self._kept(wanted[number], future.result())
        return found

    def _kept(self, task: _Task, value: Any) -> Any:
        if self._cache is not None:
            self._cache.put(self._key(task), dumped(value))
        self._ended(task, cached=False)
        return value

    def _ended(self, task: _Task, *, cached: bool) -> None:
        self._done += 1
        self._progress(
            Progress(
                self._case.name, task.stage, task.policy, task.seed, self._done, self._total, cached=cached
            )
        )

    def _key(self, task: _Task) -> str:
        return key_of(
            {
                "stage": task.stage,
                "policy": task.policy,
                "seed": task.seed,
                "case": self._plain_case,
                "code": self._code[task.policy],
                **task.depends,
            }
        )


def plain_case(case: Case) -> Mapping[str, object]:
    """All of a case that its runs depend on: the engine and the traces themselves, not their names."""
    plain: dict[str, object] = {
        key: value for key, value in asdict(case).items() if key not in ("name", "seeds", "rates_per_s")
    }
    files = [find_trace(name) if name in KNOWN_TRACES else Path(name) for name, _ in case.workload.parts]
    plain["engine"] = repr(case.setting())
    plain["traces"] = [
        hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path is not None and path.is_file()
    ]
    return plain
