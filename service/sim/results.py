"""Results of cases: their files, what they sum up to, and how sure they are.

Files. `<case>.json` holds everything of one case: settings, bounds, knobs tried and chosen, every run that
was made, the digest of the code behind each policy. `lab.json` is the summary of all cases, `points.parquet`
has one row for each run and lane. JSON has no NaN and no Infinity: what is infinite or unknown is null.
Nothing that depends on the machine is in them, so equal inputs give equal bytes.

Intervals. Over two seeds or more: mean and the 95 % t-interval. With one seed there is no spread to
estimate; then it is the bracket of the search (highest rate sustained, lowest that was not). `kind` says
which. Seeds are shared by all policies, so a ratio of two is taken seed by seed, and its interval is that of
the logarithms.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from service.core.types import Lane
from service.sim.cache import write_whole
from service.sim.case import Case
from service.sim.figures import PointFigures
from service.sim.goodput import Goodput
from service.sim.lab_policies import OURS, is_ours
from service.sim.tasks import LabSettings, SeedBounds, SeedScore
from service.sim.tuning import Tuned

SCHEMA_VERSION = 2


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """policy: as it was asked for. spec: with the knobs chosen. code: digest of the code behind it.
    peer_points: by seed, at `LabSettings.peer_ratio` of the best peer; empty where no peer has any goodput.
    """

    policy: str
    spec: str
    tuned: Tuned | None
    seeds: tuple[SeedScore, ...]
    code: str
    peer_points: tuple[PointFigures, ...] = ()

    def goodput(self, level: float) -> list[Goodput]:
        """By seed; empty where nothing was searched."""
        return [score.search.at(level) for score in self.seeds if score.search is not None]


@dataclass(frozen=True, slots=True)
class CaseResult:
    """Everything about one case. bounds: by seed; empty where rates are fixed. version: of this project."""

    case: Case
    settings: LabSettings
    bounds: tuple[SeedBounds, ...]
    policies: tuple[PolicyResult, ...]
    version: str
    schema_version: int = SCHEMA_VERSION

    def bound_per_s(self, level: float) -> list[float]:
        """By seed."""
        return [next(b.per_s for b in seed.bounds if b.level == level) for seed in self.bounds]


# --- intervals ---


@dataclass(frozen=True, slots=True)
class Interval:
    """kind: "t" (mean and 95 % t-interval over seeds) or "bracket" (one seed: of the search)."""

    value: float
    low: float
    high: float | None
    kind: str
    seeds: int


def t_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high) at 95 %. Raises ValueError for fewer than two values."""
    if len(values) < 2:
        raise ValueError(f"a t-interval needs two values or more, got {len(values)}")
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    from scipy import stats  # slow to import, and no command but the lab's needs it

    half = float(stats.t.ppf(0.975, len(values) - 1)) * math.sqrt(variance / len(values))
    return mean, mean - half, mean + half


def goodput_interval(found: Sequence[Goodput]) -> Interval | None:
    """Of one policy over seeds; None where a seed could not be scored."""
    if not found or not all(goodput.scored for goodput in found):
        return None
    if len(found) == 1:
        return Interval(found[0].low_per_s, found[0].low_per_s, found[0].high_per_s, "bracket", 1)
    mean, low, high = t_interval([goodput.low_per_s for goodput in found])
    return Interval(mean, max(0.0, low), high, "t", len(found))


def ratio_interval(ours: Sequence[Goodput], theirs: Sequence[Goodput]) -> Interval | None:
    """Ours over theirs, seed by seed: geometric mean, and the t-interval of the logarithms. None where a seed
    has no goodput on either side. With one seed the ends are what both brackets leave possible.

    Raises ValueError for different numbers of seeds.
    """
    pairs = list(zip(ours, theirs, strict=True))
    if not pairs or any(not (a.scored and b.scored and a.low_per_s and b.low_per_s) for a, b in pairs):
        return None
    if len(pairs) == 1:
        a, b = pairs[0]
        low = a.low_per_s / b.high_per_s if b.high_per_s else 0.0
        high = a.high_per_s / b.low_per_s if a.high_per_s else None
        return Interval(a.low_per_s / b.low_per_s, low, high, "bracket", 1)
    mean, low, high = t_interval([math.log(a.low_per_s / b.low_per_s) for a, b in pairs])
    return Interval(math.exp(mean), math.exp(low), math.exp(high), "t", len(pairs))


# --- the summary ---


def summary(results: Iterable[CaseResult]) -> dict[str, Any]:
    """Plain data: case -> policy -> goodput by level with interval, regret, lanes at the common rates.

    without_goodput: cases in which no policy but ours has any goodput at the first level.
    """
    cases = {result.case.name: case_summary(result) for result in results}
    apart = [
        name
        for name, figures in cases.items()
        if figures["bounds"]
        and not all(map(is_ours, figures["policies"]))
        and not any(_has_goodput(f) for p, f in figures["policies"].items() if not is_ours(p))
    ]
    return {"schema_version": SCHEMA_VERSION, "cases": cases, "without_goodput": apart}


def case_summary(result: CaseResult) -> dict[str, Any]:
    levels = result.settings.search.levels if result.bounds else ()
    bounds = {
        str(level): {
            "per_s": _mean(result.bound_per_s(level)),
            "capacity_per_s": _mean([_at(seed, level).capacity_per_s for seed in result.bounds]),
            "clairvoyant_per_s": _mean([_at(seed, level).clairvoyant_per_s for seed in result.bounds]),
        }
        for level in levels
    }
    first = result.policies[0] if result.policies else None
    ours = next((policy for policy in result.policies if _name(policy.policy) == OURS), None)
    return {
        "model": result.case.model,
        "engine": result.case.engine,
        "instances": result.case.instances,
        "seeds": list(result.case.seeds),
        "window_s_min": result.settings.metric.window_s_min,
        "lane_requests_min": result.settings.metric.lane_requests_min,
        "bounds": bounds,
        "short_alone_s": _mean([seed.short_alone_s for seed in result.bounds]),
        "policies": {
            policy.policy: {
                "spec": policy.spec,
                "goodput": {str(level): _goodput(result, policy, level) for level in levels},
                "ratio_to_first": {
                    str(level): _plain(ratio_interval(policy.goodput(level), first.goodput(level)))
                    for level in levels
                    if first is not None
                },
                "ours_over": {
                    str(level): _plain(ratio_interval(ours.goodput(level), policy.goodput(level)))
                    for level in levels
                    if ours is not None
                },
                "points": [point_summary(point) for score in policy.seeds for point in score.points],
                "peer_points": [point_summary(point) for point in policy.peer_points],
            }
            for policy in result.policies
        },
    }


def point_summary(point: PointFigures) -> dict[str, Any]:
    """One run, without what only a plot needs."""
    plain: dict[str, Any] = _plain(point)
    for lane, figures in point.lanes.items():
        plain["lanes"][lane]["attainment"] = figures.attainment
    return plain


def _goodput(result: CaseResult, policy: PolicyResult, level: float) -> dict[str, Any]:
    found = policy.goodput(level)
    bounds = result.bound_per_s(level)
    regrets = [1.0 - g.low_per_s / bound for g, bound in zip(found, bounds, strict=True)]
    return {
        "per_s": _plain(goodput_interval(found)),
        "by_seed": [goodput.low_per_s for goodput in found],
        "regret": _mean(regrets),
    }


def _name(policy: str) -> str:
    return policy.partition(":")[0]


def _has_goodput(figures: Mapping[str, Any]) -> bool:
    first = next(iter(figures["goodput"].values()))["per_s"]
    return first is not None and first["value"] > 0.0


def _at(seed: SeedBounds, level: float) -> Any:
    return next(bound for bound in seed.bounds if bound.level == level)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known and len(known) == len(values) else None


# --- files ---


def write_case(result: CaseResult, directory: Path) -> Path:
    """Everything of a case, as `<case>.json`."""
    path = directory / f"{result.case.name}.json"
    write_whole(path, dumped(result))
    return path


def read_case(path: Path) -> CaseResult:
    """Raises ValueError for a file of another schema."""
    text = path.read_bytes()
    version = json.loads(text).get("schema_version")
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"{path}: schema_version is {version}, this reads {SCHEMA_VERSION}; run the case again"
        )
    result: CaseResult = loaded(CaseResult, text)
    return result


def write_summary(results: Iterable[CaseResult], path: Path) -> None:
    text = json.dumps(summary(results), indent=1, allow_nan=False) + "\n"
    write_whole(path, text.encode())


def write_rows(results: Iterable[CaseResult], path: Path) -> None:
    """One row for each run and lane, as parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist([row for result in results for row in rows(result)])
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)


def rows(result: CaseResult) -> list[dict[str, Any]]:
    """stage: "search" for the runs of the goodput search, "point" for those at a fixed or common rate,
    "peer" for that at a share of the best peer's goodput."""
    found: list[dict[str, Any]] = []
    for policy in result.policies:
        for score in policy.seeds:
            searched = score.search.points if score.search is not None else ()
            common = tuple(point for point in policy.peer_points if point.seed == score.seed)
            for stage, points in (("search", searched), ("point", score.points), ("peer", common)):
                for point in points:
                    plain = _plain(point)
                    lanes = plain.pop("lanes")
                    plain.pop("outcomes")
                    for lane, figures in lanes.items():
                        extra = {"lane": lane, "attainment": point.lanes[Lane(lane)].attainment}
                        head = {"case": result.case.name, "policy": policy.policy, "spec": policy.spec}
                        found.append({**head, "stage": stage, **plain, **extra, **figures})
    return found


_adapters: dict[Any, TypeAdapter[Any]] = {}


def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Made once: that takes far longer than to use one."""
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


def dumped(value: Any) -> bytes:
    """A dataclass of results as JSON."""
    return _adapter(type(value)).dump_json(value, indent=1) + b"\n"


def loaded(kind: Any, text: bytes) -> Any:
    """What `dumped` wrote. Raises ValueError where it does not fit."""
    return _adapter(kind).validate_json(text)


def _plain(value: Any) -> Any:
    return None if value is None else _adapter(type(value)).dump_python(value, mode="json")
