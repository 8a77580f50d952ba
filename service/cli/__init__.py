"""The `plaserve` command. Each module here adds its commands through `register(app)`.

Expected failures (bad settings, a bundle that does not fit, a service that can't be reached) end with one
line on standard error and exit code 1, or 2 for wrong usage; a traceback means a bug.
"""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Annotated

import typer

from service.cli import (
    bench,
    build,
    bundles,
    calibrate,
    demo,
    fleet,
    generate,
    lab,
    plan,
    plan_cells,
    processes,
    serve,
    simulate,
    status,
)

app = typer.Typer(
    name="plaserve",
    help="Prefill-length-aware serving of large language models on prebuilt engines.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"plaserve {metadata.version('plaserve')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


for module in (
    build,
    bundles,
    calibrate,
    serve,
    generate,
    status,
    demo,
    bench,
    simulate,
    lab,
    plan,
    plan_cells,
    fleet,
    processes,
):
    module.register(app)


def main() -> None:
    """Entry point of the `plaserve` script."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
