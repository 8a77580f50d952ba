"""A fleet demo on a console: one picture that changes while it runs, and the table at the end."""

from __future__ import annotations

import math

from rich.console import Group
from rich.table import Table
from rich.text import Text

from service.bench.fleet_demo import DemoReport, DemoRun
from service.bench.fleet_figures import GOOD, Figures
from service.bench.fleet_plan import phase_at
from service.bench.loadgen import Ending
from service.bench.workload import Label

LIVE_WINDOW_S = 10.0
EVENTS_SHOWN = 8
ROLE_STYLES = {"sp": "cyan", "lp": "yellow", "mixed": "white", "": "red"}


def live_view(run: DemoRun) -> Group:
    """What is going on now. Attainment is of what ended in the last seconds."""
    now_s = run.clock()
    if not run.watch.samples:
        return Group(Text(f" starting {len(run.rig.parts)} processes and etcd; logs in {run.rig.folder}"))
    last, phase = run.watch.samples[-1], phase_at(run.phases, now_s)
    seconds = run.settings.seconds
    head = Text(f" {now_s:5.0f} of {seconds:.0f} s  ", style="bold")
    head.append(f"{phase.name}, {phase.rate_per_s:.1f} requests/s", style="cyan")
    workers = Text(" workers   ")
    for part in run.rig.parts.values():
        if part.kind == "worker":
            role = last.roles.get(part.name, "") if part.up else ""
            workers.append(f"{part.name} {role or '--':<6}", style=ROLE_STYLES[role])
    others = Text(f" active    scheduler {last.scheduler or '--'}, controller {last.controller or '--'}")
    pressure = Text(f" pressure  SP {last.pressures['sp']:.2f}  LP {last.pressures['lp']:.2f}")
    pressure.append(f"    cores {sum(last.cores.values()):.2f}, whole machine {last.machine_cores:.2f}")
    recent = [each for each in run.seen if each.end_s > now_s - LIVE_WINDOW_S]
    lanes = [
        Text(f" {label:<9} ").append(_line(Figures.of([e for e in recent if e.label is label])))
        for label in Label
    ]
    bad = sum(each.ending is not Ending.COMPLETED for each in run.seen)
    ended = Text(f" ended     {len(run.seen)} of {len(run.plan)}, {bad} of them refused or failed")
    events = [
        Text(f" {event.at_s:5.0f} s  {event.text}", style="dim") for event in run.events[-EVENTS_SHOWN:]
    ]
    return Group(head, workers, others, pressure, *lanes, ended, *events)


def _line(figures: Figures) -> str:
    if not figures.requests:
        return "-"
    quantiles = figures.ttft_s
    return (
        f"{_percent(figures.attainment)} in time; TTFT p50 {quantiles.p50:.2f} s, p90 {quantiles.p90:.2f} s"
    )


def plain_line(run: DemoRun) -> str:
    """The same in a line, where there is no terminal."""
    last = run.watch.samples[-1]
    roles = " ".join(f"{name}:{role}" for name, role in sorted(last.roles.items()))
    recent = [each for each in run.seen if each.end_s > run.clock() - LIVE_WINDOW_S]
    return (
        f" {run.clock():5.0f} s  {roles}; pressure SP {last.pressures['sp']:.2f} "
        f"LP {last.pressures['lp']:.2f}; in time {_percent(Figures.of(recent).attainment)}; "
        f"ended {len(run.seen)} of {len(run.plan)}"
    )


def table_view(report: DemoReport) -> Group:
    return Group(_phases(report), Text(), _events(report), Text(), *_footer(report))


def _phases(report: DemoReport) -> Table:
    table = Table("phase", "lane", "requests", "in time", "TTFT p50", "p90", "p99", "moves", title="Phases")
    for phase in report.phases:
        for lane, figures in report.figures[phase.name].items():
            first = lane == "all"
            table.add_row(
                f"{phase.name}, {phase.start_s:.0f} to {phase.end_s:.0f} s" if first else "",
                lane,
                str(figures.requests),
                _percent(figures.attainment),
                *(_seconds(value) for value in _quantiles(figures)),
                str(len(report.moves_in(phase))) if first else "",
                end_section=lane == Label.LONG,
            )
    return table


def _events(report: DemoReport) -> Table:
    table = Table(
        "at", "event", f"below {GOOD:.0%}", "until", "lowest", "requests", "in time", "failed, refused",
        title="After each kill and flip, until the next one",
    )  # fmt: skip
    for each in report.aftermaths:
        table.add_row(
            f"{each.event.at_s:.0f} s",
            each.event.text,
            f"{each.below_s:.0f} s",
            "-" if each.back_s is None else f"{each.back_s:.0f} s after",
            _percent(each.lowest),
            str(each.figures.requests),
            _percent(each.figures.attainment),
            ", ".join(f"{n} {name}" for name, n in each.bad.items()) or "0",
        )
    return table


def _footer(report: DemoReport) -> list[Text]:
    share = report.control_cores / report.processors
    cores = ", ".join(f"{kind} {cores:.2f}" for kind, cores in report.cores.items())
    ends = ", ".join(f"{n} {name}" for name, n in sorted(report.endings.items()))
    lines = [
        Text(f" Ends: {ends}. Epochs of schedulers: {', '.join(map(str, report.epochs))}."),
        Text(
            f" Processor: the fleet took {report.control_cores:.2f} of {report.processors} cores "
            f"({share:.0%}); in cores: {cores}. Whole machine: {report.machine_cores:.2f}. "
            f"Load average {report.loads[0]:.1f} before, {report.loads[1]:.1f} after."
        ),
    ]
    stood = [f"{event.text} at {event.at_s:.0f} s" for event in report.events if event.kind == "stall"]
    if stood:
        text = f" This machine stood still, misses near that are not the fleet's: {', '.join(stood)}."
        lines.append(Text(text, style="yellow"))
    if report.faults:
        lines.append(Text(f" The books do not balance, {len(report.faults)} faults:", style="bold red"))
        lines += [Text(f"   {fault}", style="red") for fault in report.faults[:30]]
    else:
        text = " Books balance: every request has one end, answers are whole, and the fleet counts as many."
        lines.append(Text(text, style="green"))
    return lines


def _quantiles(figures: Figures) -> tuple[float, float, float]:
    return figures.ttft_s.p50, figures.ttft_s.p90, figures.ttft_s.p99


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{100.0 * value:.1f} %"


def _seconds(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f} s"
