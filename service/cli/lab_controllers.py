"""`plaserve lab controllers`: rules that move instances, side by side on load that moves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from service.cli.failures import fail
from service.cli.tables import rich_table
from service.sim.cache import DEFAULT_DIRECTORY, Cache
from service.sim.controllers.asked import asked_table, hour_table, mode_table
from service.sim.controllers.compare import CompareSettings, Comparison, Step, compare
from service.sim.controllers.report import read, reading, table, write
from service.sim.exhibits.exhibit import Table
from service.sim.suite import load_suite
from service.sim.traces import MissingTrace

BRIEF = ("case", "controller", "short missed %", "long missed %", "moves", "overshoots", "periods until 95 %")


def controllers(
    suite: Annotated[str, typer.Option(help="Of the package, or the path of a TOML file.")] = "drift",
    case: Annotated[list[str] | None, typer.Option(help="Only this case; may be given again.")] = None,
    load: Annotated[
        list[float] | None,
        typer.Option(help="Of a case's capacity; may be given again; 0.5 by default."),
    ] = None,
    seed: Annotated[list[int] | None, typer.Option(help="May be given again; 1, 2 and 3 by default.")] = None,
    goodput: Annotated[bool, typer.Option(help="Look for the goodput of every controller too.")] = False,
    hour: Annotated[
        list[float] | None,
        typer.Option(
            help="An hour of constant load too, for each mix of the first case, at this share of its "
            "capacity; may be given again."
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
    cache: Annotated[
        Path, typer.Option("--cache", help="Where results are kept; delete it to start anew.")
    ] = DEFAULT_DIRECTORY,
    out: Annotated[
        Path | None, typer.Option(help="Folder for controllers.md and its folder lab; none by default.")
    ] = None,
    from_json: Annotated[
        Path | None, typer.Option(help="Run nothing; show this controllers.json.", exists=True)
    ] = None,
) -> None:
    """The controller against static splits, the rules of LAPS and a router: misses, moves, overshoots."""
    try:
        if from_json is not None:
            found = read(from_json)
        else:
            settings = CompareSettings(
                tuple(load or (0.5,)), tuple(seed or (1, 2, 3)), goodput=goodput, hour_loads=tuple(hour or ())
            )
            found = _run(suite, case or [], settings, workers, cache)
    except (ValueError, MissingTrace, ValidationError) as error:
        fail(error)
    console = Console(highlight=False)
    full = table(found)
    numbers = [full.columns.index(name) for name in BRIEF]
    brief = Table(BRIEF, tuple(tuple(row[n] for n in numbers) for row in full.rows))
    console.print(rich_table(brief, "Controllers under one policy (simulated)"))
    console.print(rich_table(asked_table(found), "Asked for, and whether it holds"))
    console.print(rich_table(mode_table(found), "One pool, two, or auto"))
    if found.hours:
        console.print(rich_table(hour_table(found), "An hour of constant load"))
    for line in reading(found):
        console.print(line.replace("*", ""), markup=False)
    if out is not None:
        console.print(f"Written to {write(found, out)}", markup=False)


def for_page(workers: int, cache: Path) -> Comparison:
    """What stands in docs/controllers.md: half of the capacity, and hours of constant load."""
    try:
        return _run("drift", [], CompareSettings(hour_loads=(0.5, 0.7)), workers, cache)
    except (ValueError, MissingTrace) as error:
        fail(error)


def _run(name: str, cases: list[str], settings: CompareSettings, workers: int, cache: Path) -> Comparison:
    suite = load_suite(name)
    chosen = [suite.case(one) for one in cases]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("controllers", total=None)

        def ended(step: Step) -> None:
            progress.update(task, description=step.what, total=step.total, completed=step.done)

        return compare(suite, settings, cases=chosen, workers=workers, cache=Cache(cache), progress=ended)
