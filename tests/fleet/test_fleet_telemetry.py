"""What the processes of a fleet tell: metrics of each kind, and one trace from the client to the worker."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
import pytest
from test_processes import CAPABILITIES, COST, LINK, PROFILES, SCALE, Fleet, read, submit, until

from engines.simulated import SimulatedModel
from protos.plaserve.v1 import inference_pb2 as pb
from protos.plaserve.v1.inference_pb2_grpc import InferenceServiceStub
from service import wiring_fleet
from service.core.reconcile import Controller, MoveReason, RoleMove
from service.core.settings import SchedulerSettings
from service.core.types import InstanceSpec, Outcome, Role
from service.fleet.front_end import FrontEndProcess
from service.fleet.memory import MemoryFleet
from service.fleet.pressures import Pressures
from service.fleet.processes import ControllerProcess, SchedulerProcess, WorkerProcess
from service.fleet.readings import of_controller, of_front_end
from service.fleet.remote_runtime import Hooks, RemoteSettings
from service.fleet.trace_link import TraceLink
from service.policies import make_scheduler
from service.rpc.calls import CountedInference
from service.rpc.inference import InferenceServicer, ServedModel, StatusServicer
from service.rpc.intake import Intake
from service.rpc.server import RpcServer
from service.rpc.text import ByteCodec
from service.runtime.worker import TimedRunner
from service.settings import LimitSettings, ServerSettings, Settings, load_settings
from service.telemetry import FleetTelemetry, TelemetrySettings
from service.telemetry import fleet_names as names
from service.telemetry.names import KV_BLOCKS
from service.wiring_fleet import watch_worker

sys.path.append(str(Path(__file__).parents[1] / "telemetry"))
from telemetry_run import Collector, Scrape, attributes, collecting, links, scrape

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def caller(*, sampled: bool = True) -> tuple[tuple[str, str], ...]:
    return (("traceparent", f"00-{TRACE_ID}-{SPAN_ID}-0{int(sampled)}"), ("tracestate", "vendor=x"))


@dataclass
class Told:
    """A fleet of in-process processes over real gRPC, as `wiring_fleet` puts them together."""

    fleet: Fleet = field(default_factory=Fleet)
    telemetry: dict[str, FleetTelemetry] = field(default_factory=dict)
    endpoint: str = ""
    metrics: bool = True
    stub: InferenceServiceStub | None = None
    front_end: FrontEndProcess | None = None

    def start(self, name: str) -> FleetTelemetry:
        made = FleetTelemetry(
            TelemetrySettings(self.metrics, self.endpoint, metrics_port=0, instance_id=name)
        )
        made.start()
        self.telemetry[name] = made
        return made

    async def scraped(self, name: str) -> Scrape:
        return await asyncio.to_thread(scrape, self.telemetry[name].metrics_port)

    async def worker(self, name: str) -> WorkerProcess:
        spec = InstanceSpec(name, CAPABILITIES, PROFILES, COST.scaled(SCALE))
        runner = TimedRunner(SimulatedModel(CAPABILITIES, PROFILES, COST), SCALE)
        facts = {"model": "m", "backend": "simulated", "bundle_id": ""}
        made = WorkerProcess(self.fleet.place(name), await self.fleet.membership(), spec, runner, facts, LINK)
        watch_worker(made.servicer, self.start(name))
        await made.start()
        self.fleet.workers[name] = made
        return made

    async def scheduler(self, name: str) -> SchedulerProcess:
        telemetry = self.start(name)

        def observe(model: str, backend: str, t_classes: tuple[int, ...]):
            telemetry.serves(model, backend, t_classes)
            return telemetry.observers

        made = SchedulerProcess(
            self.fleet.place(name),
            await self.fleet.membership(),
            lambda: make_scheduler("plaserve", SchedulerSettings()),
            "plaserve",
            "simulated",
            observe,
            LINK,
            TraceLink(telemetry.request_context, telemetry.carrier) if telemetry.traces else None,
        )
        await made.start()
        self.fleet.schedulers[name] = made
        return made

    @asynccontextmanager
    async def surface(self, name: str) -> AsyncIterator[FrontEndProcess]:
        telemetry = self.start(name)
        told = telemetry.front_end()
        made = FrontEndProcess(
            self.fleet.place(name),
            await self.fleet.membership(),
            RemoteSettings(failover_s=5.0, tokens_s=2.0),
            told.observers,
            hooks=Hooks(told.token, told.carrier),
        )
        telemetry.tell(lambda: of_front_end(made))
        await made.start("127.0.0.1:1")
        self.fleet.front_ends[name] = made
        welcome = await made.welcome()
        intake = Intake(ByteCodec(), welcome.capabilities, LimitSettings())
        model = ServedModel("m", "simulated", "plaserve", "", "0")
        parts = (made.runtime, ByteCodec(), intake, model, LimitSettings(), told.called)
        inference = CountedInference(told.calls, *parts) if told.calls else InferenceServicer(*parts)
        server = RpcServer(ServerSettings(port=0), inference, StatusServicer(made.runtime, model))
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            self.stub = InferenceServiceStub(channel)
            yield made
        await server.stop(None)
        intake.close()

    async def ask(self, tokens: int = 60, answer: int = 4, **call: object) -> pb.Summary:
        assert self.stub is not None
        request = pb.GenerateRequest(prompt=pb.Prompt(text="x" * tokens), max_tokens=answer)
        return [part async for part in self.stub.Generate(request, **call)][-1].summary


@asynccontextmanager
async def told(workers: int = 2, *, endpoint: str = "", metrics: bool = True) -> AsyncIterator[Told]:
    made = Told(endpoint=endpoint, metrics=metrics)
    try:
        for n in range(workers):
            await made.worker(f"w{n}")
        await made.scheduler("s0")
        await until(lambda: len(made.fleet.used()) == workers)
        async with made.surface("fe0") as made.front_end:
            yield made
    finally:
        for group in (made.fleet.front_ends, made.fleet.schedulers, made.fleet.workers):
            for process in group.values():
                await process.close()
        for telemetry in made.telemetry.values():
            telemetry.shutdown()


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


# --- metrics ---


async def test_a_front_end_tells_what_its_clients_see() -> None:
    async with told() as made:
        await asyncio.gather(*(made.ask(40 + 100 * n, 3) for n in range(5)))
        with pytest.raises(grpc.aio.AioRpcError, match="max_tokens"):
            await made.ask(answer=10**6)
        gone = made.stub.Generate(pb.GenerateRequest(prompt=pb.Prompt(text="y" * 900), max_tokens=900))
        await gone.read()
        during = await made.scraped("fe0")
        gone.cancel()
        await until(lambda: not made.front_end.runtime._live)
        found = await made.scraped("fe0")
    assert during("plaserve_calls_in_flight", method="Generate") == 1
    assert found("plaserve_calls_in_flight") == 0
    codes = +found.by("plaserve_calls_total", "code")
    assert codes == {"OK": 5, "INVALID_ARGUMENT": 1, "CANCELLED": 1}
    assert found("plaserve_client_ttft_seconds_count") == 6
    assert found("plaserve_client_ttft_seconds_count", lane="none") == 0
    assert found("plaserve_client_ttft_seconds_count", lane="long") >= 1
    assert found("plaserve_client_itl_seconds_count") >= 5 * 2
    assert found("plaserve_scheduler_link_up", shard="s") == 1
    assert found("plaserve_token_link_up") == 2
    assert found("plaserve_requests_sent_again_total") == 0


async def test_a_worker_tells_what_its_engine_did_and_who_drives_it() -> None:
    async with told(workers=1) as made:
        summaries = [await made.ask(100 + n, 3) for n in range(3)]
        worker = made.fleet.workers["w0"]
        before = await made.scraped("w0")
        await made.fleet.schedulers.pop("s0").close()
        await until(lambda: not worker.servicer.linked)
        without = await made.scraped("w0")
        await made.scheduler("s1")
        await until(lambda: worker.servicer.linked)
        worker.servicer.set_role(Role.LP)
        await worker.drain(5.0)
        after = await made.scraped("w0")
    passes = sum(summary.prefill_pass_count for summary in summaries)
    assert before("plaserve_worker_passes_total", kind="prefill") == passes
    assert before("plaserve_worker_passes_total", kind="decode") == 3 * 2
    assert before("plaserve_worker_tokens_total", kind="prefill") == sum(s.new_token_count for s in summaries)
    assert before("plaserve_worker_engine_seconds_total", kind="prefill") > 0
    assert before(KV_BLOCKS.name, state="free") > 0
    assert before(KV_BLOCKS.name) == worker.servicer.engine.stats().kv_blocks_total
    assert 0 < before("plaserve_stream_backlog_tokens") <= 3 * 3  # acknowledged now and then
    assert after("plaserve_stream_backlog_tokens") == 0
    assert [found("plaserve_worker_link_up") for found in (before, without, after)] == [1, 0, 1]
    assert after("plaserve_worker_link_epoch") > before("plaserve_worker_link_epoch") > 0
    assert before("plaserve_worker_takeovers_total") == 1
    assert after("plaserve_worker_takeovers_total") == after("plaserve_worker_link_streams_total") == 2
    assert (before("plaserve_draining"), after("plaserve_draining")) == (0, 1)
    assert before("plaserve_worker_role", role="mixed") == after("plaserve_worker_role", role="lp") == 1
    assert after("plaserve_worker_role") == 1


async def test_a_controller_tells_pools_pressures_and_moves_and_whether_it_leads() -> None:
    async with told() as made:
        fleet, standing = made.fleet, {}

        def make() -> Controller:
            return fleet.wants

        for name in ("c0", "c1"):
            membership, settings = await fleet.membership(), SchedulerSettings()
            process = ControllerProcess(fleet.place(name), membership, make, settings)
            shown, telemetry = Pressures(settings), made.start(name)
            telemetry.tell(
                lambda p=process, m=membership, s=shown: of_controller(p.controller, m, s)  # type: ignore[misc]
            )
            await process.start()
            standing[name] = process
        try:
            await until(lambda: any(p.controller.views for p in standing.values()))
            leads = next(n for n, p in standing.items() if p.controller.leadership is not None)
            fleet.wants.moves = (RoleMove("w0", Role.SP, MoveReason.PRESSURE),)
            await until(lambda: fleet.workers["w0"].servicer.spec.role is Role.SP)
            await until(lambda: standing[leads].controller.moves[MoveReason.PRESSURE] == 1)
            await until(
                lambda: any(
                    load.role is Role.SP
                    for view in standing[leads].controller.views.values()
                    for load in view.instances
                )
            )
            found = {name: await made.scraped(name) for name in standing}
        finally:
            for process in standing.values():
                await process.close()
    (other,) = standing.keys() - {leads}
    assert (found[leads]("plaserve_controller_leads"), found[other]("plaserve_controller_leads")) == (1, 0)
    for which in (names.WANTED, names.REAL):
        assert found[leads]("plaserve_pool_instances", which=which, role="lp") == 0
        assert found[leads]("plaserve_pool_instances", which=which, role="sp") == 1
        assert found[leads]("plaserve_pool_instances", which=which, role="mixed") == 1
    assert found[leads]("plaserve_controller_moves_total", reason="pressure") == 1
    assert found[other]("plaserve_controller_moves_total") == 0
    assert found[leads]("plaserve_pool_pressure", role="sp", shard="s") >= 0
    with pytest.raises(KeyError):
        found[other]("plaserve_pool_pressure")
    assert found[leads]("plaserve_membership_age_seconds") == 0


# --- traces ---


async def test_one_trace_shows_the_way_of_a_request_through_the_fleet(collector: Collector) -> None:
    async with told(endpoint=collector.endpoint, metrics=False) as made:
        summary = await made.ask(2500, 3, metadata=caller())
    (front,) = collector.named("frontend")
    (request,) = collector.named("request")
    assert (front.trace_id.hex(), front.parent_span_id.hex()) == (TRACE_ID, SPAN_ID)
    assert front.trace_state == "vendor=x"
    assert request.parent_span_id == front.span_id
    children = {s.name: s for s in collector.spans if s.parent_span_id == request.span_id}
    assert children.keys() == {"queue", "prefill", "decode", "execute"}
    passes = {span.span_id: span for span in collector.named("pass")}
    assert links(children["prefill"]) == passes.keys()
    executed = collector.named("execute")
    assert {span.parent_span_id for span in executed} == {request.span_id}
    assert {span.trace_id for span in executed} == {front.trace_id}
    assert len(executed) == len(passes) == summary.prefill_pass_count >= 2
    ids = sorted(attributes(span)["plaserve.pass.id"] for span in passes.values())
    assert sorted(attributes(span)["plaserve.pass.id"] for span in executed) == ids
    computed = sum(attributes(span)["plaserve.pass.computed_tokens"] for span in executed)
    assert computed == summary.new_token_count == 2500
    found = attributes(front)
    assert found["plaserve.outcome"] == "COMPLETED"
    assert found[names.TRIES] == 1
    assert front.start_time_unix_nano <= request.start_time_unix_nano <= executed[0].start_time_unix_nano
    assert executed[-1].end_time_unix_nano <= front.end_time_unix_nano


async def test_a_caller_that_does_not_sample_is_obeyed_by_all_processes(collector: Collector) -> None:
    async with told(endpoint=collector.endpoint, metrics=False) as made:
        await made.ask(metadata=caller(sampled=False))
        engines = [worker.servicer.engine for worker in made.fleet.workers.values()]
        assert [observer._live for engine in engines for observer in engine.observers] == [{}, {}]
    assert collector.spans == []


async def test_a_request_that_is_sent_again_is_one_trace_and_nothing_is_kept(collector: Collector) -> None:
    async with told(endpoint=collector.endpoint) as made:
        asked = [asyncio.create_task(made.ask(2000, 2, metadata=caller())) for _ in range(6)]
        old = made.fleet.schedulers.pop("s0")
        await until(lambda: any(w.servicer.engine.running for w in made.fleet.workers.values()))
        standby = await made.scheduler("s1")
        await old.close()
        ended = await asyncio.gather(*asked, return_exceptions=True)
        assert standby.reigns == 1
        again = (await made.scraped("fe0"))("plaserve_requests_sent_again_total")
        assert any(not isinstance(one, BaseException) for one in ended)
        await until(lambda: not any(w.servicer.engine.held for w in made.fleet.workers.values()))
        for worker in made.fleet.workers.values():
            assert [o._live for o in worker.servicer.engine.observers if hasattr(o, "_live")] == [{}]
        (front,) = made.front_end.runtime._observers
        assert (front._live, front._callers) == ({}, {})
    assert again >= 1
    fronts = collector.named("frontend")
    assert len(fronts) == 6
    assert sum(attributes(span)[names.TRIES] == 2 for span in fronts) == again
    assert sum(event.name == names.EVENT_SENT_AGAIN for span in fronts for event in span.events) == again
    assert {span.trace_id.hex() for span in collector.spans if span.name != "pass"} == {TRACE_ID}


async def test_off_no_context_is_sent_and_nobody_watches() -> None:
    async with told(metrics=False) as made:
        sent = []
        for uplink in made.front_end.runtime.uplinks._uplinks.values():
            say = uplink._link.send
            uplink._link.send = lambda message, say=say: (sent.append(message), say(message))[1]
        await made.ask(metadata=caller())
        assert [dict(message.submit.trace_context) for message in sent] == [{}]
        assert all(not worker.servicer.engine.observers for worker in made.fleet.workers.values())
        assert made.front_end.runtime._observers == ()
        assert all(telemetry.metrics_port == 0 for telemetry in made.telemetry.values())


# --- as `plaserve` puts it together ---


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


async def test_the_four_commands_tell_what_they_should(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, ports, ready = MemoryFleet(), {}, {}
    monkeypatch.setattr(wiring_fleet, "membership_of", lambda options: store.membership())

    def settings(name: str) -> Settings:
        ports[name] = free_port()
        ready[name] = asyncio.get_running_loop().create_future()
        chosen = {
            "fleet.member_id": name,
            "fleet.listen": "127.0.0.1:0",
            "engine.backend": "simulated",
            "engine.simulated_preset": "small_cpu",
            "engine.simulated_time_scale": SCALE,
            "server.port": 0,
            "telemetry.metrics_port": ports[name],
            "telemetry.otlp_endpoint": collector.endpoint,
        }
        return load_settings(overrides=chosen)

    of_worker = settings("w")
    first = await asyncio.to_thread(wiring_fleet.load_first, of_worker)
    running = [asyncio.create_task(wiring_fleet.run_worker(of_worker, first, ready["w"].set_result))]
    for name, run in (
        ("s", wiring_fleet.run_scheduler),
        ("c", wiring_fleet.run_controller),
        ("f", wiring_fleet.run_frontend),
    ):
        chosen = settings(name)
        running.append(asyncio.create_task(run(chosen, ready[name].set_result)))
    try:
        async with asyncio.timeout(30), grpc.aio.insecure_channel(await ready["f"]) as channel:
            request = pb.GenerateRequest(prompt=pb.Prompt(text="x" * 90), max_tokens=3)
            stub = InferenceServiceStub(channel)
            _ = [part async for part in stub.Generate(request, metadata=caller())]
        found = {name: await asyncio.to_thread(scrape, port) for name, port in ports.items()}
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    assert found["w"]("plaserve_worker_passes_total", kind="prefill") == 1
    assert found["s"]("plaserve_requests_ended_total", outcome="COMPLETED") == 1
    assert found["c"]("plaserve_pool_instances", which="real") == 1
    assert found["f"]("plaserve_calls_total", method="Generate", code="OK") == 1
    tree = {span.name: span for span in collector.spans}
    for child, parent in (("execute", "request"), ("queue", "request"), ("request", "frontend")):
        assert tree[child].parent_span_id == tree[parent].span_id
    assert tree["frontend"].trace_id.hex() == TRACE_ID


# --- small things that clients and operators notice ---


async def test_positions_of_answers_that_end_without_a_finish_are_forgotten() -> None:
    made = Fleet()
    await made.worker("w0")
    await made.scheduler("s0")
    front_end = await made.front_end("fe0")
    try:
        await until(lambda: front_end.runtime.welcome is not None)
        handles = [submit(front_end, f"r{n}", 40, 400) for n in range(4)]
        await until(lambda: all(handle.record.output_tokens for handle in handles))
        (link,) = front_end._links.values()
        assert link.positions == 4
        for handle in handles:
            handle.cancel()
        ended = await asyncio.gather(*map(read, handles))
        assert {record.outcome for _, record in ended} == {Outcome.CANCELLED}
        await until(lambda: not made.workers["w0"].servicer.engine.held)
        assert link.positions == 0
        link.take(_late("fe0/1/r0", 50))  # a token that was on its way
        assert link.positions == 0
    finally:
        for group in (made.front_ends, made.schedulers, made.workers):
            for process in group.values():
                await process.close()


def _late(request_id: str, first: int):
    from protos.plaserve.v1 import worker_pb2

    delta = worker_pb2.TokenDelta(request_id=request_id, first_index=first, token_ids=[7])
    return worker_pb2.StreamTokensResponse(deltas=[delta], sequence=1)


async def test_a_worker_that_is_gone_is_said_once_and_once_that_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = Fleet()
    dead = await made.worker("w0")
    await made.scheduler("s0")
    front_end = await made.front_end("fe0")
    try:
        await until(lambda: made.used() == {"w0"} and all(front_end.token_links.values()))
        await until(lambda: front_end.runtime.welcome is not None)
        reign = made.active.gate.reign
        assert reign is not None
        caplog.set_level(logging.DEBUG, logger="service.fleet")
        await dead._port.stop(0)
        await dead.servicer.close()  # its lease stays: nobody said goodbye
        tries = reign._takeovers
        await until(lambda: reign._takeovers >= tries + 3, 40.0)
        said = [r for r in caplog.records if r.levelno >= logging.INFO]
        assert [r.name.rpartition(".")[2] for r in said].count("reign") == 1
        assert [r.name.rpartition(".")[2] for r in said].count("token_link") == 1
        assert {r.name.rpartition(".")[2] for r in said} <= {"reign", "token_link", "worker_service"}
        assert len([r for r in caplog.records if r.name.endswith("reign")]) >= 3  # the rest is at debug
        caplog.clear()
        assert dead._lease is not None
        await dead._lease.leave()
        await made.worker("w0")
        await until(lambda: made.used() == {"w0"} and all(front_end.token_links.values()))
        said = [r for r in caplog.records if r.levelno >= logging.INFO and r.name.endswith("reign")]
        assert [r.getMessage().startswith("worker w0 is in use") for r in said] == [True]
    finally:
        for group in (made.front_ends, made.schedulers, made.workers):
            for process in group.values():
                await process.close()
