"""`plaserve worker`, `scheduler`, `frontend`, `controller`: the processes of a fleet, each until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from service.cli.failures import fail
from service.cli.serve import set_logging

if TYPE_CHECKING:
    from service.settings import Settings

Config = Annotated[Path | None, typer.Option(help="Settings file (TOML). Flags and PLASERVE_ variables win.")]
Member = Annotated[str | None, typer.Option(help="Name in the fleet. Default: kind and host name.")]
Shard = Annotated[str | None, typer.Option(help="The shard that it belongs to.")]
Listen = Annotated[str | None, typer.Option(help="host:port for the other processes; port 0 picks one.")]
Backend = Annotated[
    str | None, typer.Option(help="Engine of the fleet: openvino_cpu, trtllm, trtllm_torch, simulated, ...")
]
Bundle = Annotated[Path | None, typer.Option(help="Bundle directory.")]
LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error.")]
R = TypeVar("R")


def register(app: typer.Typer) -> None:
    for command in (worker, scheduler, frontend, controller):
        app.command(command.__name__)(command)


def worker(
    config: Config = None,
    member: Member = None,
    shard: Shard = None,
    listen: Listen = None,
    backend: Backend = None,
    bundle: Bundle = None,
    log_level: LogLevel = "info",
) -> None:
    """Run one engine for a fleet. It joins through etcd and obeys the active scheduler of its shard."""
    from service.wiring_fleet import load_first, run_worker

    settings = _settings(config, log_level, member, shard, listen, backend, bundle)
    try:
        first = load_first(settings)
    except ImportError as error:
        fail(f"backend {settings.engine.backend}: {error}; install it with pip install 'plaserve[cpu]'")
    except Exception as error:  # bundles, executors and GPUs have errors of their own, all with a remedy
        logging.getLogger(__name__).debug("loading failed", exc_info=True)
        fail(error)
    _say_cut_off(_run(run_worker(settings, first, _ready("worker", settings))))


def scheduler(
    config: Config = None,
    member: Member = None,
    shard: Shard = None,
    listen: Listen = None,
    policy: Annotated[str | None, typer.Option(help="Scheduling policy.")] = None,
    backend: Backend = None,
    log_level: LogLevel = "info",
) -> None:
    """Schedule a shard of a fleet. Start two: one leads, the other stands by."""
    from service.wiring_fleet import run_scheduler

    settings = _settings(config, log_level, member, shard, listen, backend, policy=policy)
    _run(run_scheduler(settings, _ready("scheduler", settings)))


def frontend(
    config: Config = None,
    member: Member = None,
    shard: Annotated[
        list[str] | None, typer.Option(help="A shard to send to; give it again for more. '*': all.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="gRPC port for clients; 0 picks one.")] = None,
    backend: Backend = None,
    bundle: Bundle = None,
    log_level: LogLevel = "info",
) -> None:
    """Answer clients of a fleet over gRPC, over one shard or several. Start as many as clients ask for."""
    from service.wiring_fleet import run_frontend

    shards = ",".join(shard) if shard else None
    settings = _settings(config, log_level, member, shards, None, backend, bundle, **{"server.port": port})
    _say_cut_off(_run(run_frontend(settings, _ready("frontend", settings))))


def controller(
    config: Config = None,
    member: Member = None,
    listen: Annotated[
        str | None, typer.Option(help="host:port for `plaserve fleet`; port 0 picks one.")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Policy whose controller moves roles.")] = None,
    dry_run: Annotated[
        bool | None, typer.Option("--dry-run", help="Only say which roles it would change.")
    ] = None,
    log_level: LogLevel = "info",
) -> None:
    """Move instances between short and long prefills, and between shards, as the load and the shards change.
    Start two: one leads."""
    from service.wiring_fleet import run_controller

    more: dict[str, Any] = {"policy": policy, "fleet.dry_run": dry_run}
    settings = _settings(config, log_level, member, None, listen, **more)
    _run(run_controller(settings, _ready("controller", settings)))


def _settings(
    config: Path | None,
    log_level: str,
    member: str | None,
    shard: str | None,
    listen: str | None,
    backend: str | None = None,
    bundle: Path | None = None,
    **more: Any,
) -> Settings:
    from service.settings import SettingsError, load_settings

    set_logging(log_level)
    overrides = {
        "fleet.member_id": member,
        "fleet.shard": shard,
        "fleet.listen": listen,
        "engine.backend": backend,
        "engine.bundle": bundle,
        **more,
    }
    try:
        return load_settings(config, overrides)
    except SettingsError as error:
        fail(error)


def _say_cut_off(count: int) -> None:
    if count:
        typer.secho(f"plaserve: {count} requests were cut off by server.drain_timeout_s", err=True)


def _ready(kind: str, settings: Settings) -> Callable[[str], None]:
    def ready(address: str) -> None:
        typer.echo(f"ready: {kind} on {address}, fleet {settings.fleet.name}, shard {settings.fleet.shard}")
        sys.stdout.flush()

    return ready


def _run(process: Awaitable[R]) -> R:
    """Expected failures in one line."""
    from engines.bundle import BundleMismatch
    from service.fleet.membership import MembershipError
    from service.garbage import collect_seldom
    from service.settings import SettingsError
    from service.wiring import ServiceBroken

    async def run() -> R:
        return await process

    collect_seldom()
    try:
        return asyncio.run(run())
    except ServiceBroken as error:
        fail(f"{error}; stopped, so that a supervisor starts a fresh process")
    except (SettingsError, BundleMismatch, MembershipError, ValueError, OSError) as error:
        fail(error)
