"""What a decision costs as the fleet grows, and how many shards that asks for.

    python -m service.sim.scale --instances 64 250 1000 --plot scale.png

One scheduler over n simulated H200s (32B) gets 20 requests a second for each: 20,000/s at n = 1,000, nine
tenths chats and one tenth documents, some 80 % of what the instances can do. The fleet is simulated; what is
measured is processor time of the core:

    decision    the events since the last poll and the poll, microseconds
    control     all of that, for each request
    look, step  what a role controller does once a second: `observe`, and its own step, milliseconds

A scheduler is one process and uses one core. With r requests a second for each instance, and c(n) = a + b n
the control time a request (least squares over what was measured), a scheduler of n instances is busy for
r n c(n) of a second. It must stay under a share u of its core, so that a burst finds room: u = 0.5. Then

    n* = the largest n with r n (a + b n) <= u           shards = ceil(instances / n*)

Python's own IO (links, streams) is on top of that and not in it; see the figures of the runtime.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from engines.simulated_settings import h200_32b_like
from service.core.fleet_view import observe, totals
from service.core.reconcile import Controller, FleetView, RoleMove
from service.core.scheduler import PrefillScheduler
from service.core.settings import Mode, SchedulerSettings
from service.core.types import Command, Dispatch, Event, InstanceSpec
from service.policies import POLICIES, make_controller, make_scheduler
from service.sim.cluster import SimInstance
from service.sim.kernel import run
from service.sim.plots import COLOURS, figure, save, style
from service.sim.speed import LmsysLike, Waits

RATE_PER_INSTANCE = 20.0  # requests a second
DOCUMENTS = 0.1  # share of the requests
CORE_SHARE = 0.5  # u
REQUESTS_MIN = 5000


@dataclass(frozen=True, slots=True)
class Cost:
    """Processor time of one run. us: microseconds, ms: milliseconds."""

    policy: str
    mode: str
    instances: int
    requests: int
    decisions: int
    decision_us_p50: float
    decision_us_p99: float
    control_us: float  # for each request
    look_ms_p50: float
    look_ms_p99: float
    step_ms_p50: float
    step_ms_p99: float
    ttft_ms_p50: float  # simulated, to see that the run is a sane one
    ttft_ms_p99: float

    @property
    def core_share(self) -> float:
        """Of one core, at the rate of the run."""
        return RATE_PER_INSTANCE * self.instances * self.control_us * 1e-6


class Meter:
    """Counts the processor time of a scheduler from outside, less what reading the clock takes.

    dispatching_ns: of the polls alone that gave somebody a pass. in_core: a call is under way."""

    def __init__(self, scheduler: PrefillScheduler) -> None:
        self.decisions_ns: list[int] = []
        self.dispatching_ns: list[int] = []
        self.in_core = False
        self._events_ns = 0
        self._clock_ns = clock_ns()
        self._on_event, self._poll = scheduler.on_event, scheduler.poll
        scheduler.on_event = self.on_event  # type: ignore[method-assign]
        scheduler.poll = self.poll  # type: ignore[method-assign]

    def on_event(self, event: Event, now_s: float) -> None:
        began, self.in_core = time.thread_time_ns(), True
        self._on_event(event, now_s)
        self.in_core = False
        self._events_ns += time.thread_time_ns() - began - self._clock_ns

    def poll(self, now_s: float) -> tuple[Command, ...]:
        began, self.in_core = time.thread_time_ns(), True
        commands = self._poll(now_s)
        self.in_core = False
        poll_ns = time.thread_time_ns() - began - self._clock_ns
        self.decisions_ns.append(self._events_ns + poll_ns)
        self._events_ns = 0
        if any(type(command) is Dispatch for command in commands):
            self.dispatching_ns.append(poll_ns)
        return commands

    def clear(self) -> None:
        """Count from here on."""
        self.decisions_ns.clear()
        self.dispatching_ns.clear()


def clock_ns(readings: int = 10_000) -> int:
    """What an interval of thread time holds of the clock itself, in the median; on some machines it takes
    longer than a small event."""
    pairs = (time.thread_time_ns() - time.thread_time_ns() for _ in range(readings))
    return -round(float(np.median(list(pairs))))


class MeteredController:
    """A controller whose looks and steps are timed. It looks once more than the kernel does, to time it."""

    def __init__(self, controller: Controller | None, scheduler: PrefillScheduler) -> None:
        self._controller, self._scheduler = controller, scheduler
        self._before = totals(scheduler, 0.0)
        self.looks_ns: list[int] = []
        self.steps_ns: list[int] = []

    @property
    def period_s(self) -> float:
        return 0.25  # four times as often as by default: more samples of a short run

    def step(self, fleet: FleetView, now_s: float) -> tuple[RoleMove, ...]:
        began = time.thread_time_ns()
        _, self._before = observe(self._scheduler, self._before, now_s)
        looked = time.thread_time_ns()
        moves = self._controller.step(fleet, now_s) if self._controller is not None else ()
        self.looks_ns.append(looked - began)
        self.steps_ns.append(time.thread_time_ns() - looked)
        return moves


def measure(instances: int, *, policy: str, mode: str, seconds: float, seed: int = 1) -> Cost:
    """One run of `seconds` virtual seconds, or of `REQUESTS_MIN` requests where those are more."""
    settings = SchedulerSettings(mode=Mode(mode), queue_requests_max=10**6, queue_tokens_max=10**9)
    rate = RATE_PER_INSTANCE * instances
    requests = max(REQUESTS_MIN, round(rate * seconds))
    capabilities, profiles, cost = h200_32b_like()
    specs = [InstanceSpec(f"i{index}", capabilities, profiles, cost) for index in range(instances)]
    scheduler = make_scheduler(policy, settings)
    controller = MeteredController(make_controller(policy, settings), scheduler)
    meter, waits = Meter(scheduler), Waits()
    gc.collect()
    run(
        scheduler,
        map(SimInstance, specs),
        LmsysLike(requests, rate, seed, DOCUMENTS),
        controller=controller,
        observer=waits,
        keep_log=False,
        keep_records=False,
    )
    return Cost(
        policy,
        mode,
        instances,
        requests,
        len(meter.decisions_ns),
        *_quantiles(meter.decisions_ns, 1e-3),
        sum(meter.decisions_ns) * 1e-3 / requests,
        *_quantiles(controller.looks_ns, 1e-6),
        *_quantiles(controller.steps_ns, 1e-6),
        *_quantiles(waits.ttft_s, 1e3),
    )


def _quantiles(values: Sequence[float], scale: float) -> tuple[float, float]:
    if not values:
        return 0.0, 0.0
    low, high = np.quantile(values, [0.5, 0.99]) * scale
    return float(low), float(high)


def line(costs: Sequence[Cost]) -> tuple[float, float]:
    """(a, b) of c(n) = a + b n in microseconds, neither below 0."""
    if len(costs) == 1:
        return costs[0].control_us, 0.0
    slope, offset = np.polyfit([c.instances for c in costs], [c.control_us for c in costs], 1)
    if slope <= 0.0 or offset <= 0.0:  # no growth to be seen, or nothing but growth
        worst = max(costs, key=lambda c: c.control_us)
        return (worst.control_us, 0.0) if slope <= 0.0 else (0.0, worst.control_us / worst.instances)
    return float(offset), float(slope)


def instances_max(offset_us: float, slope_us: float, rate: float = RATE_PER_INSTANCE) -> int:
    """n*: the most instances that one scheduler can serve; see the module text. At least 1."""
    budget = CORE_SHARE * 1e6 / rate  # of n (a + b n), microseconds
    root = 2.0 * budget / (offset_us + math.sqrt(offset_us**2 + 4.0 * slope_us * budget))
    return max(1, math.floor(root))


def shards(costs: Sequence[Cost], instances: int) -> int:
    """How many schedulers `instances` ask for, by the cost of one policy in one mode."""
    return math.ceil(instances / instances_max(*line(costs)))


def table(costs: Sequence[Cost]) -> Table:
    """A row for each run, and below them what they ask for."""
    shown = Table("policy, mode", "instances", "requests", "decision us P50", "P99", "us a request")
    for heading in ("of a core", "look ms P50", "P99", "step ms P50", "P99", "TTFT ms P50", "P99"):
        shown.add_column(heading)
    for cost in costs:
        values = (
            f"{cost.policy}, {cost.mode}", f"{cost.instances}", f"{cost.requests}",
            f"{cost.decision_us_p50:.0f}", f"{cost.decision_us_p99:.0f}", f"{cost.control_us:.0f}",
            f"{cost.core_share:.2f}", f"{cost.look_ms_p50:.2f}", f"{cost.look_ms_p99:.2f}",
            f"{cost.step_ms_p50:.2f}", f"{cost.step_ms_p99:.2f}",
            f"{cost.ttft_ms_p50:.0f}", f"{cost.ttft_ms_p99:.0f}",
        )  # fmt: skip
        shown.add_row(*values)
    return shown


def draw(costs: Sequence[Cost], path: Path) -> None:
    """Share of a core over instances, one line for each policy and mode, and the bound u."""
    picture = figure()
    axes = picture.add_subplot()
    for (name, own), colour in zip(_groups(costs).items(), COLOURS, strict=False):
        offset, slope = line(own)
        sizes = np.linspace(1, max(c.instances for c in own), 200)
        axes.plot([c.instances for c in own], [c.core_share for c in own], "o", color=colour, markersize=4)
        fitted = RATE_PER_INSTANCE * sizes * (offset + slope * sizes) * 1e-6
        axes.plot(sizes, fitted, color=colour, linewidth=1.2, label=name)
    axes.axhline(CORE_SHARE, color="#999999", linewidth=0.9, linestyle=":")
    style(axes, "one scheduler at 20 requests/s an instance", "instances", "cores")
    axes.set_ylim(bottom=0.0)
    axes.legend(fontsize=8, frameon=False)
    save(picture, path)


def _groups(costs: Sequence[Cost]) -> dict[str, list[Cost]]:
    groups: dict[str, list[Cost]] = {}
    for cost in costs:
        groups.setdefault(f"{cost.policy}, {cost.mode}", []).append(cost)
    return groups


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m service.sim.scale", description=__doc__.split("\n")[0])
    parser.add_argument("--instances", type=int, nargs="+", default=[64, 250, 1000])
    parser.add_argument(
        "--policy", nargs="+", default=["plaserve"], help=f"with knobs: {', '.join(POLICIES)}"
    )
    parser.add_argument("--mode", nargs="+", default=["temporal", "spatial"], choices=[m.value for m in Mode])
    parser.add_argument("--seconds", type=float, default=2.0, help="virtual seconds of a run (default: 2)")
    parser.add_argument("--plot", type=Path, help="draw to this file (PNG or SVG)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    asked = parser.parse_args(arguments)
    costs: list[Cost] = []
    for policy in asked.policy:
        for mode in asked.mode:
            for instances in asked.instances:
                sys.stderr.write(f"{policy}, {mode}, {instances} instances\n")
                costs.append(measure(instances, policy=policy, mode=mode, seconds=asked.seconds))
    groups = _groups(costs)
    if asked.json:
        sys.stdout.write(json.dumps([asdict(cost) for cost in costs], indent=2) + "\n")
    else:
        console = Console(width=150)
        console.print(table(costs))
        for name, own in groups.items():
            (offset, slope), most = line(own), max(asked.instances)
            console.print(
                f"{name}: c(n) = {offset:.0f} + {slope:.3f} n us a request; one scheduler serves up to "
                f"{instances_max(offset, slope)} instances at {RATE_PER_INSTANCE:.0f} requests/s each; "
                f"{most} instances ask for {shards(own, most)} shards",
                soft_wrap=True,
            )
    if asked.plot is not None:
        draw(costs, asked.plot)


if __name__ == "__main__":
    main()
