"""The whole chain on the simulated engine: real service processes, real gRPC, the real commands."""

from __future__ import annotations

import json
from pathlib import Path

import grpc.aio
import pytest
from typer.testing import CliRunner

from service.bench.arms import ArmError, ServerSpec, server, status
from service.bench.load import LoadSettings, run_load
from service.bench.loadgen import Ending
from service.bench.workload import Mix
from service.cli import app

SIMULATED = ("--backend", "simulated")


def spec(tmp_path: Path, policy: str = "plaserve", **environment: str) -> ServerSpec:
    return ServerSpec(policy, SIMULATED, tmp_path / "server.log", environment)


async def test_an_arm_may_change_scheduler_settings_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    arm = spec(tmp_path, "fcfs:budget_tokens=512+itl_bound_s=0.1")
    assert arm.policy_name == "fcfs"
    assert arm.knobs == {
        "PLASERVE_SCHEDULER__BUDGET_TOKENS": "512",
        "PLASERVE_SCHEDULER__ITL_BOUND_S": "0.1",
    }
    async with server(arm) as address:
        assert (await status(address)).policy == "fcfs"
    with pytest.raises(ArmError, match="BUDGET_TOKEN"):
        async with server(spec(tmp_path, "fcfs:budget_token=512")):
            pass


def test_compare_runs_both_policies_and_writes_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLASERVE_ENGINE__SIMULATED_TIME_SCALE", "0.2")
    options = "--backend simulated --rounds 1 --seconds 2 --documents 0.3 --json figures.json"
    result = CliRunner().invoke(app, ["bench", "compare", *options.split()])
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "figures.json").read_text())
    for policy in ("fcfs", "plaserve"):
        arm = document[policy]
        assert arm["short"]["answered"] == arm["short"]["arrived"] > 0
        assert arm["long"]["answered"] == arm["long"]["arrived"] > 0
        assert arm["endings"]["completed"] == arm["short"]["arrived"] + arm["long"]["arrived"]
    assert "requests to each policy" in result.output


async def test_books_of_clients_and_service_balance_under_cancels(tmp_path: Path) -> None:
    async with server(spec(tmp_path, PLASERVE_ENGINE__SIMULATED_TIME_SCALE="0.1")) as address:
        settings = LoadSettings(
            address, clients=40, seconds=2.0, cancel_ratio=0.1, mix=Mix(document_ratio=0.05)
        )
        result = await run_load(settings)
    assert result.balance.faults == ()
    assert result.failed == []
    assert result.balance.client[Ending.COMPLETED] > 0


async def test_a_full_queue_refuses_with_advice_and_the_books_still_balance(tmp_path: Path) -> None:
    limits = {"PLASERVE_SCHEDULER__QUEUE_REQUESTS_MAX": "4"}
    async with server(spec(tmp_path, **limits)) as address:
        result = await run_load(LoadSettings(address, clients=60, seconds=2.0, cancel_ratio=0.1))
    refused = [seen for seen in result.observations if seen.ending is Ending.REFUSED]
    assert refused
    assert all(seen.retry_after_s is not None and seen.retry_after_s > 0.0 for seen in refused)
    assert result.balance.faults == ()
    assert result.failed == []


async def test_a_server_is_gone_when_its_block_ends(tmp_path: Path) -> None:
    async with server(spec(tmp_path)) as address:
        assert (await status(address)).policy == "plaserve"
    with pytest.raises(grpc.aio.AioRpcError):
        await status(address, timeout_s=1.0)


async def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(ArmError, match=r"(?s)ended with 1.*policy"):
        async with server(spec(tmp_path, policy="nobody")):
            pass
