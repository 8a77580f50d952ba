"""`plaserve serve`: run the service in this process."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from service.cli.failures import fail


def register(app: typer.Typer) -> None:
    app.command("serve")(serve)


def serve(
    config: Annotated[
        Path | None, typer.Option(help="Settings file (TOML). Flags and PLASERVE_ variables win.")
    ] = None,
    bundle: Annotated[Path | None, typer.Option(help="Bundle directory made by `plaserve build`.")] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            help="openvino_cpu, trtllm, trtllm_torch, triton_server or simulated (no model, real scheduling)."
        ),
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Scheduling policy: plaserve or fcfs.")] = None,
    port: Annotated[
        int | None, typer.Option(help="gRPC port on the host of the settings; 0 picks one.")
    ] = None,
    metrics_port: Annotated[int | None, typer.Option(help="Prometheus port; 0 picks one.")] = None,
    threads: Annotated[int | None, typer.Option(help="Engine threads; default: as calibrated.")] = None,
    record: Annotated[
        Path | None, typer.Option(help="Write every event and decision of the scheduler here.")
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Serve a bundle over gRPC until SIGTERM or Ctrl-C, then drain.

    Prints one line with the address once requests are answered.
    """
    from engines.bundle import BundleMismatch
    from service.garbage import collect_seldom
    from service.settings import SettingsError, load_settings
    from service.wiring import Ready, ServiceBroken, load
    from service.wiring import serve as run

    set_logging(log_level)
    overrides = {
        "engine.bundle": bundle,
        "engine.backend": backend,
        "engine.threads": threads,
        "policy": policy,
        "server.port": port,
        "telemetry.metrics_port": metrics_port,
    }

    def ready(what: Ready) -> None:
        metrics = f", metrics http://{what.metrics_address}/metrics" if what.metrics_address else ""
        typer.echo(f"ready: {what.model.name} ({what.model.policy}) on {what.address}{metrics}")
        sys.stdout.flush()

    try:
        settings = load_settings(config, overrides)
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("loading and warming the engine", total=None)
            loaded = load(settings, lambda done, total: progress.update(task, completed=done, total=total))
    except ImportError as error:
        fail(f"backend {settings.engine.backend}: {error}; install it with pip install 'plaserve[cpu]'")
    except (SettingsError, BundleMismatch, ValueError, OSError, RuntimeError) as error:
        fail(error)
    collect_seldom()
    try:
        cut_off = asyncio.run(run(settings, loaded, ready=ready, record=record))
    except ServiceBroken as error:
        fail(f"{error}; stopped, so that a supervisor starts a fresh process")
    except OSError as error:  # an address or the record file; anything else is a bug and shows as one
        fail(error)
    if cut_off:
        typer.secho(f"plaserve: {cut_off} requests were cut off by server.drain_timeout_s", err=True)


def set_logging(level: str) -> None:
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        fail(f"--log-level {level!r}: use debug, info, warning or error", code=2)
    logging.basicConfig(level=number, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
