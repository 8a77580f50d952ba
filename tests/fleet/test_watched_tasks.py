"""Tasks beside the main loop of a process: one that fails ends it, for a supervisor to start a fresh one."""

from __future__ import annotations

import asyncio

import pytest
from test_processes import Fleet, until

from service.fleet.membership import FleetSnapshot
from service.fleet.processes import FrontEndProcess, SchedulerProcess
from service.fleet.reign import Reign
from service.fleet.shard_move import ShardMover
from service.settings import EngineSettings, FleetOptions, ServerSettings, Settings
from service.wiring import ServiceBroken
from service.wiring_fleet import run_frontend


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


@pytest.mark.parametrize("served", [False, True])
async def test_a_front_end_that_can_not_follow_its_fleet_ends_also_before_it_serves(
    monkeypatch, served
) -> None:
    follow, broken = FrontEndProcess._follow_workers, asyncio.Event()

    async def break_down(*given: object) -> None:
        if broken.is_set():
            raise RuntimeError("injected")
        await follow(*given)

    made = Fleet()
    membership = await made.membership()
    monkeypatch.setattr(FrontEndProcess, "_follow_workers", break_down)
    if served:
        await made.worker("w")
        await made.scheduler("p")
    else:
        broken.set()
    monkeypatch.setattr("service.wiring_fleet.membership_of", lambda options: membership)
    settings = Settings(
        server=ServerSettings(port=0),
        engine=EngineSettings(backend="simulated"),
        fleet=FleetOptions(shard="s", member_id="fe"),
    )
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(run_frontend(settings, ready.set_result))
    try:
        if served:
            await asyncio.wait_for(ready, 20)
            broken.set()
            await made.worker("w2")  # a change, so that it looks
        with pytest.raises(ServiceBroken, match="injected"):
            await asyncio.wait_for(running, 20)
        assert ready.done() == served
    finally:
        for process in (*made.schedulers.values(), *made.workers.values()):
            await process.close()
