"""200 clients at once against a service process: nothing is lost, counted twice or leaked.

The short run belongs to every test run; the long ones, and the one on the embedded engine, are marked slow.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from protos.plaserve.v1 import status_pb2 as pb
from service.bench.arms import ServerSpec, server, settled, status
from service.bench.load import LoadResult, LoadSettings, run_load
from service.bench.loadgen import Ending
from service.bench.workload import Mix

BUNDLE = Path("bundles/SmolLM2-135M-Instruct")
SIMULATED = ("--backend", "simulated")
WATCH_S = 0.2
slow = pytest.mark.slow


def assert_books(now: pb.GetStatusResponse) -> None:
    """submitted = completed + refused + cancelled + ... + queued + running, at any moment."""
    assert now.submitted_count == sum(now.outcome_counts.values()) + now.queued_count + now.running_count


async def loaded(spec: ServerSpec, **load: object) -> tuple[LoadResult, pb.GetStatusResponse]:
    """Load a new service, checking its books all the while; the result and the books in the end."""
    async with server(spec) as address:
        run = asyncio.create_task(run_load(LoadSettings(address, clients=200, **load)))
        while not run.done():
            assert_books(await status(address))
            await asyncio.wait((run,), timeout=WATCH_S)
        result = await run
        assert await settled(address)
        after = await status(address)
    assert_books(after)
    assert result.balance.faults == ()
    assert result.failed == []
    for instance in after.instances:
        assert instance.decoding_count == 0
        assert instance.kv_blocks_free + instance.kv_blocks_cached == instance.kv_blocks_total
    return result, after


@pytest.mark.parametrize("seconds", [10.0, pytest.param(60.0, marks=slow)])
async def test_200_clients_of_whom_some_leave(tmp_path: Path, seconds: float) -> None:
    environment = {"PLASERVE_ENGINE__SIMULATED_TIME_SCALE": "0.1"}
    spec = ServerSpec("plaserve", SIMULATED, tmp_path / "server.log", environment)
    mix = Mix(document_ratio=0.1, document_tokens_min=200, document_tokens_max=400)
    result, after = await loaded(spec, seconds=seconds, cancel_ratio=0.2, mix=mix)
    assert after.outcome_counts["COMPLETED"] > 200
    assert after.outcome_counts["CANCELLED"] > 0
    assert after.outcome_counts.keys() <= {"COMPLETED", "CANCELLED"}
    assert result.balance.client[Ending.REFUSED] == 0


async def test_beyond_the_bound_clients_are_refused_early_and_told_when_to_retry(tmp_path: Path) -> None:
    """What was let in is served; what was not hears so long before an answer would have come."""
    environment = {"PLASERVE_SCHEDULER__QUEUE_REQUESTS_MAX": "64"}
    spec = ServerSpec("plaserve", SIMULATED, tmp_path / "server.log", environment)
    result, after = await loaded(spec, seconds=4.0, cancel_ratio=0.05)
    assert_refusals(result, after)


@slow
@pytest.mark.cpu_engine
@pytest.mark.skipif(not BUNDLE.exists(), reason="no bundle; make one with `plaserve build`")
async def test_the_embedded_engine_with_a_queue_of_64(tmp_path: Path) -> None:
    environment = {"PLASERVE_SCHEDULER__QUEUE_REQUESTS_MAX": "64"}
    spec = ServerSpec("plaserve", ("--bundle", str(BUNDLE)), tmp_path / "server.log", environment)
    result, after = await loaded(spec, seconds=60.0, cancel_ratio=0.1)
    assert_refusals(result, after)


def assert_refusals(result: LoadResult, after: pb.GetStatusResponse) -> None:
    refused = [seen for seen in result.observations if seen.ending is Ending.REFUSED]
    assert refused
    assert all(seen.retry_after_s is not None and seen.retry_after_s > 0.0 for seen in refused)
    assert all(seen.output_tokens == 0 for seen in refused)
    assert after.outcome_counts["REJECTED_CAPACITY"] >= len(refused)
    assert after.outcome_counts["COMPLETED"] > 0
