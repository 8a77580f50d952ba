"""`plaserve bench`: policies against each other, load on a service, a service against the simulator."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import grpc.aio
import typer
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from service.bench.arms import ArmError, ServerSpec
from service.bench.compare import Plan, Served, Settings, make_plan
from service.bench.live import compare_live
from service.bench.load import LoadSettings, load_json, render_load, run_load
from service.bench.render import render
from service.bench.report import Report, to_json
from service.bench.workload import CountTokens, Mix
from service.cli.failures import fail, fail_rpc
from service.rpc.text import BundleCodec, ByteCodec, TextCodec

BROKEN_SHOWN = 5


class Backend(StrEnum):
    OPENVINO_CPU = "openvino_cpu"
    SIMULATED = "simulated"


def policy_names(text: str) -> tuple[str, ...]:
    """From a list with commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def served_by_bundle(path: Path) -> Served:
    """Cost model, profiles and tokenizer of a bundle; one that does not fit here ends the command."""
    from engines.bundle import BundleMismatch, open_bundle

    try:
        bundle = open_bundle(path)
    except BundleMismatch as error:
        fail(error)
    text, cost = bundle.manifest.text, bundle.manifest.cost
    codec = BundleCodec(bundle.tokenizer_path, text.chat_template, text.bos_id, text.eos_id, text.add_bos)
    return Served(cost.model, bundle.manifest.profiles, _counter(codec))


def served_by_simulation() -> Served:
    """Timing of a small model on one core, text as bytes."""
    from engines.simulated_settings import small_cpu_like

    _, profiles, cost = small_cpu_like()
    return Served(cost, profiles, _counter(ByteCodec()))


def _counter(codec: TextCodec) -> CountTokens:
    """Counts a chat of one user message the way the service does."""

    def count(text: str) -> int:
        return len(codec.encode_chat([{"role": "user", "content": text}]))

    return count


def arm_specs(
    policies: Sequence[str],
    arguments: tuple[str, ...],
    log_dir: Path,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> list[ServerSpec]:
    """One server per policy, alike but for the policy."""
    return [
        ServerSpec(policy, arguments, log_dir / f"{policy.replace(':', '-')}.log", environment)
        for policy in policies
    ]


def run_comparison(
    plan: Plan, specs: Sequence[ServerSpec], console: Console, questions: Sequence[str] = ()
) -> Report:
    """Run it to the end; a server that does not come up or goes away ends the command."""
    try:
        return asyncio.run(compare_live(plan, specs, console, questions))
    except (ArmError, grpc.aio.AioRpcError) as error:
        fail(f"{error.code().name}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else error)


def fail_if_broken(report: Report, console: Console) -> None:
    """Exit with 1 when a request did not complete: figures with holes in them are not a result."""
    broken = report.broken()
    if not broken:
        return
    console.print(
        Text(f"\n {len(broken)} requests did not complete; the figures above do not hold.", style="red")
    )
    for line in broken[:BROKEN_SHOWN]:
        console.print(f"   {line}", markup=False)
    raise typer.Exit(1)


def compare(
    policies: Annotated[
        str,
        typer.Option(
            help="With commas; ratios are to the first. A policy may have settings: fcfs:budget_tokens=512."
        ),
    ] = "fcfs,plaserve",
    backend: Annotated[Backend, typer.Option(help="Engine behind every arm.")] = Backend.OPENVINO_CPU,
    bundle: Annotated[Path, typer.Option(help="Bundle that every arm serves.")] = Path(
        "bundles/SmolLM2-135M-Instruct"
    ),
    rounds: Annotated[int, typer.Option(help="Rounds; each policy has one turn in every round.")] = 4,
    seconds: Annotated[float, typer.Option(help="Length of one turn under load, seconds.")] = 25.0,
    load_ratio: Annotated[
        float, typer.Option("--load", help="Share of the capacity by the cost model, above 0, below 1.")
    ] = 0.7,
    documents: Annotated[float, typer.Option(help="Share of long documents among the requests.")] = 0.1,
    max_tokens: Annotated[int, typer.Option(help="Tokens of every answer.")] = 8,
    seed: Annotated[int, typer.Option(help="Decides prompts and arrivals.")] = 1,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the figures here.")] = None,
) -> None:
    """Compare scheduling policies on the same requests, each in a service of its own."""
    console = Console(highlight=False)
    chat_tokens_max = 120 if backend is Backend.OPENVINO_CPU else 250  # the simulated engine counts bytes
    try:
        mix = Mix(document_ratio=documents, max_tokens=max_tokens, chat_tokens_max=chat_tokens_max)
        settings = Settings(policy_names(policies), rounds, seconds, load_ratio, seed, mix=mix)
        simulated = backend is Backend.SIMULATED
        plan = make_plan(settings, served_by_simulation() if simulated else served_by_bundle(bundle))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    arguments = ("--backend", backend.value) + (() if simulated else ("--bundle", str(bundle)))
    environment = {"PLASERVE_ENGINE__SIMULATED_PRESET": "small_cpu"} if simulated else {}
    specs = arm_specs(settings.policies, arguments, Path("var/bench"), environment)
    report = run_comparison(plan, specs, console)
    console.print(render(report))
    if json_path is not None:
        json_path.write_text(json.dumps(to_json(report), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    fail_if_broken(report, console)


def load(
    address: Annotated[str, typer.Option("--addr", help="Service to load.")] = "127.0.0.1:8081",
    clients: Annotated[int, typer.Option(help="Closed loop: clients that each wait for their answer.")] = 200,
    rate: Annotated[
        float | None, typer.Option(help="Open loop instead: requests per second, whatever comes back.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Length of the load.")] = 60.0,
    documents: Annotated[float, typer.Option(help="Share of long documents among the requests.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(help="Tokens of every answer.")] = 8,
    cancel: Annotated[
        float, typer.Option(help="Closed loop: share of requests that their client gives up at random.")
    ] = 0.0,
    timeout: Annotated[float, typer.Option(help="gRPC deadline of every request, seconds.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Decides prompts, arrivals and cancels.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Load a running service and hold its books against those of the clients.

    Exits with 1 when the books do not balance or a request failed; refusals and cancels are no failures.
    """
    try:
        mix = Mix(document_ratio=documents, max_tokens=max_tokens)
        settings = LoadSettings(address, clients, rate, seconds, cancel, timeout, seed, mix)
        result = asyncio.run(run_load(settings))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except grpc.aio.AioRpcError as error:
        fail_rpc(error, address)
    console = Console(highlight=False)
    if as_json:
        typer.echo(json.dumps(load_json(result), indent=2, allow_nan=False))
    else:
        console.print(render_load(result))
    for seen in result.failed[:BROKEN_SHOWN]:
        typer.echo(f"failed: {seen.request_id}: {seen.error}", err=True)
    if result.failed or result.balance.faults:
        raise typer.Exit(1)


def parity(
    policies: Annotated[str, typer.Option(help="With commas; all run at the same time.")] = "plaserve,fcfs",
    requests: Annotated[int, typer.Option(help="Requests to each policy.")] = 1000,
    load_ratio: Annotated[
        float, typer.Option("--load", help="Rate x predicted seconds of the mean request alone.")
    ] = 0.7,
    scale: Annotated[
        float, typer.Option(help="Wall seconds per second of the modelled engine; everything is slowed.")
    ] = 4.0,
    seed: Annotated[int, typer.Option(help="Decides prompts and arrivals.")] = 1,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the figures here.")] = None,
) -> None:
    """Hold the running service, with a simulated 32B engine in wall time, against the simulator.

    Takes about five minutes. Exits with 1 when they are further apart than docs/outside-checks.md allows.
    """
    from service.bench.parity import ParitySettings, run_parity
    from service.bench.parity_report import parity_json, render_parity

    console = Console(highlight=False)
    try:
        settings = ParitySettings(policy_names(policies), requests, load_ratio, scale, seed)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("requests", total=requests * len(settings.policies))
        try:
            results = asyncio.run(run_parity(settings, Path("var/bench"), lambda _: progress.advance(task)))
        except (ArmError, grpc.aio.AioRpcError) as error:
            fail(error)
    console.print(render_parity(results))
    if json_path is not None:
        json_path.write_text(
            json.dumps(parity_json(results), indent=2, allow_nan=False) + "\n", encoding="utf-8"
        )
    faults = [fault for result in results for fault in result.faults()]
    for fault in faults:
        typer.echo(fault, err=True)
    if faults:
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    bench = typer.Typer(no_args_is_help=True, help="Measure: compare policies, or load a running service.")
    bench.command()(compare)
    bench.command()(load)
    bench.command()(parity)
    app.add_typer(bench, name="bench")
