"""`plaserve lab`: suites of cases, exhibits, and the page that shows them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from service.cli.failures import fail
from service.cli.lab_controllers import controllers, for_page
from service.cli.tables import rich_table
from service.sim.ablation_report import ablation_table, is_ablation, worth_table
from service.sim.cache import DEFAULT_DIRECTORY, Cache
from service.sim.controllers.report import write
from service.sim.estimate import estimate
from service.sim.exhibits.catalog import EXHIBITS
from service.sim.exhibits.exhibit import Exhibit, Table
from service.sim.lab_policies import OURS
from service.sim.page import lab_json, write_page
from service.sim.suite import Suite, load_suite, suite_names
from service.sim.suite_report import case_table, draw_goodputs, levels, policy_table, reference_table
from service.sim.suite_run import SuiteResult, run_suite
from service.sim.traces import MissingTrace
from service.sim.verdicts import Summary, means_table, peer_rate_table, verdict_table

WORKERS = max(1, os.cpu_count() or 1)
PAGE_SUITES = ("quick", "ablation")
BRIEF_CASE = ("case", OURS, "best peer", "its goodput", "ratio", "no worse", "regret")
BRIEF_PEER = ("case", "short mean ms", "best peer", "its mean ms", "ratio", "<= 0.7", "long ratio", "<= 1.1")
BRIEF_RATE = ("case", "policy", "short %", "short p99 ms", "long %", "long p99 ms")
BRIEF_WORTH = ("without", "goodput x", "short mean x", "long mean x", "most lost in")
BRIEF_WITHOUT = ("case", "without", "goodput", "short mean ms", "long mean ms", "long p99 ms")

Workers = Annotated[int, typer.Option(help="Processes.")]
Directory = Annotated[Path, typer.Option("--cache", help="Where results are kept; delete it to start anew.")]


def run(
    suite: Annotated[str, typer.Argument(help="A suite of the package, or the path of a TOML file.")],
    case: Annotated[list[str] | None, typer.Option(help="Only this case; may be given again.")] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="Only this policy, with knobs if you like; may be given again.")
    ] = None,
    workers: Workers = WORKERS,
    cache: Directory = DEFAULT_DIRECTORY,
    out: Annotated[
        Path | None, typer.Option(help="Results: lab.json, points.parquet, a JSON a case, plots.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Run a suite: goodput of every policy in every case. Goes on where it was stopped."""
    loaded = _load(suite)
    directory = out or cache / loaded.name
    _say_cost(loaded, case or (), policy or (), workers)
    result = _run(loaded, case or (), policy or (), workers, cache, directory)
    summary = result.summary()
    if not is_ablation(summary):
        for level in levels(summary):
            draw_goodputs(summary, level, directory / f"goodput_{level.partition('.')[2]}.png")
    if as_json:
        typer.echo(json.dumps(summary, indent=1, allow_nan=False))
        return
    console = Console(highlight=False)
    _print_ablation(console, summary) if is_ablation(summary) else _print_peers(console, summary)
    for skipped in result.skipped:
        console.print(f"skipped {skipped.case}: {skipped.why}", style="yellow", markup=False)
    console.print(f"Written to {directory}", markup=False)


def _print_peers(console: Console, summary: Summary) -> None:
    for level in levels(summary):
        brief = _columns(case_table(summary, level), BRIEF_CASE)
        console.print(rich_table(brief, f"Goodput at {float(level):.0%}, requests/s (simulated)"))
        console.print(rich_table(policy_table(summary, level), "Geometric means over the cases"))
        console.print(rich_table(means_table(summary, level), f"{OURS} over others"))
        common = _columns(peer_rate_table(summary, level), BRIEF_PEER)
        console.print(rich_table(common, "At a share of the best peer's goodput"))
        console.print(rich_table(verdict_table(summary, level), "Asked for, and in how many cases"))
    console.print(
        rich_table(_columns(reference_table(summary), BRIEF_RATE), "At a common rate, in time and TTFT")
    )


def _print_ablation(console: Console, summary: Summary) -> None:
    for level in levels(summary):
        title = f"{OURS} without a mechanism / with it; goodput at {float(level):.0%} (simulated)"
        console.print(rich_table(_columns(worth_table(summary, level), BRIEF_WORTH), title))
        console.print(rich_table(_columns(ablation_table(summary, level), BRIEF_WITHOUT), "By case"))


def suites() -> None:
    """The suites of the package."""
    table = RichTable("suite", "cases", "policies", "", box=box.ROUNDED, header_style="bold")
    for name in suite_names():
        suite = load_suite(name)
        table.add_row(name, str(len(suite.cases)), str(len(suite.policies)), suite.title)
    Console(highlight=False).print(table)


def exhibits(
    names: Annotated[
        list[str] | None, typer.Argument(help=f"Of {', '.join(EXHIBITS)}; all by default.")
    ] = None,
) -> None:
    """The published tables beside ours, printed."""
    console = Console(highlight=False)
    for exhibit in _exhibits(names or tuple(EXHIBITS)):
        console.print(rich_table(exhibit.table, f"{exhibit.title} ({exhibit.kind})"))
        console.print(f"Published: {exhibit.published}", markup=False)
        console.print(exhibit.reading + "\n", markup=False)


def page(
    out: Annotated[Path, typer.Option(help="Folder for lab.md and its folder lab.")] = Path("docs"),
    suite: Annotated[
        list[str] | None, typer.Option(help=f"Suites on the page; {' and '.join(PAGE_SUITES)} by default.")
    ] = None,
    with_controllers: Annotated[
        bool, typer.Option("--controllers/--no-controllers", help="Make controllers.md too.")
    ] = True,
    workers: Workers = WORKERS,
    cache: Directory = DEFAULT_DIRECTORY,
    from_json: Annotated[
        Path | None, typer.Option(help="Run nothing; make the page from this lab.json.", exists=True)
    ] = None,
) -> None:
    """Make the lab's page: suites and exhibits, plots, one JSON; and the page of the controllers.

    From nothing some 50 minutes on two idle cores: quick 25, ablation 3, exhibits 7, controllers with hours
    of constant load 15. Suites and controllers go on where they were stopped.
    """
    if from_json is not None:
        data: dict[str, Any] = json.loads(from_json.read_text(encoding="utf-8"))
    else:
        ran = [
            _run(loaded, (), (), workers, cache, cache / loaded.name)
            for loaded in [_load(name) for name in suite or PAGE_SUITES]
        ]
        data = lab_json(_exhibits(tuple(EXHIBITS)), ran)
        if with_controllers:
            typer.echo(f"Written to {write(for_page(workers, cache), out)}")
    typer.echo(f"Written to {write_page(data, out)}")


def _say_cost(suite: Suite, cases: Sequence[str], policies: Sequence[str], workers: int) -> None:
    """What all of it would take from nothing; what is known already takes no time."""
    cpu_s = 0.0
    for case in suite.cases:
        if cases and case.name not in cases:
            continue
        with contextlib.suppress(MissingTrace, ValueError):  # told when it is its turn
            cpu_s += estimate(case, tuple(policies) or suite.policies, suite.settings).cpu_s
    text = f"about {cpu_s / 60.0:.0f} minutes of processor time, {workers} processes, if nothing is known yet"
    Console(stderr=True).print(f"suite {suite.name}: {text}", highlight=False)


def _load(name: str) -> Suite:
    try:
        return load_suite(name)
    except ValueError as error:
        fail(error)


def _run(
    suite: Suite, cases: Sequence[str], policies: Sequence[str], workers: int, cache: Path, directory: Path
) -> SuiteResult:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[last]}", style="dim"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        every = progress.add_task(f"suite {suite.name}", total=len(cases or suite.cases), last="")
        current: list[Any] = []

        def began(case: Any) -> None:
            if current:
                progress.advance(every)
                progress.remove_task(current.pop())
            current.append(progress.add_task(f"  {case.name}", total=None, last=""))

        def ended(step: Any) -> None:
            last = f"{step.stage} {step.policy}" + (" (known)" if step.cached else "")
            progress.update(current[0], total=step.total, completed=step.done, last=last)

        try:
            return run_suite(
                suite,
                cases=[suite.case(name) for name in cases],
                policies=policies,
                workers=workers,
                cache=Cache(cache),
                directory=directory,
                progress=ended,
                began=began,
            )
        except ValueError as error:
            fail(error)


def _exhibits(names: Sequence[str]) -> list[Exhibit]:
    for name in names:
        if name not in EXHIBITS:
            fail(f"no exhibit {name!r}; choose from {', '.join(EXHIBITS)}", 2)
    columns = (TextColumn("exhibit {task.description}"), BarColumn(), TimeElapsedColumn())
    found = []
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("", total=len(names))
            for name in names:
                progress.update(task, description=name)
                found.append(EXHIBITS[name]())
                progress.advance(task)
    except MissingTrace as error:
        fail(error)
    return found


def _columns(table: Table, wanted: Sequence[str]) -> Table:
    """Those that fit a terminal of 80 columns; the page has all."""
    numbers = [table.columns.index(name) for name in wanted]
    return Table(tuple(wanted), tuple(tuple(row[n] for n in numbers) for row in table.rows))


def register(app: typer.Typer) -> None:
    lab = typer.Typer(no_args_is_help=True, help="Simulate: suites of cases, published tables, their page.")
    lab.command()(run)
    lab.command()(suites)
    lab.command()(exhibits)
    lab.command()(controllers)
    lab.command()(page)
    app.add_typer(lab, name="lab")
