"""Instances that come and go while the pump runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

import pytest

from engines.simulated import SimulatedModel
from engines.simulated_settings import Behaviour, Fault, h200_32b_like
from engines.types import EngineRequest, Sampling
from service.core.settings import SchedulerSettings
from service.core.types import Cancel, Event, InstanceSpec, Outcome, PassFinished, Reason, Request
from service.policies import make_scheduler
from service.runtime.contract import Ended, RequestRecord
from service.runtime.handle import Handle
from service.runtime.pump import Pump
from service.runtime.worker import LocalWorker, TimedRunner

WAIT_S_MAX = 10.0
_numbers = count()


def a_local(name: str, behaviour: Behaviour | None = None, time_scale: float = 0.05) -> LocalWorker:
    model = SimulatedModel(*h200_32b_like(), behaviour)
    spec = InstanceSpec(name, model.capabilities, model.profiles, model.cost.scaled(time_scale))
    return LocalWorker(spec, TimedRunner(model, time_scale))


async def a_pump(*workers: LocalWorker, needs_instance: bool = False) -> Pump:
    scheduler = make_scheduler("plaserve", SchedulerSettings())
    pump = Pump(scheduler, workers, needs_instance=needs_instance)
    await pump.start()
    return pump


def submit(pump: Pump, prompt: int = 100, answer: int = 1) -> Handle:
    name = f"p{next(_numbers)}"
    asked = EngineRequest(name, tuple(range(3, 3 + prompt)), answer, Sampling(ignore_eos=True))
    return pump.submit(Request(name, prompt, answer, asyncio.get_running_loop().time()), asked)


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S_MAX):
        while not what():  # noqa: ASYNC110 - of what sets no event
            await asyncio.sleep(0.001)


async def ended(handle: Handle) -> RequestRecord:
    async with asyncio.timeout(WAIT_S_MAX):
        async for item in handle:
            if isinstance(item, Ended):
                return item.record
    raise AssertionError("a handle ends with Ended")


async def test_a_fleet_may_start_with_nobody_and_waits_for_the_first() -> None:
    pump = await a_pump()
    assert (await ended(submit(pump))).reason is Reason.NO_INSTANCE
    pump.add(a_local("i0"))
    assert (await ended(submit(pump))).outcome is Outcome.COMPLETED
    assert [i.instance_id for i in pump.snapshot().instances] == ["i0"]
    await pump.close()


@pytest.mark.parametrize("needs_instance", [True, False])
async def test_whether_the_loss_of_the_last_instance_is_the_end_is_said_at_the_start(
    needs_instance: bool,
) -> None:
    worker = a_local("i0", Behaviour(faults={1: Fault(fatal=True)}))
    pump = await a_pump(worker, needs_instance=needs_instance)
    handle = submit(pump)
    await until(lambda: not pump.scheduler.instances)
    assert pump.broken.done() is needs_instance
    pump.remove("i0")
    pump.add(a_local("i0"))
    assert (await ended(handle)).outcome is Outcome.COMPLETED  # it had shown nothing, so it may run again
    await pump.close()


async def test_an_instance_of_the_same_name_knows_nobody() -> None:
    """A request that was on the old one is brought to the new one as new; else its engine would refuse it."""
    first = a_local("i0", time_scale=5.0)
    pump = await a_pump(first)
    handles = [submit(pump, 2000) for _ in range(3)]
    await until(lambda: handles[0].record.first_pass_start_s is not None)
    assert pump.remove("i0") is first
    pump.add(a_local("i0"))
    assert {(await ended(handle)).outcome for handle in handles} == {Outcome.COMPLETED}
    assert pump.snapshot().submitted == 3
    await first.close()
    await pump.close()


async def test_what_a_removed_instance_says_is_not_heard() -> None:
    worker = a_local("i0")
    pump = await a_pump(worker, a_local("i1"))
    handles = [submit(pump, 3000, 2) for _ in range(6)]
    await asyncio.sleep(0)
    pump.remove("i0", "moved to another shard")
    assert {(await ended(handle)).outcome for handle in handles} == {Outcome.COMPLETED}
    assert list(pump.scheduler.instances) == ["i1"]
    await worker.close()
    await pump.close()


async def test_an_instance_is_added_once_and_one_that_is_not_here_is_no_matter() -> None:
    pump = await a_pump(a_local("i0"))
    other = a_local("i0")
    with pytest.raises(ValueError, match="i0 is already here"):
        pump.add(other)
    assert pump.remove("i9") is None
    await other.close()
    await pump.close()


class LateCancel(LocalWorker):
    """Somebody cancels in the instant in which a request ends."""

    def connect(self, emit: Callable[[Event], None]) -> None:
        def told(event: Event) -> None:
            if isinstance(event, PassFinished):
                emit(Cancel(event.result.items[0].request_id))
            emit(event)

        super().connect(told)


async def test_a_cancel_in_the_instant_of_the_last_token_ends_a_request_once_and_the_same_for_all() -> None:
    local = a_local("i0")
    pump = await a_pump(LateCancel(local.spec, TimedRunner(SimulatedModel(*h200_32b_like()), 0.05)))
    record = await ended(submit(pump))
    assert record.outcome is Outcome.CANCELLED
    books = {outcome: n for outcome, n in pump.snapshot().outcomes.items() if n}
    assert books == dict(pump.scheduler.outcomes) == {Outcome.CANCELLED: 1}
    await local.close()
    await pump.close()
