"""`plaserve fleet demo`: a fleet of processes under load on this machine, some of which are killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from service.cli.failures import fail

if TYPE_CHECKING:  # the simulator's workloads take a while to load, and every command loads this module
    from service.bench.fleet_demo import DemoReport, DemoRun
    from service.bench.fleet_plan import DemoSettings

FOLDER = Path("var/fleet")
SHORT_S = 60.0
LINE_EVERY_S = 5.0  # without a terminal


def demo(
    seconds: Annotated[float, typer.Option(help="Length of the load, seconds.")] = 200.0,
    short: Annotated[bool, typer.Option("--short", help=f"Only {SHORT_S:.0f} s of load.")] = False,
    load: Annotated[float, typer.Option(help="Share of the capacity by the cost model, at most 1.")] = 0.65,
    workers: Annotated[int, typer.Option(help="Simulated engines, at least 3.")] = 6,
    scale: Annotated[
        float, typer.Option(help="How many times slower than modelled the engines run; less costs more CPU.")
    ] = 3.0,
    seed: Annotated[int, typer.Option(help="Decides requests and their times.")] = 1,
    out: Annotated[Path, typer.Option(help="Directory for logs, fleet.json and fleet.png.")] = FOLDER,
) -> None:
    """Start a fleet on this machine, load it, kill parts of it, and count.

    etcd, two controllers, two schedulers, two front ends and six workers with simulated engines run as
    separate processes on the loopback interface. Chats turn into documents and back; meanwhile two workers,
    the active scheduler, a front end and the leading controller are killed with SIGKILL and started again.
    Ends with 1 where the books do not balance. Takes about four minutes.
    """
    from service.bench.etcd import EtcdError
    from service.bench.fleet_plan import DemoSettings
    from service.bench.fleet_rig import RigError
    from service.bench.fleet_view import table_view

    console = Console(highlight=False)
    begin_s = time.monotonic()
    try:
        settings = DemoSettings(SHORT_S if short else seconds, workers, load, scale, seed=seed)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        report = asyncio.run(_run(settings, out, console))
    except (EtcdError, RigError, OSError) as error:
        fail(error)
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print(Text(" stopped; every process of the fleet has ended", style="yellow"))
        raise typer.Exit(130) from None
    console.print(table_view(report))
    _write(report, out)
    took_s = time.monotonic() - begin_s
    text = f" Figures: {out}/fleet.json, {out}/fleet.png. Logs: {out}. {took_s:.0f} s in all."
    console.print(Text(text, style="dim"))
    if report.faults:
        raise typer.Exit(1)


async def _run(settings: DemoSettings, out: Path, console: Console) -> DemoReport:
    """SIGTERM ends it as Ctrl-C does: processes are stopped."""
    from service.bench.fleet_demo import run_demo
    from service.bench.fleet_view import live_view

    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    if not console.is_terminal:
        return await run_demo(settings, out, _Lines(console).show)
    with Live(Text(""), console=console, auto_refresh=False, transient=True) as live:
        return await run_demo(settings, out, lambda run, text: live.update(live_view(run), refresh=True))


class _Lines:
    """Events as they come, and a line every few seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next_s = 0.0

    def show(self, run: DemoRun, text: str) -> None:
        from service.bench.fleet_view import plain_line

        if text:
            self._console.print(f" {run.clock():5.0f} s  {text}", markup=False)
        elif run.clock() >= self._next_s:
            self._next_s = run.clock() + LINE_EVERY_S
            self._console.print(plain_line(run), markup=False)


def _write(report: DemoReport, out: Path) -> None:
    from service.bench.fleet_demo import to_json
    from service.bench.fleet_plot import draw

    data = json.dumps(to_json(report), indent=1, allow_nan=False)
    (out / "fleet.json").write_text(data + "\n", encoding="utf-8")
    with contextlib.suppress(ImportError):  # no matplotlib: figures without a picture
        draw(report, out / "fleet.png")
