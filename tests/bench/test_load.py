"""Load against a running service, through the functions that the command uses."""

from __future__ import annotations

import json

import grpc.aio
import pytest
from known_service import Behaviour, known_service
from rich.console import Console

from service.bench.load import LoadSettings, load_json, render_load, run_load


@pytest.mark.parametrize("rate_rps", [None, 40.0])
async def test_books_balance_in_both_loops(rate_rps: float | None) -> None:
    behaviour = Behaviour(delay_s=0.005, gap_s=0.01, refuse=lambda n: n % 5 == 4)
    async with known_service(behaviour) as address:
        settings = LoadSettings(address, clients=10, rate_rps=rate_rps, seconds=0.5, cancel_ratio=0.2)
        result = await run_load(settings)
    assert result.balance.faults == ()
    assert result.failed == []
    document = json.loads(json.dumps(load_json(result), allow_nan=False))
    assert document["service"]["refused"] == document["clients"]["endings"]["refused"] > 0
    assert document["service"]["completed"] >= document["clients"]["endings"]["completed"] > 0


async def test_a_service_that_miscounts_is_caught_and_said() -> None:
    async with known_service(Behaviour(miscount=1)) as address:
        result = await run_load(LoadSettings(address, clients=2, seconds=0.2))
    assert [fault.split(":")[0] for fault in result.balance.faults] == ["completed"]
    console = Console(width=100)
    with console.capture() as shown:
        console.print(render_load(result))
    assert "do not balance" in shown.get()


async def test_nobody_at_home_is_told_at_once() -> None:
    async with known_service(Behaviour()) as address:
        pass
    with pytest.raises(grpc.aio.AioRpcError):
        await run_load(LoadSettings(address, seconds=0.1))


def test_bad_settings_are_refused_by_name() -> None:
    for field, value in (
        ("clients", 0),
        ("rate_rps", 0.0),
        ("seconds", -1.0),
        ("cancel_ratio", 2.0),
        ("timeout_s", 0.0),
    ):
        with pytest.raises(
            ValueError, match=field.removesuffix("_rps").removesuffix("_ratio").removesuffix("_s")
        ):
            LoadSettings("127.0.0.1:1", **{field: value})  # type: ignore[arg-type]
