"""Chaos in virtual time: seeded schedules of faults over the same core as the service, with its laws checked.

    python -m service.sim.chaos --seeds 0:500
    python -m service.sim.chaos --schedule var/chaos/17.json

A run takes some tens of milliseconds. Where a law is broken, the schedule and the log of events are written
and it is said how to run it again. What breaks and how is in `chaos_schedule`, the laws are in `chaos_laws`,
what a driver does about faults in `chaos_front`, workers and links in `chaos_cluster`.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from engines.models import load_model
from engines.simulated import SimulatedModel
from engines.simulated_settings import Behaviour, Fault, Setting, engine_setting
from service.core.settings import Mode, SchedulerSettings
from service.core.types import InstanceSpec, Outcome, Request
from service.policies import make_controller, make_scheduler
from service.sim.agenda import Planned
from service.sim.chaos_cluster import ChaosCluster
from service.sim.chaos_front import ChaosFront, ChaosSteps
from service.sim.chaos_laws import Laws, digest
from service.sim.chaos_schedule import KINDS, ChaosFault, Schedule, from_json, make_schedule, to_json
from service.sim.cluster import SimInstance
from service.sim.loops import Targets

LIMIT_S = 400.0  # virtual seconds after the last planned thing; a run that lasts longer does not end
FAMILY_BLOCKS = 40  # blocks of the beginning that prompts of a family share
ATTEMPTED_LOG = 2000  # entries of the log that are written for a failure


@dataclass(slots=True)
class Report:
    """What one run came to. error: the law that it broke, empty where it kept all."""

    seed: int
    error: str = ""
    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    met: int = 0  # requests that met their target
    requests: int = 0
    declared_down: int = 0  # by the progress rule
    stale: int = 0  # messages of sessions that were over
    closed: int = 0  # ejections of slow instances
    wait_ratio_max: float = 0.0
    digest: str = ""
    log: tuple[str, ...] = ()


def run_schedule(schedule: Schedule, *, want_digest: bool = False) -> Report:
    """One run. Never raises for a broken law or a crash of the core: see `Report.error`."""
    report = Report(schedule.seed, faults=Counter(fault.kind for fault in schedule.faults))
    report.requests = len(schedule.asks)
    laws = Laws(schedule)
    front, steps = _build(schedule, laws)
    limit_s = schedule.last_s + LIMIT_S
    try:
        front.run(limit_s)
        assert front.agenda.next_s == math.inf, f"the run does not end: it is {front.agenda.now_s} s"
        laws.at_end(front, steps)
    except Exception as error:
        report.error = f"{type(error).__name__}: {error}"
        entries = [f"{now_s:.6f} {entry!r}" for now_s, entry in front.log[-ATTEMPTED_LOG:]]
        report.log = (*entries, *traceback.format_exc().splitlines())
    for record in front.records.values():
        report.outcomes[str(record.outcome or "live")] += 1
        target_s = record.request.ttft_target_s
        report.met += record.ttft_s is not None and target_s is not None and record.ttft_s <= target_s
    report.declared_down, report.stale = front.declared_down, front.stale
    report.closed = laws.ejections
    report.wait_ratio_max = laws.wait_ratio_max
    if want_digest:
        report.digest = digest(front)
    return report


def run_seed(seed: int, *, want_digest: bool = False, calm: bool = False) -> Report:
    """The run of a seed; `calm`: the same requests without any fault."""
    schedule = make_schedule(seed)
    if calm:
        schedule = replace(schedule, faults=())
    return run_schedule(schedule, want_digest=want_digest)


# --- from a schedule to a run ---


@lru_cache(maxsize=16)
def _setting(engine: str, kv_blocks: int) -> Setting:
    model = load_model("smollm2-135m-cpu" if engine == "small_cpu" else "qwen3-32b")
    return engine_setting(model, engine, kv_blocks=kv_blocks)


def settings_of(schedule: Schedule) -> SchedulerSettings:
    """Bounds a tenth of the defaults or so, so that short runs reach them."""
    return SchedulerSettings(
        mode=Mode(schedule.mode),
        stage_lead_s=schedule.stage_lead_s,
        queue_requests_max=schedule.queue_requests_max,
        age_bound_s=1.0,
        queue_age_s_max=30.0,
        outlier_passes_min=4,
        outlier_eject_s=1.0,
        hang_s_min=1.0,
    )


def _build(schedule: Schedule, laws: Laws) -> tuple[ChaosFront, ChaosSteps | None]:
    settings, faults = settings_of(schedule), schedule.faults
    front = ChaosFront(lambda: make_scheduler(schedule.policy, settings), laws.after_poll, schedule.last_s)
    agenda = front.agenda
    front.cluster = cluster = ChaosCluster(agenda, front, schedule.link_s, faults, schedule.instances)
    setting = _setting(schedule.engine, schedule.kv_blocks)
    for number in range(schedule.instances):
        cluster.add(_instance(number, setting, faults))
    arrivals = list(_planned(schedule, setting))
    agenda.arrivals(iter(arrivals))
    for ask, (_, request, _) in zip(schedule.asks, arrivals, strict=True):
        if ask.cancel_s is not None:
            agenda.at(ask.cancel_s, front.cancel, request.request_id)
    controller, steps = make_controller(schedule.policy, settings), None
    if controller is not None:
        steps = ChaosSteps(front, controller)
        agenda.every(controller.period_s, steps.tick)
    for fault in faults:
        _plan_fault(fault, front, cluster, steps)
    return front, steps


def _instance(number: int, setting: Setting, faults: Sequence[ChaosFault]) -> SimInstance:
    capabilities, profiles, cost = setting
    mine = [fault for fault in faults if fault.instance == number]
    failing = {int(f.factor): Fault(lost=None if f.how == "all" else ()) for f in mine if f.kind == "fail"}
    slow = [(f.at_s, f.at_s + (f.for_s or 0.0), f.factor) for f in mine if f.kind == "slow"]
    edges = sorted({edge for start_s, end_s, _ in slow for edge in (start_s, end_s)})
    speed = tuple(
        (edge, max([factor for start_s, end_s, factor in slow if start_s <= edge < end_s], default=1.0))
        for edge in edges
    )
    behaviour = Behaviour(faults=failing)
    return SimInstance(
        InstanceSpec(f"i{number}", capabilities, profiles, cost),
        lambda: SimulatedModel(capabilities, profiles, cost, behaviour),
        speed=speed,
    )


def _planned(schedule: Schedule, setting: Setting) -> Iterator[Planned]:
    capabilities, _, cost = setting
    targets = Targets(cost.request_s)
    for number, ask in enumerate(schedule.asks):
        shared = min(FAMILY_BLOCKS, ask.prompt_tokens // capabilities.block_tokens)
        hashes = tuple(ask.family * 1_000_003 + block for block in range(shared)) if ask.family else ()
        lane, target_s = targets.of(ask.prompt_tokens, 0)
        request = Request(
            f"r{number}",
            ask.prompt_tokens,
            ask.answer_tokens,
            ask.at_s,
            hashes,
            ttft_target_s=target_s,
            deadline_s=ask.deadline_s,
        )
        yield ask.at_s, request, lane


def _plan_fault(
    fault: ChaosFault, front: ChaosFront, cluster: ChaosCluster, steps: ChaosSteps | None
) -> None:
    at, name, for_s = partial(front.agenda.at, fault.at_s), f"i{fault.instance}", fault.for_s or 0.0
    match fault.kind:
        case "die":
            at(cluster.die, name, fault.for_s)
        case "cut":
            at(cluster.cut, name, fault.how)
            front.agenda.at(fault.at_s + for_s, cluster.heal, name)
        case "restart":
            at(front.restart, for_s)
        case "role":
            at(front.role, name, fault.how)
        case "stall":
            at(front.stall, for_s)
        case "drain":
            at(cluster.drain, name, for_s, fault.how == "leaves")
        case "controller" if steps is not None:
            at(steps.away, for_s)
        case _:
            pass  # hang, slow, fail, repeat: the instances know


# --- many ---


def sweep(seeds: Sequence[int], workers: int, *, calm: bool = False) -> Iterator[Report]:
    """The runs of `seeds`, as they are done in order; over `workers` processes."""
    if workers == 1:
        yield from (run_seed(seed, calm=calm) for seed in seeds)
        return
    # Spawned: a fork of a process with threads (a gRPC loop, say) can hang.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(partial(run_seed, calm=calm), seeds, chunksize=10)


def write_failure(report: Report, schedule: Schedule, folder: Path) -> Path:
    """The schedule, and the log of events beside it; the path of the schedule."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{schedule.seed}.json"
    path.write_text(to_json(schedule) + "\n", encoding="utf-8")
    path.with_suffix(".log").write_text("\n".join(report.log) + "\n", encoding="utf-8")
    return path


def summary(reports: Sequence[Report], calm: Sequence[Report] = ()) -> Table:
    """Faults by kind, requests by outcome, and how many met their target, with and without faults."""
    faults: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    for report in reports:
        faults += report.faults
        outcomes += report.outcomes
    requests = sum(report.requests for report in reports)
    table = Table("what", "count", "share")
    for kind in KINDS:
        table.add_row(f"fault: {kind}", str(faults[kind]), "")
    table.add_row("declared down by the progress rule", str(sum(r.declared_down for r in reports)), "")
    table.add_row("ejections of slow instances", str(sum(r.closed for r in reports)), "")
    table.add_row("stale messages", str(sum(r.stale for r in reports)), "", end_section=True)
    for outcome in sorted(outcomes):
        table.add_row(f"request: {outcome}", str(outcomes[outcome]), _share(outcomes[outcome], requests))
    met = sum(report.met for report in reports)
    table.add_row("met their target", str(met), _share(met, requests), end_section=True)
    if calm:
        met, requests = sum(r.met for r in calm), sum(r.requests for r in calm)
        table.add_row("met it without faults", str(met), _share(met, requests))
        refused = sum(
            r.requests - r.outcomes[Outcome.COMPLETED] - r.outcomes[Outcome.CANCELLED] for r in calm
        )
        table.add_row("refused without faults", str(refused), _share(refused, requests), end_section=True)
    ratio = max((report.wait_ratio_max for report in reports), default=0.0)
    table.add_row("longest wait over its bound", f"{ratio:.3f}", "")
    broken = sum(bool(report.error) for report in reports)
    table.add_row("schedules", str(len(reports)), "")
    table.add_row("schedules that broke a law", str(broken), _share(broken, len(reports)))
    return table


def _share(part: int, whole: int) -> str:
    return f"{100.0 * part / whole:.2f} %" if whole else ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m service.sim.chaos", description=__doc__)
    parser.add_argument("--seeds", default="0:200", help="FROM:TO, TO left out (default: 0:200)")
    parser.add_argument("--schedule", type=Path, help="run the schedule of this file instead")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--calm", action="store_true", help="run all without faults too, for comparison")
    parser.add_argument("--out", type=Path, default=Path("var/chaos"), help="where failures are written")
    asked = parser.parse_args(arguments)
    console = Console()
    if asked.schedule is not None:
        schedule = from_json(asked.schedule.read_text(encoding="utf-8"))
        reports = [run_schedule(schedule)]
        sys.stdout.writelines(f"{line}\n" for line in reports[0].log)
    else:
        first, _, last = asked.seeds.partition(":")
        seeds = range(int(first), int(last or int(first) + 1))
        bar = partial(track, total=len(seeds), console=Console(stderr=True))
        reports = list(bar(sweep(seeds, asked.workers), description="chaos"))
    calm = list(sweep([r.seed for r in reports], asked.workers, calm=True)) if asked.calm else []
    console.print(summary(reports, calm))
    failures = [report for report in reports if report.error]
    for report in failures[:10]:
        schedule = make_schedule(report.seed) if asked.schedule is None else schedule
        path = write_failure(report, schedule, asked.out)
        console.print(
            f"seed {report.seed}: {report.error}\n  again: python -m service.sim.chaos --schedule {path}"
        )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
