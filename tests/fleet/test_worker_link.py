"""A worker behind gRPC is as good as one in the process: same results, one scheduler at a time."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import grpc.aio
import pytest
from link_rig import (
    FRONT_END,
    OPEN,
    QUICK,
    WAIT_S_MAX,
    Heard,
    HeldRunner,
    Reader,
    Worker,
    a_model,
    a_pump,
    a_remote,
    a_token_link,
    a_worker,
    decode,
    ended,
    engine_request,
    prefill,
    slower,
    submit,
    until,
)

from engines.simulated_settings import Behaviour, Fault
from engines.types import BlocksStored
from protos.plaserve.v1 import worker_pb2 as pb
from service.core.settings import SchedulerSettings
from service.core.types import (
    InstanceDown,
    InstanceDraining,
    KvChanged,
    Outcome,
    PassFailed,
    PassFinished,
    PassRevoked,
    PassStarted,
    Role,
    RoleChanged,
)
from service.fleet.convert import HIDDEN_TOKEN
from service.fleet.link import SERVICE, as_bytes, lenient
from service.fleet.remote_worker import RemoteWorker, WorkerUnavailable
from service.policies import make_scheduler
from service.runtime.contract import Token
from service.runtime.pump import Pump
from service.runtime.worker import LocalWorker, TimedRunner

REQUESTS = [(f"r{index}", 20 + 61 * index % 700, 1 + index % 9) for index in range(40)]
Result = tuple[Outcome | None, int, int, tuple[int, ...]]


async def _through_local() -> dict[str, Result]:
    model = a_model()
    async with a_worker() as worker:  # for its spec only
        local = LocalWorker(worker.servicer.spec, TimedRunner(model, 0.05))
    pump = Pump(make_scheduler("plaserve", SchedulerSettings()), [local])
    await pump.start()
    found = {}
    handles = [submit(pump, *request) for request in REQUESTS]
    for handle in handles:
        tokens = [item.token_id async for item in handle if isinstance(item, Token)]
        found[handle.record.request.request_id] = _result(handle.record, tokens)
    await pump.close()
    return found


async def _through_remote() -> dict[str, Result]:
    reader = Reader()
    async with (
        a_worker() as worker,
        a_remote(worker.address) as remote,
        a_pump(remote) as pump,
        a_token_link(worker.address, reader),
    ):
        records = [await ended(handle) for handle in [submit(pump, *request) for request in REQUESTS]]
        await reader.until(lambda: sum(map(len, reader.tokens.values())) == sum(r[2] for r in REQUESTS))
        await until(lambda: not worker.servicer.engine.held)
        worker.model.check()
    return {r.request.request_id: _result(r, reader.tokens[r.request.request_id]) for r in records}


def _result(record: object, tokens: list[int]) -> Result:
    outcome, finish = record.outcome, record.finish  # type: ignore[attr-defined]
    computed = record.new_tokens + record.history_tokens  # type: ignore[attr-defined]
    assert record.output_tokens == len(tokens)  # type: ignore[attr-defined]
    return outcome, finish, computed, tuple(tokens)


async def test_a_pump_over_a_remote_worker_gives_what_it_gives_over_a_local_one() -> None:
    remote, local = await _through_remote(), await _through_local()
    assert remote == local
    assert len(local) == len(REQUESTS)
    assert all(result[0] is Outcome.COMPLETED for result in local.values())


async def test_the_scheduler_hears_that_a_token_came_but_not_which() -> None:
    async with a_worker() as worker, a_remote(worker.address) as remote, a_pump(remote) as pump:
        handle = submit(pump, "r", answer=4)
        tokens = [item.token_id async for item in handle if isinstance(item, Token)]
        assert tokens == [HIDDEN_TOKEN] * 4


async def test_several_workers_share_the_work_and_one_that_fails_is_survived() -> None:
    behaviour = Behaviour(faults={3: Fault(fatal=True)})
    async with (
        a_worker("w0", behaviour=behaviour) as broken,
        a_worker("w1") as sound,
        a_remote(broken.address) as first,
        a_remote(sound.address) as second,
        a_pump(first, second) as pump,
    ):
        records = [await ended(submit(pump, f"r{index}", 300, 1)) for index in range(12)]
        await until(first.down.done)
        assert first.down.result() == "failed: EngineError: pass 3 failed, as planned"
        assert broken.servicer.failed.result() == "EngineError: pass 3 failed, as planned"
        assert {record.outcome for record in records} == {Outcome.COMPLETED}
        assert list(pump.scheduler.instances) == ["w1"]
        assert not pump.broken.done()
        pump.remove("w0")
        async with a_remote(broken.address, incarnation=2) as again:
            with pytest.raises(WorkerUnavailable, match="failed: EngineError"):
                await again.start()


async def test_a_pass_that_fails_is_told_and_the_instance_goes_on() -> None:
    behaviour = Behaviour(faults={1: Fault(lost=())})
    async with a_worker(behaviour=behaviour) as worker, a_remote(worker.address) as remote:
        await remote.start()
        heard, request = Heard(remote), engine_request("r", answer=1)
        remote.dispatch(prefill(1, request), [request], staged=False)
        assert (await heard.until(PassFailed)).lost == ()
        remote.dispatch(prefill(2, request), [], staged=False)
        await heard.until(PassFinished)


async def test_a_staged_pass_starts_by_itself_or_is_revoked_and_its_requests_are_unknown_again() -> None:
    async with a_worker(runner=HeldRunner) as worker, a_remote(worker.address) as remote:
        await remote.start()
        heard, requests = Heard(remote), [engine_request(name, answer=1) for name in "abc"]
        runner = worker.runner
        assert isinstance(runner, HeldRunner)
        remote.dispatch(prefill(1, requests[0]), [requests[0]], staged=False)
        remote.dispatch(prefill(2, requests[1]), [requests[1]], staged=True)
        remote.revoke(2)
        await heard.until(PassRevoked)
        assert worker.servicer.engine.held == ("a",)
        remote.dispatch(prefill(3, requests[2]), [requests[2]], staged=True)
        await until(lambda: runner.waiting == 1)
        runner.release()
        await heard.until(PassStarted, 2)
        remote.revoke(3)  # too late: no answer, and no harm
        await until(lambda: runner.waiting == 1)
        runner.release()
        await heard.until(PassFinished, 2)
        kinds = [type(event) for event in heard.events if not isinstance(event, KvChanged)]
        assert kinds == [PassStarted, PassRevoked, PassFinished, PassStarted, PassFinished]


async def test_a_quiet_scheduler_acknowledges_all_the_same() -> None:
    """Else the worker would keep what it sent, and take the silence for the end of the scheduler."""
    async with (
        a_worker(runner=lambda model: HeldRunner(model, free=True)) as worker,
        a_remote(worker.address) as remote,
    ):
        await remote.start()
        heard, request = Heard(remote), engine_request("r", answer=1)
        remote.dispatch(prefill(1, request), [request], staged=False)
        await heard.until(PassFinished)
        session = worker.servicer._session
        assert session is not None
        stream = session.stream
        await until(lambda: len(session.outbox) == 0)
        assert session.stream is stream  # and not by way of a break


async def test_roles_statistics_and_wishes_cross_the_link() -> None:
    async with a_worker() as worker, a_remote(worker.address) as remote:
        spec = await remote.start()
        heard = Heard(remote)
        assert spec == replace(worker.servicer.spec)
        assert remote.stats().kv_blocks_total == spec.capabilities.kv_blocks_total
        worker.servicer.set_role(Role.LP)
        assert await heard.until(RoleChanged) == RoleChanged("w0", Role.LP)
        assert await worker.servicer.drain(WAIT_S_MAX, "maintenance") == 0
        assert remote.draining == "maintenance"
        assert await heard.until(InstanceDraining) == InstanceDraining("w0")


# --- one scheduler at a time ---


async def _with_a_held_pass(worker: Worker, remote: RemoteWorker) -> Heard:
    """Request a runs in pass 1, b is staged in pass 2; both new."""
    await remote.start()
    heard, a, b = Heard(remote), engine_request("a"), engine_request("b")
    remote.dispatch(prefill(1, a), [a], staged=False)
    remote.dispatch(prefill(2, b), [b], staged=True)
    await heard.until(PassStarted)
    await until(lambda: worker.servicer.engine.held == ("a", "b"))
    return heard


async def test_a_higher_epoch_takes_over_and_everything_before_is_over() -> None:
    """Told at once; the running pass ends unheard, what nobody knows is aborted, the cache is told of."""
    async with (
        a_worker(runner=HeldRunner) as worker,
        a_remote(worker.address, epoch=5) as old,
        a_remote(worker.address, epoch=6, scheduler="s2") as new,
    ):
        runner = worker.runner
        assert isinstance(runner, HeldRunner)
        heard_old = await _with_a_held_pass(worker, old)
        starting = asyncio.create_task(new.start())
        assert (await heard_old.until(InstanceDown)).error.startswith("stale: s2 has epoch 6")
        assert await asyncio.wait_for(old.stale, WAIT_S_MAX) == 6
        await until(lambda: runner.aborted == ["a"])
        assert worker.servicer.engine.held == ()
        assert not starting.done()  # the pass of the old one still runs
        runner.release()
        await asyncio.wait_for(starting, WAIT_S_MAX)
        assert new.held == ("a",)  # b was staged only, and dropped
        heard_new, c = Heard(new), engine_request("a", answer=1)  # an id that was known before is free again
        runner.free = True
        new.dispatch(prefill(1, c), [c], staged=False)
        await heard_new.until(PassFinished)
        assert len(heard_new.of(PassStarted)) == 1
        assert [type(e) for e in heard_old.events] == [PassStarted, InstanceDown]
        await until(lambda: not worker.model._book.live)
        worker.model.check()


async def test_what_the_new_scheduler_keeps_goes_on_as_its_own() -> None:
    async with (
        a_worker(runner=lambda model: HeldRunner(model, free=True)) as worker,
        a_remote(worker.address, epoch=1) as old,
        a_remote(worker.address, epoch=2, scheduler="s2", keep=["a"]) as new,
    ):
        await old.start()
        heard, requests = Heard(old), [engine_request(name, answer=3) for name in "ab"]
        old.dispatch(prefill(1, *requests), requests, staged=False)
        await heard.until(PassFinished)
        await new.start()
        heard_new = Heard(new)
        assert set(new.held) == {"a", "b"}
        assert worker.servicer.engine.held == ("a",)
        new.dispatch(decode(1, ("a", 40)), [], staged=False)
        (item,) = (await heard_new.until(PassFinished)).result.items
        assert (item.request_id, item.position, item.token) == ("a", 41, HIDDEN_TOKEN)


async def test_a_new_scheduler_learns_what_the_cache_holds() -> None:
    async with (
        a_worker(runner=lambda model: HeldRunner(model, free=True)) as worker,
        a_remote(worker.address, epoch=1) as old,
        a_remote(worker.address, epoch=2, scheduler="s2") as new,
    ):
        await old.start()
        heard, request = Heard(old), engine_request("a", prompt_tokens=200, answer=1)
        old.dispatch(prefill(1, request), [request], staged=False)
        stored = (await heard.until(KvChanged)).events
        await new.start()
        await until(lambda: new._inbox.last == 2)  # it came before anybody was there to be told
        heard_new = Heard(new)
        told = (await heard_new.until(KvChanged)).events
        assert told == (BlocksStored(tuple(h for event in stored for h in event.block_hashes)),)
        assert len(told[0].block_hashes) == 200 // worker.model.capabilities.block_tokens


async def test_of_two_schedulers_at_once_the_worker_obeys_the_higher_epoch_only() -> None:
    async with (
        a_worker() as worker,
        a_remote(worker.address, epoch=9) as leader,
        a_remote(worker.address, epoch=8, scheduler="s2") as late,
        a_remote(worker.address, epoch=9, scheduler="s3") as twin,
        a_pump(leader) as pump,
    ):
        with pytest.raises(WorkerUnavailable, match="stale: epoch 8 is over; s1 has epoch 9"):
            await late.start()
        assert late.stale.result() == 9
        with pytest.raises(WorkerUnavailable, match="stale: epoch 9 is that of s1"):
            await twin.start()
        assert not twin.stale.done()
        assert (await ended(submit(pump, "r"))).outcome is Outcome.COMPLETED
        assert worker.servicer.epoch == 9


async def test_schedulers_that_fight_over_a_worker_never_both_have_it() -> None:
    """Each takes over with a higher epoch in turn; after every turn exactly one is not down."""
    async with a_worker() as worker, AsyncExitStack() as stack:
        remotes: list[RemoteWorker] = []
        for epoch in range(1, 9):
            caller = f"s{epoch % 2}"
            link = a_remote(worker.address, epoch=epoch, scheduler=caller)
            remotes.append(await stack.enter_async_context(link))
            await remotes[-1].start()
            await until(lambda: sum(not r.down.done() for r in remotes) == 1)
            assert not remotes[-1].down.done()


async def test_a_worker_without_a_scheduler_gives_its_requests_up() -> None:
    settings = slower(QUICK, orphan_s=0.2, grace_s=0.1)
    async with a_worker(settings=settings, runner=lambda model: HeldRunner(model, free=True)) as worker:
        async with a_remote(worker.address) as remote:
            await remote.start()
            heard, request = Heard(remote), engine_request("a", answer=9)
            remote.dispatch(prefill(1, request), [request], staged=False)
            await heard.until(PassFinished)
            assert worker.servicer.engine.held == ("a",)
        await until(lambda: worker.servicer.engine.held == ())
        assert worker.model.stats().requests_live == 0


# --- what makes no sense ---


async def _answers(address: str, *messages: bytes | pb.ControlRequest, method: str = "Control") -> str:
    """Send these on a stream of their own; how it ends."""
    channel = OPEN(address)
    response = pb.ControlResponse if method == "Control" else pb.StreamTokensResponse
    raw = channel.stream_stream(
        f"/{SERVICE}/{method}",
        request_serializer=lambda m: m if isinstance(m, bytes) else as_bytes(m),
        response_deserializer=lenient(response),
    )
    call = raw()
    try:
        for message in messages:
            await call.write(message)
        async with asyncio.timeout(WAIT_S_MAX):
            while await call.read() is not grpc.aio.EOF:
                pass
        return "ended"
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    finally:
        call.cancel()
        await channel.close()


def _hello(**changes: object) -> pb.ControlRequest:
    hello = {"scheduler_id": "s", "protocol_version": 1, "incarnation": 1, "attempt": 1, **changes}
    return pb.ControlRequest(epoch=1, hello=pb.Hello(**hello))  # type: ignore[arg-type]


NUMBERED = pb.ControlRequest(epoch=1, sequence=1, dispatch=pb.DispatchPass(pass_id=1, kind=1))
UNKNOWN = pb.ControlRequest.FromString(
    pb.ControlRequest(epoch=1, sequence=1).SerializeToString() + b"\xfa\x06\x00"  # field 111
)


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ((b"\xff\xff\xff",), "ControlRequest.hello: is missing"),
        ((pb.ControlRequest(epoch=1),), "ControlRequest.hello: is missing"),
        ((_hello(protocol_version=9),), "protocol_version: 9; this worker speaks 1"),
        ((_hello(scheduler_id=""),), "scheduler_id must be given"),
        ((_hello(), b"\xff\xff\xff"), "these bytes are none"),
        ((_hello(), NUMBERED), "dispatch: before Settled"),
        ((_hello(), pb.ControlRequest(epoch=2)), "epoch: 2, but Hello said 1"),
        ((_hello(), pb.ControlRequest(epoch=1, acknowledged=3)), "message 3 is acknowledged"),
        ((_hello(), pb.ControlRequest(epoch=1, sequence=2)), "message 2 came, but 1 is missing"),
    ],
)
async def test_a_scheduler_that_makes_no_sense_is_told_so_by_field(
    messages: tuple[bytes | pb.ControlRequest, ...], named: str
) -> None:
    async with a_worker() as worker:
        how = await _answers(worker.address, *messages)
        assert how.startswith("INVALID_ARGUMENT")
        assert named in how
        async with (
            a_remote(worker.address, epoch=2) as remote,
            a_pump(remote) as pump,
        ):
            assert (await ended(submit(pump, "r"))).outcome is Outcome.COMPLETED


async def test_a_command_of_a_newer_scheduler_is_ignored_and_numbered_all_the_same() -> None:
    settle = pb.ControlRequest(epoch=1, sequence=2, settle=pb.Settle())
    async with a_worker() as worker:
        task = asyncio.create_task(_answers(worker.address, _hello(), UNKNOWN, settle))
        session = lambda: worker.servicer._session  # noqa: E731
        await until(lambda: session() is not None and session().settled)  # type: ignore[union-attr]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    ("event", "named"),
    [
        (pb.ControlResponse(started=pb.PassStarted(pass_id=7)), "PassStarted.pass_id: 7"),
        (pb.ControlResponse(finished=pb.PassFinished(pass_id=7, kind=1)), "PassFinished.pass_id: 7"),
        (pb.ControlResponse(failed=pb.PassFailed(pass_id=7)), "PassFailed.pass_id: 7"),
        (pb.ControlResponse(revoked=pb.PassRevoked(pass_id=7)), "PassRevoked.pass_id: 7"),
        (pb.ControlResponse(finished=pb.PassFinished(pass_id=7, kind=9)), "PassFinished.kind: 9"),
    ],
)
async def test_a_worker_that_makes_no_sense_is_down_and_the_pump_is_not(
    event: pb.ControlResponse, named: str
) -> None:
    async with a_worker() as worker, a_remote(worker.address) as remote, a_pump(remote) as pump:
        session = worker.servicer._session
        assert session is not None
        session.send(event)
        error = await asyncio.wait_for(asyncio.shield(remote.down), WAIT_S_MAX)
        assert error.startswith("confused")
        assert named in error
        await until(lambda: not pump.scheduler.instances)
        assert not pump.broken.done()


async def test_tokens_for_nobody_are_refused() -> None:
    async with a_worker() as worker:
        how = await _answers(worker.address, as_bytes(pb.StreamTokensRequest()), method="StreamTokens")
        assert how.startswith("INVALID_ARGUMENT: StreamTokensRequest.front_end")
        late = pb.StreamTokensRequest(acknowledged=5)
        how = await _answers(
            worker.address,
            as_bytes(pb.StreamTokensRequest(front_end=FRONT_END)),
            as_bytes(late),
            method="StreamTokens",
        )
        assert how.startswith("RESOURCE_EXHAUSTED")
