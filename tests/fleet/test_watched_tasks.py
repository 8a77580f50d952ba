"""Tasks beside the main loop of a process: one that fails ends it, for a supervisor to start a fresh one."""

from __future__ import annotations

import asyncio

import pytest
from test_processes import Fleet, until

from service.fleet.membership import FleetSnapshot
from service.fleet.processes import FrontEndProcess, SchedulerProcess
from service.fleet.reign import Reign
from service.fleet.shard_move import ShardMover


@pytest.mark.parametrize(
    ("of", "method", "make"),
    [
        (FrontEndProcess, "_follow_workers", Fleet.front_end),
        (SchedulerProcess, "_is_over", Fleet.scheduler),
        (ShardMover, "_look", Fleet.worker),
    ],
)
async def test_a_task_that_fails_beside_the_main_one_ends_its_process(monkeypatch, of, method, make) -> None:
    """Else it would follow no shard, no role or no retirement, and nobody would know."""

    def broken(*_: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(of, method, broken)
    process = await make(Fleet(), "p")
    try:
        assert await asyncio.wait_for(process.failed, 20) == "RuntimeError: injected"
    finally:
        await process.close()


async def test_a_reign_that_can_not_follow_its_workers_ends_and_another_begins(monkeypatch) -> None:
    reconcile, calls = Reign._reconcile, []

    def broken_once(reign: Reign, snapshot: FleetSnapshot) -> None:
        calls.append(reign.epoch)
        if len(calls) == 2:
            raise RuntimeError("injected")
        reconcile(reign, snapshot)

    monkeypatch.setattr(Reign, "_reconcile", broken_once)
    made = Fleet()
    scheduler = await made.scheduler("p")
    await until(lambda: bool(calls))
    worker = await made.worker("w")
    try:
        await until(lambda: scheduler.reigns == 2 and made.used() == {"w"})
    finally:
        await worker.close()
        await scheduler.close()
