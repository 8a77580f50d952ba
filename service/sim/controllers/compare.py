"""The comparison: every arm on every case, at loads told as a share of the case's capacity (`bounds`), with
the same arrivals for all arms; on request the goodput of every arm and an hour of constant load.

All tasks are independent and go to a pool of processes, those of the first seed first; with a cache each is
kept by all that it depends on, so a comparison that was stopped goes on where it was.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from typing import Any

from service.sim.cache import Cache, key_of
from service.sim.case import Case
from service.sim.code_digest import source_digest
from service.sim.controllers import runs
from service.sim.controllers.arms import ARMS, AUTO, DIFFERENCE, OURS, RATIO
from service.sim.controllers.runs import Found, Hour
from service.sim.controllers.scores import RunScore
from service.sim.experiment import plain_case
from service.sim.figures import MetricSettings
from service.sim.results import dumped, loaded
from service.sim.suite import Suite
from service.sim.tasks import load_of

FIRST_GUESS = 0.55  # of the capacity, for a goodput
HOUR_ARMS = (OURS, AUTO)
HOUR_PEERS = (RATIO, DIFFERENCE)  # at the first load of the first mix only


@dataclass(frozen=True, slots=True)
class CompareSettings:
    """loads: over the capacity of a case. goodput: look for that of every arm too, on the tuning seed.
    hour_loads: of hours of constant load of each mix of the first case, over the capacity of the mix."""

    loads: tuple[float, ...] = (0.5,)
    seeds: tuple[int, ...] = (1, 2, 3)
    goodput: bool = False
    hour_loads: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.loads or any(not 0.0 < load <= 1.0 for load in self.loads):
            raise ValueError(f"loads must be above 0 and at most 1, got {self.loads}")
        if len(set(self.seeds)) < len(self.seeds) or not self.seeds or min(self.seeds) < 0:
            raise ValueError(f"seeds must be one or more, each once and not negative, got {self.seeds}")
        if any(not 0.0 < load <= 1.0 for load in self.hour_loads):
            raise ValueError(f"hour_loads must be above 0 and at most 1, got {self.hour_loads}")


@dataclass(frozen=True, slots=True)
class Scored:
    """Of one case, load and arm, a run a seed."""

    case: str
    load: float
    arm: str
    runs: tuple[RunScore, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """capacity_per_s: case -> requests/s, of the first seed. goodput: case -> arm -> what was found."""

    suite: str
    settings: CompareSettings
    capacity_per_s: Mapping[str, float]
    scored: tuple[Scored, ...]
    goodput: Mapping[str, Mapping[str, Found]]
    hours: tuple[Hour, ...]

    @property
    def arms(self) -> tuple[str, ...]:
        """Those that were run, in order."""
        return tuple(dict.fromkeys(scored.arm for scored in self.scored))

    def of(self, case: str, load: float, arm: str) -> Scored:
        return next(s for s in self.scored if (s.case, s.load, s.arm) == (case, load, arm))


@dataclass(frozen=True, slots=True)
class Step:
    """A task ended."""

    what: str
    done: int
    total: int
    cached: bool


@dataclass(frozen=True, slots=True)
class _Task:
    """make(case, *arguments) -> kind."""

    case: Case
    kind: type
    make: Callable[..., Any]
    arguments: tuple[Any, ...]

    @property
    def name(self) -> str:
        return f"{self.make.__name__} {self.case.name}, {self.arguments[0]}"


def compare(
    suite: Suite,
    settings: CompareSettings,
    *,
    cases: Sequence[Case] = (),
    workers: int = 1,
    cache: Cache | None = None,
    progress: Callable[[Step], None] = lambda _: None,
) -> Comparison:
    """cases: fewer than the suite's. The result is the same whatever the number of workers."""
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    chosen, metric = tuple(cases or suite.cases), suite.settings.metric
    capacity = {case.name: load_of(case, metric, settings.seeds[0]).capacity_per_s for case in chosen}
    places = [(case, load, arm) for case in chosen for load in settings.loads for arm in ARMS]
    scores = [
        _Task(case, RunScore, runs.score, (arm, load * capacity[case.name], seed, metric))
        for seed in settings.seeds
        for case, load, arm in places
    ]
    hours = _hours(chosen[0], settings, metric)
    searched = [(case, arm) for case in chosen for arm in ARMS if settings.goodput]
    searches = [
        _Task(case, Found, runs.goodput, (arm, FIRST_GUESS, case.tuning_seed, metric))
        for case, arm in searched
    ]
    everything = [*scores, *hours, *searches]
    with contextlib.ExitStack() as stack:
        pool = None
        if workers > 1:
            spawn = multiprocessing.get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(workers, spawn))
        found = _results(everything, pool, cache, progress)
    at = {(task.case.name, *task.arguments[:3]): value for task, value in zip(scores, found, strict=False)}
    goodput: dict[str, dict[str, Found]] = {}
    for (case, arm), value in zip(searched, found[len(scores) + len(hours) :], strict=True):
        goodput.setdefault(case.name, {})[arm] = value
    return Comparison(
        suite.name,
        settings,
        capacity,
        tuple(
            Scored(
                case.name,
                load,
                arm,
                tuple(at[case.name, arm, load * capacity[case.name], seed] for seed in settings.seeds),
            )
            for case, load, arm in places
        ),
        goodput,
        tuple(found[len(scores) : len(scores) + len(hours)]),
    )


def _hours(case: Case, settings: CompareSettings, metric: MetricSettings) -> list[_Task]:
    tasks = []
    for number, still in enumerate(runs.still_cases(case)):
        for load in settings.hour_loads:
            arms = HOUR_ARMS if number or load != settings.hour_loads[0] else (*HOUR_ARMS, *HOUR_PEERS)
            rate_per_s = load * load_of(still, metric, settings.seeds[0]).capacity_per_s
            tasks += [_Task(still, Hour, runs.hour, (arm, rate_per_s, runs.HOUR_S)) for arm in arms]
    return tasks


def _results(
    tasks: Sequence[_Task], pool: Executor | None, cache: Cache | None, progress: Callable[[Step], None]
) -> list[Any]:
    """In order. pool: None: in this process."""
    policies = {ARMS[task.arguments[0]].policy for task in tasks}
    code = {policy: source_digest(("service.sim.controllers.runs",), policy) for policy in policies}
    keys = [_key(task, code[ARMS[task.arguments[0]].policy]) for task in tasks]
    found: list[Any] = [None] * len(tasks)
    running: dict[Future[Any], int] = {}
    done = 0

    def ended(number: int, value: Any, *, cached: bool) -> None:
        nonlocal done
        found[number], done = value, done + 1
        if cache is not None and not cached:
            cache.put(keys[number], dumped(value))
        progress(Step(tasks[number].name, done, len(tasks), cached=cached))

    for number, task in enumerate(tasks):
        known = cache.get(keys[number]) if cache is not None else None
        if known is not None:
            ended(number, loaded(task.kind, known), cached=True)
        elif pool is not None:
            running[pool.submit(task.make, task.case, *task.arguments)] = number
        else:
            ended(number, task.make(task.case, *task.arguments), cached=False)
    for future in as_completed(running):
        ended(running[future], future.result(), cached=False)
    return found


def _key(task: _Task, code: str) -> str:
    plain = [asdict(each) if isinstance(each, MetricSettings) else each for each in task.arguments]
    case = plain_case(task.case)
    return key_of({"make": task.make.__name__, "case": case, "arguments": plain, "code": code})
