"""`plaserve bundles`: keep GPU bundles in a store, a directory or any URL that fsspec knows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from service.cli.failures import fail

commands = typer.Typer(
    help="GPU bundles in a store: a directory, or s3://, gs://, az:// and whatever else fsspec knows.",
    no_args_is_help=True,
)

Again = Annotated[bool, typer.Option("--again", help="Send everything, whatever is there already.")]
Name = Annotated[
    str | None, typer.Option(help="Name in the store. Default: model, precision and backend of the bundle.")
]
Python = Annotated[
    Path | None, typer.Option(help="Interpreter of TensorRT-LLM's environment, whose versions must fit.")
]
AnyHost = Annotated[
    bool, typer.Option("--any-host", help="Take it though it does not fit this machine, to carry it on.")
]


def register(app: typer.Typer) -> None:
    app.add_typer(commands, name="bundles")


@commands.command("publish")
def publish(bundle: Path, store: str, name: Name = None, again: Again = False) -> None:
    """Send the bundle in a directory to a store. What is there already is not sent again."""
    from build_scripts.spec import BuildError
    from build_scripts.trtllm import publish as stores
    from engines.bundle_base import BundleMismatch

    try:
        with _Bar("sending") as bar:
            url = stores.publish(bundle, store, name=name, again=again, told=bar.told)
    except (BuildError, BundleMismatch, OSError) as error:
        fail(error)
    typer.echo(url)


@commands.command("list")
def list_(store: str) -> None:
    """Show what a store holds."""
    from rich.console import Console
    from rich.table import Table

    from build_scripts.spec import BuildError
    from build_scripts.trtllm import publish as stores

    try:
        found = stores.list_bundles(store)
    except (BuildError, OSError) as error:
        fail(error)
    if not found:
        typer.echo(f"no bundle in {store}")
        return
    table = Table("name", "bundle", "latest", "url")
    for entry in found:
        table.add_row(entry.name, entry.bundle_id[:12], "latest" if entry.latest else "", entry.url)
    Console().print(table)


@commands.command("fetch")
def fetch(url: str, target: Path, python: Python = None, any_host: AnyHost = False) -> None:
    """Download a bundle into a directory and check it; of a name in a store, the latest."""
    from build_scripts.spec import BuildError
    from build_scripts.trtllm import publish as stores
    from engines.bundle_base import BundleMismatch
    from service.cli.bundle_view import show_gpu_bundle

    try:
        with _Bar("fetching") as bar:
            bundle = stores.fetch(url, target, python=python, any_host=any_host, told=bar.told)
    except (BuildError, BundleMismatch, OSError) as error:
        fail(error)
    if any_host:
        typer.echo(f"{bundle.path} ({bundle.fingerprint[:12]}), not checked against this machine")
    else:
        show_gpu_bundle(bundle)


class _Bar:
    """Bytes on their way, with the file's name."""

    def __init__(self, verb: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task(verb, total=None)
        self._verb = verb

    def told(self, file: str, done: int, total: int) -> None:
        self._progress.update(self._task, description=f"{self._verb} {file}", completed=done, total=total)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()
