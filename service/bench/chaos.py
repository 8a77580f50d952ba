"""Chaos on real processes: seeded schedules of faults over a small fleet on loopback, with its laws checked.

    python -m service.bench.chaos --seeds 0:20
    python -m service.bench.chaos --seeds 7
    python -m service.bench.chaos --schedule var/chaos-real/seed-7/schedule.json

A schedule takes half a minute. What breaks and how is in `chaos_plan`, who does it in `chaos_faults`, the
laws in `chaos_laws`, and what must work again after the last fault in `chaos_run`. Where a law is broken, the
logs of all processes are kept and it is said how to run the schedule again. Docs: docs/chaos.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from service.bench.chaos_net import INSIDE, NetworkError, enter
from service.bench.chaos_net import missing as no_network
from service.bench.chaos_plan import RealSchedule, from_json, make_schedule, to_json
from service.bench.chaos_run import Report, run_schedule
from service.bench.etcd import EtcdError
from service.bench.fleet_rig import RigError

MODULE = "service.bench.chaos"
OUT = Path("var/chaos-real")
WIDTH = 160  # without a terminal


async def run_all(schedules: Sequence[RealSchedule], out: Path, console: Console) -> list[Report]:
    """One after the other. SIGTERM ends it as Ctrl-C does: every process is stopped."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    reports: list[Report] = []
    for number, schedule in enumerate(schedules, start=1):
        folder = out / f"seed-{schedule.seed}"
        console.print(f"[bold]seed {schedule.seed}[/] ({number} of {len(schedules)}, {about(schedule)})")
        report = await one(schedule, folder, console)
        reports.append(report)
        _tell(report, console)
        if not report.broken:
            shutil.rmtree(folder, ignore_errors=True)
        _write(reports, out)
    return reports


async def one(schedule: RealSchedule, folder: Path, console: Console) -> Report:
    """A run that does not even start is a failure too, and the next schedule has its turn."""
    try:
        return await run_schedule(schedule, folder, lambda text: console.print(f"  {escape(text)}"))
    except (EtcdError, RigError, NetworkError) as error:
        return Report(schedule.seed, broken=[f"it did not start: {error}"])


def about(schedule: RealSchedule) -> str:
    where = ", networks of their own" if schedule.needs_network else ""
    return (
        f"{schedule.workers} workers, {schedule.mode}, lease {schedule.lease_ttl_s:g} s, "
        f"{len(schedule.asks)} requests, {len(schedule.faults)} faults{where}"
    )


def again(report: Report, out: Path, by_seed: bool) -> str:
    """The one command that runs a schedule again."""
    what = f"--seeds {report.seed}" if by_seed else f"--schedule {out / f'seed-{report.seed}'}/schedule.json"
    return f"python -m {MODULE} {what}"


def _tell(report: Report, console: Console) -> None:
    for text in report.left_out:
        console.print(f"  [yellow]left out[/] {escape(text)}")
    ended = ", ".join(f"{count} {name}" for name, count in sorted(report.endings.items()))
    back = "never" if report.recovered_s is None else f"{report.recovered_s:.1f} s"
    console.print(f"  {ended}; whole again after {back}; {report.seconds:.0f} s")
    for text in report.broken:
        console.print(f"  [red]broken[/] {escape(text)}")


def _write(reports: Sequence[Report], out: Path) -> None:
    data = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "processors": os.cpu_count(),
        "runs": [asdict(report) for report in reports],
    }
    (out / "report.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def summary(reports: Sequence[Report]) -> Table:
    """A row a schedule, and all together."""
    table = Table("seed", "faults", "left out", "answered", "cancelled, late", "failed, refused", "longest",
                  "whole after", "laws")  # fmt: skip
    total: Counter[str] = Counter()
    for report in reports:
        total.update(report.endings)
        back = "" if report.recovered_s is None else f"{report.recovered_s:.1f} s"
        table.add_row(
            str(report.seed), str(len(report.happened)), str(len(report.left_out)), *_shares(report.endings),
            f"{report.wait_s_max:.1f} s", back, f"{len(report.broken)} broken" if report.broken else "hold",
        )  # fmt: skip
    table.add_section()
    bad = sum(bool(report.broken) for report in reports)
    table.add_row(
        "all", str(sum(len(r.happened) for r in reports)), str(sum(len(r.left_out) for r in reports)),
        *_shares(total), f"{max((r.wait_s_max for r in reports), default=0.0):.1f} s",
        f"{max((r.recovered_s or 0.0 for r in reports), default=0.0):.1f} s",
        f"broken in {bad}" if bad else "hold",
    )  # fmt: skip
    return table


def _shares(endings: dict[str, int] | Counter[str]) -> tuple[str, str, str]:
    gone = endings.get("CANCELLED", 0) + endings.get("DEADLINE_EXCEEDED", 0)
    answered = endings.get("OK", 0)
    return str(answered), str(gone), str(sum(endings.values()) - answered - gone)


def schedules_of(asked: argparse.Namespace) -> list[RealSchedule]:
    """Raises ValueError, OSError for what can't be read."""
    if asked.schedule is not None:
        found = [from_json(asked.schedule.read_text(encoding="utf-8"))]
    else:
        first, _, last = asked.seeds.partition(":")
        found = [make_schedule(seed) for seed in range(int(first), int(last or int(first) + 1))]
    return [replace(each, faults=()) for each in found] if asked.calm else found


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", default="0:20", help="FROM:TO, TO left out (default: 0:20)")
    parser.add_argument("--schedule", type=Path, help="run the schedule of this file instead")
    parser.add_argument("--calm", action="store_true", help="the same requests without any fault")
    parser.add_argument("--show", action="store_true", help="print the schedules as JSON and run nothing")
    parser.add_argument("--out", type=Path, default=OUT, help=f"report and logs of failures ({OUT})")
    parser.add_argument(INSIDE, dest="inside", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(given)
    try:
        schedules = schedules_of(asked)
    except (ValueError, TypeError, KeyError, OSError) as error:
        parser.error(f"--schedule or --seeds: {error}")
    if asked.show:
        sys.stdout.writelines(f"{to_json(schedule)}\n" for schedule in schedules)
        return 0
    if not asked.inside and any(each.needs_network for each in schedules) and not no_network():
        enter(MODULE, given)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    asked.out.mkdir(parents=True, exist_ok=True)
    try:
        reports = asyncio.run(run_all(schedules, asked.out, console))
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("stopped; every process of the fleet has ended", style="yellow")
        return 130
    console.print(summary(reports))
    for report in reports:
        if report.broken:
            command = again(report, asked.out, asked.schedule is None and not asked.calm)
            console.print(f"seed {report.seed}: {escape(report.broken[0])}\n  again: {command}")
    return 1 if any(report.broken for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
