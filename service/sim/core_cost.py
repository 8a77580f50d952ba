"""What the scheduling core costs by itself, at a queue of a given length.

    python -m service.sim.core_cost                                    # 10,000 queued, 64 instances
    python -m service.sim.core_cost --growth --plot core-cost.png      # over queued and over instances

A closed loop keeps the queue as long as it is told: so many requests are sent in half a virtual second, and
when some end others come within 20 ms, so that nearly every arrival has a poll of its own. Nine in ten
are chats (LMSYS-like), the rest documents (`rag`), one token each; the instances are simulated H200s (32B).
Once the queue is full the processor time of the core is counted (thread time, less what reading the clock
takes):

    us a request    all events and polls of the window, over the requests that ended in it
    us a poll       of one that gave somebody a pass, without the events before it: mean, P50, P99

Collections of garbage that fall into the core's calls are in these times; `GC` is their part of a request,
and the longest one. They are as in the service (`service.garbage`); with `--python-gc` as Python has them.

    slo         targets as they are by default: with a long queue nearly all of them are out of reach
    in reach    every target 10 min away: all are feasible, and nobody needs to be set aside
    prefixes    as `slo`, and prompts have blocks: half of them begin with one of 64 shared prefixes

Growth is drawn over the queue (64 instances) and over the instances (1,000 queued); the exponent is the slope
of the logarithms by least squares. A window is bounded by requests and by seconds; it says what it counted.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from engines.simulated_settings import h200_32b_like
from service.core.settings import Mode, SchedulerSettings
from service.core.types import InstanceSpec, Lane, Request
from service.garbage import collect_seldom
from service.policies import make_scheduler
from service.sim.cluster import SimInstance
from service.sim.kernel import run
from service.sim.plots import COLOURS, figure, save, style
from service.sim.result import SimRecord
from service.sim.scale import DOCUMENTS, Meter
from service.sim.speed import LmsysLike
from service.sim.workload import Arrival

QUEUED = (10, 100, 1_000, 10_000, 100_000)
INSTANCES = (1, 8, 64, 250, 1_000)
INSTANCES_FIXED, QUEUED_FIXED = 64, 1_000  # where the other one is varied
MIXES = ("slo", "in reach", "prefixes")
IN_REACH_S = 600.0
FILL_S = 0.5  # in which the queue is sent
BEGINS_S = 1.0  # what ended by then is not counted
SPREAD_S = 0.02  # the next ones come within this of the end of one
PREFIXES = 64
PREFIX_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class CoreCost:
    """Microseconds of processor time. queued: that wait. gc_us: of `request_us`."""

    mix: str
    queued: int
    instances: int
    requests: int
    polls: int  # that dispatched
    request_us: float
    poll_us: float
    poll_us_p50: float
    poll_us_p99: float
    gc_us: float
    gc_ms_max: float  # the longest collection in a call of the core


class ClosedLoop:
    """`queued` requests in `FILL_S`, and when one ends as many as are missing. waiting: those in the queue;
    arrived: all that were submitted."""

    def __init__(
        self,
        queued: int,
        mix: str,
        block_tokens: int,
        seed: int,
        waiting: Callable[[], int],
        arrived: Callable[[], int],
    ) -> None:
        self._sizes = LmsysLike(sys.maxsize, queued / FILL_S, seed, DOCUMENTS)
        self._random = np.random.default_rng(seed + 1)
        self._queued, self._mix, self._block_tokens = queued, mix, block_tokens
        self._waiting, self._arrived, self._sent = waiting, arrived, 0

    def next_arrival(self) -> Arrival | None:
        return self._next() if self._sent < self._queued else None

    def ended(self, request: Request, now_s: float) -> Iterable[Arrival]:
        missing = self._queued - self._waiting() - (self._sent - self._arrived())
        return [self._next(now_s + SPREAD_S * self._random.random()) for _ in range(missing)]

    def _next(self, arrival_s: float | None = None) -> Arrival:
        self._sent += 1
        arrival = self._sizes.next_arrival()
        assert arrival is not None
        request = arrival.request
        changes: dict[str, Any] = {} if arrival_s is None else {"arrival_s": arrival_s}
        if self._mix == "in reach":
            changes["ttft_target_s"] = IN_REACH_S
        elif self._mix == "prefixes":
            changes["block_hashes"] = self._hashes(request)
        return replace(arrival, request=replace(request, **changes)) if changes else arrival

    def _hashes(self, request: Request) -> tuple[int, ...]:
        own = int(request.request_id[1:])
        shared, blocks = 0, request.prompt_tokens // self._block_tokens
        if self._random.random() < 0.5:
            own_prefix = int(self._random.integers(PREFIXES))
            shared = min(PREFIX_BLOCKS, blocks)
            head = tuple(range(own_prefix * PREFIX_BLOCKS, own_prefix * PREFIX_BLOCKS + shared))
        else:
            head = ()
        return head + tuple((own << 16) + block for block in range(shared, blocks))


class Window:
    """Counts once the queue is full, up to so many ends or so much processor time of this thread."""

    def __init__(self, meter: Meter, requests: int, seconds: float) -> None:
        self._meter, self._requests, self._seconds = meter, requests, seconds
        self._began_s: float | None = None
        self.ends = 0
        self.collections_ns: list[int] = []
        self._collecting_ns = 0

    def ended(self, record: SimRecord) -> bool:
        if self._began_s is None:
            if record.end_s is not None and record.end_s >= BEGINS_S:
                self._meter.clear()
                self.collections_ns.clear()
                self._began_s = time.thread_time()
            return False
        self.ends += 1
        return self.ends >= self._requests or time.thread_time() - self._began_s > self._seconds

    def collecting(self, phase: str, info: dict[str, int]) -> None:
        """For `gc.callbacks`."""
        if phase == "start":
            self._collecting_ns = time.thread_time_ns()
        elif self._meter.in_core:
            self.collections_ns.append(time.thread_time_ns() - self._collecting_ns)


def measure(
    queued: int,
    instances: int,
    mix: str = "slo",
    requests: int = 5_000,
    seconds: float = 20.0,
    *,
    policy: str = "plaserve",
    seed: int = 1,
) -> CoreCost:
    """One window of `requests` ends, or of `seconds` of processor time where these are over before."""
    settings = SchedulerSettings(
        mode=Mode.TEMPORAL, queue_requests_max=10**7, queue_tokens_max=10**11, queue_age_s_max=IN_REACH_S
    )
    capabilities, profiles, cost = h200_32b_like()
    specs = [InstanceSpec(f"i{index}", capabilities, profiles, cost) for index in range(instances)]
    scheduler = make_scheduler(policy, settings)
    meter = Meter(scheduler)
    window = Window(meter, requests, seconds)
    loads = scheduler.policy.lane_load
    source = ClosedLoop(
        queued,
        mix,
        capabilities.block_tokens,
        seed,
        waiting=lambda: sum(loads(lane)[0] for lane in Lane),
        arrived=lambda: scheduler.submitted,
    )
    gc.collect()
    gc.callbacks.append(window.collecting)
    try:
        run(
            scheduler,
            map(SimInstance, specs),
            source,
            observer=window,
            keep_log=False,
            keep_records=False,
        )
    finally:
        gc.callbacks.remove(window.collecting)
    polls = np.array(meter.dispatching_ns) * 1e-3
    return CoreCost(
        mix=mix,
        queued=queued,
        instances=instances,
        requests=window.ends,
        polls=len(polls),
        request_us=sum(meter.decisions_ns) * 1e-3 / window.ends,
        poll_us=float(polls.mean()),
        poll_us_p50=float(np.quantile(polls, 0.5)),
        poll_us_p99=float(np.quantile(polls, 0.99)),
        gc_us=sum(window.collections_ns) * 1e-3 / window.ends,
        gc_ms_max=max(window.collections_ns, default=0) * 1e-6,
    )


def exponent(sizes: Sequence[int], costs_us: Sequence[float]) -> float:
    """b of cost = a size^b, by least squares of the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(costs_us), 1)[0])


def table(costs: Sequence[CoreCost]) -> Table:
    shown = Table(
        "mix", "queued", "instances", "requests", "polls", "us a request", "us a poll", "P50", "P99"
    )
    for heading in ("GC us a request", "GC ms max"):
        shown.add_column(heading)
    for cost in costs:
        values = (
            cost.mix, f"{cost.queued:,}", f"{cost.instances:,}", f"{cost.requests:,}", f"{cost.polls:,}",
            f"{cost.request_us:.0f}", f"{cost.poll_us:.0f}", f"{cost.poll_us_p50:.0f}",
            f"{cost.poll_us_p99:.0f}", f"{cost.gc_us:.1f}", f"{cost.gc_ms_max:.1f}",
        )  # fmt: skip
        shown.add_row(*values)
    return shown


def growth_text(axis: str, sizes: Sequence[int], costs: Sequence[CoreCost]) -> str:
    request = exponent(sizes, [cost.request_us for cost in costs])
    poll = exponent(sizes, [cost.poll_us for cost in costs])
    span = f"{axis} from {sizes[0]:,} to {sizes[-1]:,}"
    return f"{span}: a request grows as n^{request:.2f}, a poll as n^{poll:.2f}"


def draw(rows: Sequence[tuple[str, Sequence[int], Sequence[CoreCost]]], path: Path) -> None:
    """Microseconds over the size, both axes logarithmic: one panel for each row (axis, sizes, costs)."""
    picture = figure(width=8.6, height=3.8)
    for number, (axis, sizes, costs) in enumerate(rows, 1):
        axes = picture.add_subplot(1, len(rows), number)
        lines = {
            "a request": [cost.request_us for cost in costs],
            "a dispatching poll, mean": [cost.poll_us for cost in costs],
            "a dispatching poll, P99": [cost.poll_us_p99 for cost in costs],
        }
        for (name, values), colour in zip(lines.items(), COLOURS, strict=False):
            axes.plot(sizes, values, "o-", color=colour, markersize=4, linewidth=1.2, label=name)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_ylim(1.0, 10_000.0)
        style(axes, f"over {axis}", axis, "us of one core")
        axes.legend(fontsize=8, frameon=False, loc="lower right")
    save(picture, path)


def main(arguments: Sequence[str] | None = None) -> None:
    words = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m service.sim.core_cost", description=__doc__, formatter_class=words
    )
    parser.add_argument("--queued", type=int, default=10_000, help="requests that wait (default: 10,000)")
    parser.add_argument("--instances", type=int, default=64, help="default: 64")
    parser.add_argument("--mix", nargs="+", default=list(MIXES), choices=MIXES, help="default: all three")
    parser.add_argument(
        "--policy", default="plaserve", help="fcfs shows what is left without an order and a look ahead"
    )
    parser.add_argument("--requests", type=int, default=20_000, help="counted in a window (default: 20,000)")
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="of processor time, the most for a window (default: 30)"
    )
    parser.add_argument("--growth", action="store_true", help="over queued and instances, first mix")
    parser.add_argument("--plot", type=Path, help="with --growth: draw to this file (PNG or SVG)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--python-gc", action="store_true", help="collect garbage as often as by default")
    asked = parser.parse_args(arguments)
    if not asked.python_gc:
        collect_seldom()

    def one(mix: str, queued: int, instances: int) -> CoreCost:
        sys.stderr.write(f"{mix}: {queued:,} queued, {instances:,} instances\n")
        return measure(queued, instances, mix, asked.requests, asked.seconds, policy=asked.policy)

    rows: list[tuple[str, Sequence[int], Sequence[CoreCost]]] = []
    if asked.growth:
        mix = asked.mix[0]
        rows.append(("queued", QUEUED, [one(mix, n, INSTANCES_FIXED) for n in QUEUED]))
        rows.append(("instances", INSTANCES, [one(mix, QUEUED_FIXED, n) for n in INSTANCES]))
        costs = [cost for _, _, own in rows for cost in own]
    else:
        costs = [one(mix, asked.queued, asked.instances) for mix in asked.mix]
    if asked.json:
        sys.stdout.write(json.dumps([asdict(cost) for cost in costs], indent=2) + "\n")
        return
    console = Console(width=150)
    console.print(table(costs))
    for axis, sizes, own in rows:
        console.print(growth_text(axis, sizes, own))
    if asked.plot is not None and rows:
        draw(rows, asked.plot)


if __name__ == "__main__":
    main()
