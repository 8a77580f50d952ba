"""A blocking engine behind its thread: whatever it does, every request is answered and nothing stays held."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

from engines.base import PassError
from engines.simulated import SimulatedEngine, SimulatedModel
from engines.simulated_settings import Behaviour, Fault, small_cpu_like
from engines.types import EngineRequest, EngineStats, Pass, PassItem, PassKind, PassResult, Sampling
from service.core.settings import SchedulerSettings
from service.core.types import InstanceSpec, Outcome, Request
from service.policies import make_scheduler
from service.runtime.contract import Ended, RequestRecord
from service.runtime.pump import Handle, Pump
from service.runtime.worker import LocalWorker, ThreadRunner

WAIT_S_MAX = 10.0
_numbers = count()


class GatedEngine(SimulatedEngine):
    """A pass takes as long as the gate is shut."""

    def __init__(self, behaviour: Behaviour | None = None) -> None:
        super().__init__(SimulatedModel(*small_cpu_like(), behaviour), sleep=self._wait)
        self.gate = threading.Event()
        self.gate.set()
        self.threads: set[int] = set()  # that ran passes
        self.dumb = False  # it can't even say how it is
        self.closed = False

    def execute(self, pass_: Pass) -> PassResult:
        self.threads.add(threading.get_ident())
        return super().execute(pass_)

    def stats(self) -> EngineStats:
        if self.dumb:
            raise RuntimeError("no statistics")
        return super().stats()

    def close(self) -> None:
        self.closed = True
        super().close()

    def _wait(self, _: float) -> None:
        assert self.gate.wait(WAIT_S_MAX), "nobody opened the gate"


def a_pump(engine: GatedEngine) -> Pump:
    spec = InstanceSpec("local", *small_cpu_like())
    scheduler = make_scheduler("plaserve", SchedulerSettings(no_instance_s_max=0.05))
    return Pump(scheduler, [LocalWorker(spec, ThreadRunner(engine))])


@asynccontextmanager
async def pumping(engine: GatedEngine) -> AsyncIterator[Pump]:
    pump = a_pump(engine)
    await pump.start()
    try:
        async with asyncio.timeout(WAIT_S_MAX):
            yield pump
    finally:
        engine.gate.set()
        await pump.close()
    assert engine.closed


def submit(pump: Pump, prompt: int = 40, answer: int = 3) -> Handle:
    name = f"t{next(_numbers)}"
    asked = EngineRequest(name, tuple(range(3, 3 + prompt)), answer, Sampling(ignore_eos=True))
    return pump.submit(Request(name, prompt, answer, asyncio.get_running_loop().time()), asked)


async def ended(handle: Handle) -> RequestRecord:
    async for item in handle:
        if isinstance(item, Ended):
            return item.record
    raise AssertionError("a handle ends with Ended")


async def until_running(pump: Pump) -> None:
    while not pump.snapshot().running:  # noqa: ASYNC110 - nothing tells when
        await asyncio.sleep(0.001)


def nothing_is_held(engine: GatedEngine) -> bool:
    stats = engine.stats()
    free = stats.kv_blocks_free + stats.kv_blocks_cached
    return stats.requests_live == 0 and free == stats.kv_blocks_total


async def test_passes_run_in_one_thread_that_is_not_the_loops() -> None:
    engine = GatedEngine()
    async with pumping(engine) as pump:
        records = await asyncio.gather(*(ended(submit(pump, prompt)) for prompt in (20, 700, 2000)))
        assert [(r.outcome, r.output_tokens) for r in records] == [(Outcome.COMPLETED, 3)] * 3
        assert len(engine.threads) == 1
        assert threading.get_ident() not in engine.threads
        assert nothing_is_held(engine)


async def test_the_loop_goes_on_while_a_pass_runs_and_a_cancel_frees_at_its_end() -> None:
    engine = GatedEngine()
    async with pumping(engine) as pump:
        engine.gate.clear()
        handle = submit(pump, 700)
        await until_running(pump)
        handle.cancel()
        assert (await ended(handle)).outcome is Outcome.CANCELLED
        assert engine.stats().requests_live == 1
        engine.gate.set()
        assert (await ended(submit(pump))).outcome is Outcome.COMPLETED
        assert nothing_is_held(engine)


async def test_a_failed_pass_is_run_again_once() -> None:
    engine = GatedEngine(Behaviour(faults={1: Fault()}))
    async with pumping(engine) as pump:
        record = await ended(submit(pump))
        assert (record.outcome, record.output_tokens, len(record.pass_ids)) == (Outcome.COMPLETED, 3, 2)


async def test_an_engine_that_is_lost_ends_its_requests() -> None:
    engine = GatedEngine(Behaviour(faults={1: Fault(fatal=True)}))
    async with pumping(engine) as pump:
        assert (await ended(submit(pump))).outcome is Outcome.UNAVAILABLE
        assert pump.snapshot().instances[0].state == "down"


async def test_an_engine_that_can_not_say_how_it_is_counts_as_lost() -> None:
    """Its pass is answered all the same: nobody waits for ever."""
    engine = GatedEngine()
    async with pumping(engine) as pump:
        engine.dumb = True
        record = await ended(submit(pump))
        assert record.outcome is Outcome.UNAVAILABLE
        assert pump.snapshot().instances[0].state == "down"


async def test_requests_that_the_engine_no_longer_knows_are_named_as_lost() -> None:
    """A pass was staged when an executor was restarted: who is unknown begins anew, the others go on."""
    runner, outcome = ThreadRunner(GatedEngine()), asyncio.get_running_loop().create_future()
    new = EngineRequest("new", tuple(range(3, 43)), 3)
    items = tuple(PassItem(name, 10, 0) for name in ("gone", "new", "gone too"))
    runner.run(Pass(1, PassKind.PREFILL, items), [new], lambda what, _: outcome.set_result(what))
    error = await asyncio.wait_for(outcome, WAIT_S_MAX)
    assert isinstance(error, PassError)
    assert error.request_ids == ("gone", "gone too")
    assert "gone too" in str(error)
    await runner.close()


async def test_closing_in_a_pass_ends_the_request_at_once_and_the_engine_after_it() -> None:
    engine = GatedEngine()
    pump = a_pump(engine)
    await pump.start()
    engine.gate.clear()
    handle = submit(pump, 700)
    await until_running(pump)
    closing = asyncio.create_task(pump.close())
    assert (await ended(handle)).outcome is Outcome.UNAVAILABLE
    assert not engine.closed
    engine.gate.set()
    await closing
    assert engine.closed
