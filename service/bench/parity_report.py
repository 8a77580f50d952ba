"""What service and simulator have in common, and where they are further apart than they may be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from service.bench.loadgen import Ending, Observation
from service.bench.report import without_nan
from service.bench.stats import LaneFigures, Quantiles, divide, lane_figures
from service.bench.workload import Label

ATTAINMENT_MAX = 0.03  # the largest differences allowed
QUANTILE_MAX = 0.10
CPU_MAX = 0.5  # cores


@dataclass(frozen=True, slots=True)
class Difference:
    """One lane (None: all requests), both sides, in the engine's time. Positive: the service has more."""

    label: Label | None
    service: LaneFigures
    simulator: LaneFigures

    @property
    def attainment(self) -> float:
        return self.service.attainment - self.simulator.attainment

    @property
    def p50_ratio(self) -> float:
        return divide(self.service.ttft_s.p50, self.simulator.ttft_s.p50) - 1.0

    @property
    def p90_ratio(self) -> float:
        return divide(self.service.ttft_s.p90, self.simulator.ttft_s.p90) - 1.0

    def faults(self) -> Iterator[str]:
        """What is further apart than allowed; a figure that was not measured is."""
        lane = self.label or "all"
        if not abs(self.attainment) <= ATTAINMENT_MAX:
            yield f"{lane}: attainment differs by {self.attainment:+.1%}, more than {ATTAINMENT_MAX:.0%}"
        for name, ratio in (("p50", self.p50_ratio), ("p90", self.p90_ratio)):
            if not abs(ratio) <= QUANTILE_MAX:
                yield f"{lane}: TTFT {name} differs by {ratio:+.1%}, more than {QUANTILE_MAX:.0%}"


@dataclass(frozen=True, slots=True)
class PolicyParity:
    """One policy. cpu_cores: processor time of the serving process over the time of the load.

    busy_ratio: of the simulated instance. lag_s_p99: how late requests were sent, in wall seconds.
    """

    policy: str
    differences: tuple[Difference, ...]
    endings: Mapping[Ending, int]
    cpu_cores: float
    busy_ratio: float
    lag_s_p99: float

    def faults(self) -> list[str]:
        found = [fault for difference in self.differences for fault in difference.faults()]
        broken = sum(count for ending, count in self.endings.items() if ending is not Ending.COMPLETED)
        if broken:
            found.append(f"{broken} requests did not complete")
        if not self.cpu_cores < CPU_MAX:
            found.append(f"the service took {self.cpu_cores:.2f} cores; the bound is {CPU_MAX}")
        return [f"{self.policy}: {fault}" for fault in found]


def compared(
    policy: str,
    service: Sequence[Observation],
    simulator: Sequence[Observation],
    cpu_cores: float,
    busy_ratio: float,
) -> PolicyParity:
    """Both sides over the same requests, in the engine's time. A lane without requests is left out."""
    lanes = [None, *(label for label in Label if any(seen.label is label for seen in simulator))]
    return PolicyParity(
        policy,
        tuple(Difference(label, _lane(service, label), _lane(simulator, label)) for label in lanes),
        Counter(seen.ending for seen in service),
        cpu_cores,
        busy_ratio,
        Quantiles.of([seen.lag_s for seen in service]).p99,
    )


def _lane(observations: Sequence[Observation], label: Label | None) -> LaneFigures:
    return lane_figures(seen for seen in observations if label is None or seen.label is label)


def render_parity(results: Sequence[PolicyParity]) -> RenderableType:
    """A table a policy, a row a lane, service before simulator; times in milliseconds of the engine."""
    return Group(*(part for result in results for part in _policy(result)))


def _policy(result: PolicyParity) -> Iterator[RenderableType]:
    yield Text(
        f" {result.policy}: the service took {result.cpu_cores:.3f} cores; the simulated engine was busy "
        f"{result.busy_ratio:.0%}; requests were sent up to {result.lag_s_p99 * 1e3:.1f} ms late (p99, wall)"
    )
    table = Table("lane", "n", "in time %", "", "p50 ms", "", "p90 ms", "", box=box.SIMPLE_HEAD)
    for difference in result.differences:
        ours, theirs = difference.service, difference.simulator
        table.add_row(
            difference.label or "all",
            str(ours.arrived),
            f"{ours.attainment * 100:.1f}/{theirs.attainment * 100:.1f}",
            f"{difference.attainment * 100:+.1f}",
            f"{_ms(ours.ttft_s.p50)}/{_ms(theirs.ttft_s.p50)}",
            f"{difference.p50_ratio:+.1%}",
            f"{_ms(ours.ttft_s.p90)}/{_ms(theirs.ttft_s.p90)}",
            f"{difference.p90_ratio:+.1%}",
        )
    table.caption = "service/simulator, and the difference"
    yield table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"


def parity_json(results: Sequence[PolicyParity]) -> dict[str, Any]:
    """By policy. Seconds of the engine; a figure that was not measured is null."""
    document = {
        result.policy: {
            "lanes": {
                str(d.label or "all"): {
                    "service": {**asdict(d.service), "attainment": d.service.attainment},
                    "simulator": {**asdict(d.simulator), "attainment": d.simulator.attainment},
                    "attainment_difference": d.attainment,
                    "p50_difference": d.p50_ratio,
                    "p90_difference": d.p90_ratio,
                }
                for d in result.differences
            },
            "endings": {str(ending): count for ending, count in result.endings.items()},
            "cpu_cores": result.cpu_cores,
            "busy_ratio": result.busy_ratio,
            "send_lag_s_p99": result.lag_s_p99,
            "faults": result.faults(),
        }
        for result in results
    }
    cleaned: dict[str, Any] = without_nan(document)
    return cleaned
