"""Expected failures as one line on standard error."""

from __future__ import annotations

from typing import NoReturn

import grpc
import grpc.aio
import typer


def fail(message: object, code: int = 1) -> NoReturn:
    typer.secho(f"plaserve: {message}", err=True, fg="red")
    raise typer.Exit(code)


def fail_rpc(error: grpc.aio.AioRpcError, address: str) -> NoReturn:
    """A failed call, with what to do where that is known."""
    if error.code() is grpc.StatusCode.UNAVAILABLE and "onnect" in (error.details() or ""):
        fail(f"nothing answers at {address}; start it with `plaserve serve`")
    fail(f"{error.code().name}: {error.details()}")
