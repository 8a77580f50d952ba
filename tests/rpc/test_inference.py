"""Requests through real gRPC to the simulated engine: answers, refusals, cancels, deadlines, garbage."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engines.simulated_settings import Behaviour, Fault
from protos.plaserve.v1 import inference_pb2 as pb
from protos.plaserve.v1 import status_pb2 as status_pb
from service.core.settings import SchedulerSettings
from service.settings import LimitSettings


def ask(text: str = "hello there", **more: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt=pb.Prompt(text=text), **{"max_tokens": 4, **more})


async def answer(service: Any, request: pb.GenerateRequest, **call: Any) -> list[pb.GenerateResponse]:
    return [item async for item in service.inference.Generate(request, **call)]


async def refusal(service: Any, request: Any, **call: Any) -> tuple[grpc.StatusCode, str, dict[str, Any]]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer(service, request, **call)
    return explained(caught.value)


def explained(error: grpc.aio.AioRpcError) -> tuple[grpc.StatusCode, str, dict[str, Any]]:
    """Code, message and details by type name; fails on anything but one ErrorInfo."""
    raw = dict(error.trailing_metadata() or ())["grpc-status-details-bin"]
    details: dict[str, Any] = {}
    for item in status_pb2.Status.FromString(raw).details:  # type: ignore[arg-type]
        name = item.type_url.rpartition(".")[2]
        assert name not in details
        details[name] = getattr(error_details_pb2, name).FromString(item.value)
    assert details["ErrorInfo"].domain == "plaserve"
    return error.code(), error.details() or "", details


async def books(service: Any) -> status_pb.GetStatusResponse:
    return await service.status.GetStatus(status_pb.GetStatusRequest())


async def test_tokens_stream_and_the_summary_closes_the_books(service: Any) -> None:
    parts = await answer(service, ask())
    tokens = [t for part in parts for t in part.token_ids]
    summary = parts[-1].summary
    assert len(tokens) == summary.output_token_count == 4
    assert "".join(part.text for part in parts)
    assert (summary.prompt_token_count, summary.lane) == (11, pb.LANE_SHORT)
    assert summary.finish_reason == pb.FINISH_REASON_LENGTH
    assert summary.ttft_duration.ToNanoseconds() > 0
    assert not any(part.HasField("summary") for part in parts[:-1])
    after = await books(service)
    assert (after.submitted_count, dict(after.outcome_counts)) == (1, {"COMPLETED": 1})


async def test_long_prompts_take_the_long_lane_and_chat_goes_through_the_template(service: Any) -> None:
    long = (await answer(service, ask("x" * 2000)))[-1].summary
    assert (long.lane, long.new_token_count) == (pb.LANE_LONG, 2000)
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    request = pb.GenerateRequest(prompt=pb.Prompt(chat=chat), max_tokens=1)
    summary = (await answer(service, request))[-1].summary
    assert summary.prompt_token_count == len("user: hi\nassistant: ")


async def test_prefill_returns_the_first_token_that_generate_gives(service: Any) -> None:
    first = await service.inference.Prefill(pb.PrefillRequest(prompt=pb.Prompt(text="hello there")))
    parts = await answer(service, ask())
    assert first.first_token_id == parts[0].token_ids[0]
    assert first.summary.output_token_count == 1
    assert first.pass_duration.ToNanoseconds() > 0


async def test_a_repeated_prompt_reuses_its_blocks(service: Any) -> None:
    await answer(service, ask("y" * 200))
    again = (await answer(service, ask("y" * 200)))[-1].summary
    assert again.history_token_count >= 160
    assert again.new_token_count + again.history_token_count == 200


BAD: list[tuple[str, pb.GenerateRequest]] = [
    ("prompt", pb.GenerateRequest()),
    ("prompt.text", ask("")),
    ("prompt.text", ask("z" * 300_000)),
    ("prompt.text", ask("z" * 5000)),
    ("prompt.tokens.ids", pb.GenerateRequest(prompt=pb.Prompt(tokens=pb.TokenIds()))),
    ("prompt.tokens.ids", pb.GenerateRequest(prompt=pb.Prompt(tokens=pb.TokenIds(ids=[1, 99_999_999])))),
    ("prompt.chat.messages", pb.GenerateRequest(prompt=pb.Prompt(chat=pb.Chat()))),
    (
        "prompt.chat.messages[0].role",
        pb.GenerateRequest(
            prompt=pb.Prompt(chat=pb.Chat(messages=[pb.ChatMessage(role="god", content="x")]))
        ),
    ),
    ("prompt.tokens.ids", pb.GenerateRequest(prompt=pb.Prompt(tokens=pb.TokenIds(ids=[7] * 200_000)))),
    (
        "prompt.chat.messages",
        pb.GenerateRequest(prompt=pb.Prompt(chat=pb.Chat(messages=[pb.ChatMessage(role="user")] * 5000))),
    ),
    (
        "prompt.chat.messages",
        pb.GenerateRequest(prompt=pb.Prompt(chat=pb.Chat(messages=[pb.ChatMessage(role="user")]))),
    ),
    ("max_tokens", ask(max_tokens=1_000_000)),
    ("sampling.temperature", ask(sampling=pb.Sampling(temperature=1e9))),
    ("sampling.top_k", ask(sampling=pb.Sampling(top_k=4_000_000_000))),
    ("sampling.top_p", ask(sampling=pb.Sampling(top_p=float("nan")))),
    ("scheduling.ttft_slo", ask(scheduling=pb.Scheduling(ttft_slo=Duration()))),
    ("scheduling.ttft_slo", ask(scheduling=pb.Scheduling(ttft_slo=Duration(seconds=90_000)))),
    ("sampling.temperature", ask(sampling=pb.Sampling(temperature=float("nan")))),
    ("sampling.temperature", ask(sampling=pb.Sampling(temperature=-1.0))),
    ("sampling.top_p", ask(sampling=pb.Sampling(top_p=0.0))),
    ("sampling.top_p", ask(sampling=pb.Sampling(top_p=1.5))),
    ("sampling.stop", ask(sampling=pb.Sampling(stop=["a"] * 9))),
    ("sampling.stop[0]", ask(sampling=pb.Sampling(stop=[""]))),
    ("scheduling.ttft_slo", ask(scheduling=pb.Scheduling(ttft_slo=Duration(seconds=-1)))),
    ("scheduling.ttft_slo", ask(scheduling=pb.Scheduling(ttft_slo=Duration(seconds=1), deadline_free=True))),
    ("scheduling.priority", ask(scheduling=pb.Scheduling(priority=99))),
    ("scheduling.tenant", ask(scheduling=pb.Scheduling(tenant="t" * 500))),
    ("scheduling.session", ask(scheduling=pb.Scheduling(session="s" * 500))),
    ("request_id", ask(request_id="line\nbreak")),
]


@pytest.mark.parametrize(("field", "request_"), BAD, ids=[f"{n}-{field}" for n, (field, _) in enumerate(BAD)])
async def test_bad_input_names_its_field_and_service_goes_on(
    service: Any, field: str, request_: pb.GenerateRequest
) -> None:
    code, message, details = await refusal(service, request_)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details["BadRequest"].field_violations[0].field == field
    assert message.startswith(field)
    assert details["ErrorInfo"].reason == "INVALID_FIELD"
    assert (await answer(service, ask()))[-1].HasField("summary")


async def test_unknown_model_is_not_found(service: Any) -> None:
    code, message, details = await refusal(service, ask(model="gpt-17"))
    assert code is grpc.StatusCode.NOT_FOUND
    assert "'sim'" in message
    assert details["ErrorInfo"].reason == "UNKNOWN_MODEL"


async def test_a_request_id_in_use_is_refused(service: Any) -> None:
    call = service.inference.Generate(ask("q" * 3000, request_id="same", max_tokens=64))
    await call.read()
    code, _, details = await refusal(service, ask(request_id="same"))
    assert code is grpc.StatusCode.ALREADY_EXISTS
    assert details["ErrorInfo"].reason == "REQUEST_ID_IN_USE"
    call.cancel()


async def test_cancelling_at_any_moment_frees_everything(service: Any) -> None:
    calls = [service.inference.Generate(ask("c" * n, max_tokens=200)) for n in (20, 3000, 30, 2500)]
    await calls[0].read()
    for call in calls:
        call.cancel()
    for _ in range(200):
        now = await books(service)
        if now.queued_count + now.running_count == 0 and service.model.stats().requests_live == 0:
            break
        await asyncio.sleep(0.02)
    assert service.model.stats().requests_live == 0
    service.model.check()
    assert sum(now.outcome_counts.values()) == now.submitted_count
    assert now.outcome_counts.get("COMPLETED", 0) == 0


async def test_a_deadline_in_the_past_and_one_that_passes(service: Any, run_service: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer(service, ask(), timeout=-1.0)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    async with run_service(time_scale=20.0) as slow:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer(slow, ask("d" * 3000), timeout=0.3)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        async with asyncio.timeout(5.0):
            while not (counts := dict((await books(slow)).outcome_counts)):  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.01)
        assert counts == {"DEADLINE_EXCEEDED": 1}


async def test_beyond_the_bound_refusal_is_early_and_says_when_to_retry(run_service: Any) -> None:
    async with run_service(knobs=SchedulerSettings(queue_requests_max=8), time_scale=3.0) as service:
        results = await asyncio.gather(
            *(answer(service, ask("e" * 900)) for _ in range(60)), return_exceptions=True
        )
        refused = [r for r in results if isinstance(r, grpc.aio.AioRpcError)]
        assert refused
        for error in refused:
            code, _, details = explained(error)
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert details["ErrorInfo"].reason == "REJECTED_CAPACITY"
            assert details["RetryInfo"].retry_delay.ToNanoseconds() > 0
        now = await books(service)
        assert now.outcome_counts["REJECTED_CAPACITY"] == len(refused)
        assert now.outcome_counts["COMPLETED"] == 60 - len(refused)
        assert now.submitted_count == 60


async def test_what_can_never_fit_is_a_failed_precondition(run_service: Any) -> None:
    limits = LimitSettings(max_tokens_max=100_000)
    async with run_service(limits=limits, context_tokens_max=1_000_000) as service:
        code, _, details = await refusal(service, ask("f" * 200_000, max_tokens=90_000))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert details["ErrorInfo"].reason == "REJECTED_TOO_LARGE"


async def test_a_failed_pass_is_run_again_once_and_a_lost_engine_is_unavailable(run_service: Any) -> None:
    async with run_service(behaviour=Behaviour(faults={1: Fault()})) as service:
        assert len((await answer(service, ask()))[-1].summary.request_id) == 32
    async with run_service(behaviour=Behaviour(faults={1: Fault(fatal=True)})) as service:
        first, _, _ = await refusal(service, ask())
        second, _, details = await refusal(service, ask())
        assert first is second is grpc.StatusCode.UNAVAILABLE
        assert details["ErrorInfo"].reason == "UNAVAILABLE"
        assert "no instance is left" in service.pump.broken.result()


async def test_a_fault_of_the_scheduler_answers_everybody_and_breaks_the_service(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = [asyncio.create_task(refusal(service, ask("k" * 900))) for _ in range(3)]
    for _ in range(200):
        if (await books(service)).submitted_count == 3:
            break
        await asyncio.sleep(0.01)

    def fault(now_s: float) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(service.pump.scheduler, "poll", fault)
    for code, message, details in await asyncio.gather(*waiting):
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "the scheduler failed" in message
        assert details["ErrorInfo"].reason == "UNAVAILABLE"
    assert "RuntimeError: injected" in service.pump.broken.result()


async def test_stop_texts_end_the_answer_and_count_as_completed(service: Any) -> None:
    text = "".join(part.text for part in await answer(service, ask(max_tokens=12)))
    stop = text[5:7]
    cut = text[: text.find(stop)]
    parts = await answer(service, ask(max_tokens=12, sampling=pb.Sampling(stop=[stop])))
    assert "".join(part.text for part in parts) == cut
    assert parts[-1].summary.finish_reason == pb.FINISH_REASON_STOP
    assert dict((await books(service)).outcome_counts) == {"COMPLETED": 2}


async def test_a_megabyte_of_garbage_is_refused_and_service_goes_on(service: Any, run_service: Any) -> None:
    garbage = bytes(range(256)) * 4096
    call = service.channel.unary_stream("/plaserve.v1.InferenceService/Generate")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [item async for item in call(garbage)]
    code, _, details = explained(caught.value)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details["BadRequest"].field_violations[0].field == "message"
    host, _, port = service.address.partition(":")
    with socket.create_connection((host, int(port)), timeout=5.0) as raw:
        raw.settimeout(5.0)
        try:
            raw.sendall(garbage)
            while raw.recv(65536):
                pass
        except OSError:
            pass  # the server hung up, as it should
    assert (await answer(service, ask()))[-1].HasField("summary")
    async with run_service(message_bytes_max=100_000) as small:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer(small, ask("g" * 200_000))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_health_turns_with_the_drain_and_new_work_is_refused(service: Any) -> None:
    health = health_pb2_grpc.HealthStub(service.channel)
    check = health_pb2.HealthCheckRequest(service="plaserve.v1.InferenceService")
    assert (await health.Check(check)).status == health_pb2.HealthCheckResponse.SERVING
    running = asyncio.create_task(answer(service, ask("h" * 1500, max_tokens=8)))
    async with asyncio.timeout(5.0):
        while not (await books(service)).submitted_count:  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.01)
    await service.server.not_serving()
    assert (await health.Check(check)).status == health_pb2.HealthCheckResponse.NOT_SERVING
    drained = asyncio.create_task(service.pump.drain(10.0))
    await asyncio.sleep(0)
    code, _, details = await refusal(service, ask())
    assert code is grpc.StatusCode.UNAVAILABLE
    assert details["ErrorInfo"].reason == "REJECTED_DRAINING"
    assert await drained == 0
    assert (await running)[-1].HasField("summary")


async def test_reflection_lists_the_services(service: Any) -> None:
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    stub = reflection_pb2_grpc.ServerReflectionStub(service.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    answers = [item async for item in stub.ServerReflectionInfo(iter([request]))]
    names = {entry.name for entry in answers[0].list_services_response.service}
    assert {"plaserve.v1.InferenceService", "plaserve.v1.StatusService", "grpc.health.v1.Health"} <= names


async def test_an_id_whose_cancelled_pass_still_runs_is_in_use_until_it_is_over(run_service: Any) -> None:
    async with run_service(time_scale=10.0) as service:
        call = service.inference.Generate(ask("r" * 600, request_id="again"))
        for _ in range(100):
            if (await books(service)).running_count:
                break
            await asyncio.sleep(0.01)
        call.cancel()
        for _ in range(100):
            if (await books(service)).outcome_counts.get("CANCELLED"):
                break
            await asyncio.sleep(0.01)
        code, _, _ = await refusal(service, ask(request_id="again"))
        assert code is grpc.StatusCode.ALREADY_EXISTS
        await answer(service, ask())  # the pass is over when another one ran
        assert (await answer(service, ask(request_id="again")))[-1].HasField("summary")
        assert await service.pump.drain(5.0) == 0
