"""Links that break, fall silent or come back to others; workers that hang; front ends that don't read."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random
from typing import Any

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
    Wire,
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

from protos.plaserve.v1 import worker_pb2 as pb
from service.core.progress import HangRule, Health
from service.core.types import InstanceDown, Outcome, PassFinished, PassStarted, Reason
from service.fleet.link import SERVICE, as_bytes
from service.fleet.remote_worker import WorkerUnavailable
from service.fleet.tokens import TokenSettings
from service.runtime.worker import TimedRunner


async def test_a_link_that_breaks_in_a_pass_and_heals_loses_nothing_and_repeats_nothing() -> None:
    async with (
        a_worker(runner=HeldRunner) as worker,
        Wire(worker.address) as wire,
        a_remote(wire.address) as remote,
    ):
        runner = worker.runner
        assert isinstance(runner, HeldRunner)
        await remote.start()
        heard, a, b = Heard(remote), engine_request("a", answer=2), engine_request("b")
        remote.dispatch(prefill(1, a), [a], staged=False)
        await heard.until(PassStarted)
        wire.cut()
        await until(lambda: not remote.connected)
        runner.release()  # the pass ends while nobody can hear it
        remote.dispatch(prefill(2, b), [b], staged=True)  # and this waits to be sent
        remote.abort("nobody")
        wire.heal()
        await heard.until(PassStarted, 2)
        runner.release()
        await heard.until(PassFinished, 2)
        runner.free = True
        remote.dispatch(decode(3, ("a", 40)), [], staged=False)
        await heard.until(PassFinished, 3)
        assert [e.result.pass_id for e in heard.of(PassFinished)] == [1, 2, 3]
        assert len(heard.of(PassStarted)) == 3
        assert runner.aborted == ["nobody"]
        assert not remote.down.done()


async def test_a_load_over_a_link_that_breaks_all_the_time_ends_as_if_it_did_not() -> None:
    """Control and tokens both; every answer is whole and no token comes twice (`Reader` sees to that)."""
    random, reader = Random(3), Reader()
    async with (
        a_worker(runner=lambda model: TimedRunner(model, 0.2)) as worker,
        Wire(worker.address) as wire,
        a_remote(wire.address) as remote,
        a_pump(remote) as pump,
        a_token_link(wire.address, reader, ack_every=2) as tokens,
    ):
        handles = [submit(pump, f"r{index}", 30 + index, 20) for index in range(40)]
        breaks = 0
        while not all(handle.record.outcome for handle in handles):
            await until(
                lambda: (remote.connected and tokens.connected) or all(h.record.outcome for h in handles)
            )
            await asyncio.sleep(random.uniform(0.0, 0.03))
            wire.cut()
            breaks += 1
            await asyncio.sleep(random.uniform(0.0, 0.02))
            wire.heal()
        await reader.until(lambda: sum(map(len, reader.tokens.values())) == 40 * 20)
        assert {handle.record.outcome for handle in handles} == {Outcome.COMPLETED}
        assert {handle.record.output_tokens for handle in handles} == {20}
        assert breaks >= 3
        assert not remote.down.done()
        worker.model.check()


async def test_a_link_that_stays_away_is_the_end_of_the_instance_and_its_work_goes_elsewhere() -> None:
    settings = slower(QUICK, grace_s=0.3)
    async with (
        a_worker("w0", runner=HeldRunner) as cut_off,
        a_worker("w1") as other,
        Wire(cut_off.address) as wire,
        a_remote(wire.address, settings=settings) as first,
        a_remote(other.address) as second,
        a_pump(first) as pump,
    ):
        handle = submit(pump, "r")
        await until(lambda: cut_off.servicer.engine.held == ("r",))
        await second.start()
        pump.add(second)
        wire.cut()
        assert (await ended(handle)).outcome is Outcome.COMPLETED
        assert first.down.result().startswith(f"link: no word from {wire.address} for 0.3 s of grace")
        assert list(pump.scheduler.instances) == ["w1"]


async def test_silence_is_a_break_and_not_the_end() -> None:
    settings = slower(QUICK, silence_s=0.3)
    async with (
        a_worker(runner=HeldRunner) as worker,
        Wire(worker.address) as wire,
        a_remote(wire.address, settings=settings) as remote,
    ):
        await remote.start()
        heard, a = Heard(remote), engine_request("a", answer=1)
        remote.dispatch(prefill(1, a), [a], staged=False)
        await heard.until(PassStarted)
        wire.hold()
        await until(lambda: not remote.connected)
        wire.heal()
        assert isinstance(worker.runner, HeldRunner)
        worker.runner.release()
        await heard.until(PassFinished)
        assert not heard.of(InstanceDown)


async def test_a_scheduler_that_vanishes_without_a_word_is_noticed_and_its_requests_are_given_up() -> None:
    """Nothing breaks, as when a host loses its power; the worker does not hold KV for it for ever."""
    settings = slower(QUICK, silence_s=0.3, grace_s=0.1, orphan_s=0.2)
    async with (
        a_worker(settings=settings, runner=lambda model: HeldRunner(model, free=True)) as worker,
        Wire(worker.address) as wire,
        a_remote(wire.address) as remote,
    ):
        await remote.start()
        heard, request = Heard(remote), engine_request("a", answer=9)
        remote.dispatch(prefill(1, request), [request], staged=False)
        await heard.until(PassFinished)
        assert worker.servicer.engine.held == ("a",)
        wire.hold()
        await until(lambda: worker.servicer.engine.held == ())
        assert worker.model.stats().requests_live == 0


async def test_a_worker_that_was_started_again_has_forgotten() -> None:
    async with a_worker() as before, Wire(before.address) as wire, a_remote(wire.address) as remote:
        await remote.start()
        heard = Heard(remote)
        async with a_worker() as after:
            wire.point_at(after.address)
            wire.cut()
            wire.heal()
            assert (await heard.until(InstanceDown)).error.startswith("forgotten")
            async with a_remote(wire.address, incarnation=2) as again, a_pump(again) as pump:
                assert (await ended(submit(pump, "r"))).outcome is Outcome.COMPLETED


async def test_a_port_that_refuses_is_a_process_that_is_gone_and_grace_is_not_waited_for() -> None:
    settings = slower(QUICK, grace_s=1000.0, orphan_s=1000.0)
    async with a_worker() as worker, a_remote(worker.address, settings=settings) as remote:
        await remote.start()
        heard = Heard(remote)
        await worker.server.stop(None)
        assert (await heard.until(InstanceDown)).error.startswith(f"gone: nobody listens on {worker.address}")
    async with a_remote(worker.address) as late:
        with pytest.raises(WorkerUnavailable, match="gone"):
            await late.start()


async def test_a_pass_that_does_not_end_makes_an_instance_suspect_and_then_down() -> None:
    settings = replace(QUICK, heartbeat_s=0.02, hang=HangRule(20.0, 0.4, 4.0, 0.1))
    async with (
        a_worker("w0", settings=settings, runner=HeldRunner) as stuck,
        a_worker("w1") as other,
        a_remote(stuck.address, settings=settings) as first,
        a_remote(other.address) as second,
        a_pump(first) as pump,
    ):
        handle = submit(pump, "r")
        await until(lambda: first.health is Health.SUSPECT)
        assert list(pump.scheduler.instances) == ["w0"]
        await second.start()
        pump.add(second)
        record = await ended(handle)
        assert record.outcome is Outcome.COMPLETED
        error = first.down.result()
        assert error.startswith("hung: pass 1 runs for")
        assert error.endswith("s; the limit is 0.40 s")
        assert stuck.runner.waiting == 1  # type: ignore[attr-defined]


async def test_a_long_pass_within_its_prediction_is_well() -> None:
    """The limit is the factor times the prediction where that is above the floor."""
    settings = replace(QUICK, heartbeat_s=0.02, hang=HangRule(1e6, 0.002, suspect_s_min=0.001))
    async with (
        a_worker(settings=settings, runner=HeldRunner) as worker,
        a_remote(worker.address, settings=settings) as remote,
    ):
        await remote.start()
        heard, request = Heard(remote), engine_request("a", prompt_tokens=4000, answer=1)
        remote.dispatch(prefill(1, request), [request], staged=False)
        await until(lambda: remote.health is Health.SUSPECT)
        assert isinstance(worker.runner, HeldRunner)
        worker.runner.release()
        await heard.until(PassFinished)
        assert remote.health is Health.WELL
        assert not heard.of(InstanceDown)


async def test_what_the_owner_knows_from_elsewhere_counts_too() -> None:
    async with a_worker() as worker, a_remote(worker.address) as remote, a_pump(remote) as pump:
        remote.lost("its lease ran out")
        remote.lost("twice")
        await until(lambda: not pump.scheduler.instances)
        assert remote.down.result() == "its lease ran out"
        assert (await ended(submit(pump, "r"))).reason is Reason.NO_INSTANCE


# --- replays ---


async def _read_to_the_end(call: Any) -> None:
    async with asyncio.timeout(WAIT_S_MAX):
        while await call.read() is not grpc.aio.EOF:
            pass


async def test_a_command_that_comes_twice_is_obeyed_once() -> None:
    hello = pb.Hello(scheduler_id="s", protocol_version=1, incarnation=1, attempt=1)
    abort = pb.ControlRequest(epoch=1, sequence=2, abort=pb.AbortRequest(request_id="a"))
    last = pb.ControlRequest(epoch=1, sequence=3, abort=pb.AbortRequest(request_id="b"))
    sent = [
        pb.ControlRequest(epoch=1, hello=hello),
        pb.ControlRequest(epoch=1, sequence=1, settle=pb.Settle()),
        *[abort] * 3,
        last,
        abort,
    ]
    async with a_worker(runner=HeldRunner) as worker:
        channel = OPEN(worker.address)
        call = channel.stream_stream(f"/{SERVICE}/Control", request_serializer=as_bytes)()
        for message in sent:
            await call.write(message)
        assert isinstance(worker.runner, HeldRunner)
        runner = worker.runner
        await until(lambda: len(runner.aborted) >= 2)
        await call.write(pb.ControlRequest(epoch=1, sequence=9, abort=pb.AbortRequest(request_id="c")))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await _read_to_the_end(call)
        assert raised.value.details() == "message 9 came, but 4 is missing"
        assert runner.aborted == ["a", "b"]
        await channel.close()


async def test_an_event_that_comes_twice_is_believed_once_and_one_out_of_turn_not_at_all() -> None:
    async with a_worker(runner=HeldRunner) as worker, a_remote(worker.address) as remote:
        await remote.start()
        heard, a = Heard(remote), engine_request("a", answer=1)
        remote.dispatch(prefill(1, a), [a], staged=False)
        await heard.until(PassStarted)
        session = worker.servicer._session
        assert session is not None
        assert session.stream is not None
        assert isinstance(worker.runner, HeldRunner)
        worker.runner.release()
        finished = await heard.until(PassFinished)
        again = pb.ControlResponse(epoch=1, sequence=session.outbox.last)
        again.finished.pass_id, again.finished.kind = finished.result.pass_id, 1  # type: ignore[assignment]
        session.stream.put(again)
        b = engine_request("b", answer=1)
        worker.runner.free = True
        remote.dispatch(prefill(2, b), [b], staged=False)
        await heard.until(PassFinished, 2)
        again.sequence = session.outbox.last + 2
        session.stream.put(again)
        assert "is missing" in (await heard.until(InstanceDown)).error
        assert len(heard.of(PassFinished)) == 2


# --- front ends ---


async def test_ten_thousand_tokens_are_few_messages_and_each_comes_once() -> None:
    reader = Reader()
    async with (
        a_worker(tokens=TokenSettings(flush_s=0.004)) as worker,
        a_remote(worker.address) as remote,
        a_pump(remote) as pump,
        a_token_link(worker.address, reader) as link,
    ):
        handles = [submit(pump, f"r{index}", 20, 50) for index in range(200)]
        for handle in handles:
            assert (await ended(handle)).output_tokens == 50
        await reader.until(lambda: sum(map(len, reader.tokens.values())) == 10_000)
        assert link.messages <= worker.model.stats().passes_done + 10_000 // 512 + 1
        await until(lambda: worker.servicer.engine.book.kept(FRONT_END) == 0)


async def test_a_front_end_that_does_not_read_is_cut_off_and_slows_nobody() -> None:
    """Its requests end, the scheduler books them, and others, on the same worker, are served."""
    tokens = TokenSettings(backlog_tokens_max=250, credit=4)
    reader = Reader()
    async with a_worker(tokens=tokens) as worker, a_token_link(worker.address, reader):
        channel = OPEN(worker.address)
        call = channel.stream_stream(f"/{SERVICE}/StreamTokens", request_serializer=as_bytes)()
        await call.write(pb.StreamTokensRequest(front_end="slow"))
        async with a_remote(worker.address, front_end="slow") as remote:
            remote._front_end_of = lambda name: "slow" if name.startswith("s") else FRONT_END
            async with a_pump(remote) as pump:
                slow = [submit(pump, f"s{index}", 20, 100) for index in range(3)]
                quick = [submit(pump, f"q{index}", 20, 50) for index in range(3)]
                records = [await ended(handle) for handle in slow]
                assert {record.outcome for record in records} == {Outcome.CANCELLED}
                assert all(0 < record.output_tokens < 100 for record in records)
                assert {(await ended(handle)).outcome for handle in quick} == {Outcome.COMPLETED}
                await reader.until(lambda: sum(map(len, reader.tokens.values())) == 150)
                await until(lambda: not worker.servicer.engine.held)
                worker.model.check()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await _read_to_the_end(call)
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await channel.close()


async def test_a_front_end_that_never_comes_is_cut_off_too() -> None:
    tokens = TokenSettings(away_s=0.2)
    async with (
        a_worker(tokens=tokens) as worker,
        a_remote(worker.address, front_end="nowhere") as remote,
        a_pump(remote) as pump,
    ):
        assert (await ended(submit(pump, "r", 20, 10_000))).outcome is Outcome.CANCELLED


async def test_a_front_end_that_comes_late_gets_all_that_was_kept() -> None:
    reader = Reader()
    async with a_worker() as worker, a_remote(worker.address) as remote, a_pump(remote) as pump:
        assert (await ended(submit(pump, "r", 20, 30))).outcome is Outcome.COMPLETED
        async with a_token_link(worker.address, reader):
            await reader.until(lambda: len(reader.tokens.get("r", ())) == 30)


async def test_tokens_that_were_there_when_a_request_was_aborted_still_come() -> None:
    """The scheduler counted them, so a front end waits for them."""
    reader = Reader()
    async with a_worker() as worker, a_remote(worker.address) as remote, a_pump(remote) as pump:
        handle = submit(pump, "r", 20, 10_000)
        await until(lambda: handle.record.output_tokens > 3)
        handle.cancel()
        record = await ended(handle)
        await until(lambda: not worker.servicer.engine.held)
        async with a_token_link(worker.address, reader):
            await reader.until(lambda: len(reader.tokens.get("r", ())) >= record.output_tokens)
            await until(lambda: worker.servicer.engine.book.kept(FRONT_END) == 0)
