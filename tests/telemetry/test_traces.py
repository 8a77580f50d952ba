"""A trace per request, received as a collector receives it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from telemetry_run import MODEL, QUIET, Collector, attributes, collecting, finish, links, watched

from engines.simulated_settings import Behaviour, Fault
from service.telemetry import TelemetrySettings, export
from service.telemetry.names import SPANS, Attribute

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01", "tracestate": "vendor=x"}
NOT_SAMPLED = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-00"}
LONG_TOKENS = 2500  # more than two passes of the largest profile hold


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


def tracing(collector: Collector, ratio: float = 1.0) -> TelemetrySettings:
    return TelemetrySettings(enabled=False, otlp_endpoint=collector.endpoint, sample_ratio=ratio)


async def test_a_request_is_one_trace_in_order_and_linked_with_its_passes(collector):
    async with watched(tracing(collector)) as service:
        shorts = [service.submit(f"s{index}", 40, session="s", tenant="t") for index in range(4)]
        await finish(service.submit("long", LONG_TOKENS), *shorts)

    assert {span.name for span in collector.spans} == set(SPANS)
    assert collector.resource["service.name"] == "plaserve"
    passes = {span.span_id: span for span in collector.named("pass")}
    assert len(links(collector.of_request("long")["prefill"])) >= 3
    for record in service.records:
        spans = collector.of_request(record.request.request_id)
        request, queue, prefill, decode = (spans[n] for n in ("request", "queue", "prefill", "decode"))
        assert len({span.trace_id for span in spans.values()}) == 1
        assert request.start_time_unix_nano == queue.start_time_unix_nano
        assert queue.end_time_unix_nano == prefill.start_time_unix_nano
        assert prefill.end_time_unix_nano == decode.start_time_unix_nano
        assert decode.end_time_unix_nano == request.end_time_unix_nano
        assert all(span.start_time_unix_nano <= span.end_time_unix_nano for span in spans.values())
        assert links(prefill) == {i for i, span in passes.items() if request.span_id in links(span)}
        assert links(prefill) <= passes.keys()
        in_prefill = [passes[span_id] for span_id in links(prefill)]
        assert min(span.start_time_unix_nano for span in in_prefill) == prefill.start_time_unix_nano
        assert max(span.end_time_unix_nano for span in in_prefill) == prefill.end_time_unix_nano


async def test_attributes_are_those_of_the_record(collector):
    async with watched(tracing(collector)) as service:
        await finish(service.submit("a", 100, session="talk", tenant="team", priority=2))

    record = service.records[0]
    found = attributes(collector.of_request("a")["request"])
    assert found[Attribute.MODEL] == MODEL
    assert found[Attribute.INPUT_TOKENS] == 100
    assert found[Attribute.OUTPUT_TOKENS] == record.output_tokens == 4
    assert found[Attribute.FINISH_REASONS] == ["length"]
    assert found[Attribute.TTFT_S] == record.first_token_s - record.request.arrival_s
    assert (found[Attribute.CONVERSATION], found[Attribute.TENANT], found[Attribute.PRIORITY]) == (
        "talk",
        "team",
        2,
    )
    assert (found[Attribute.LANE], found[Attribute.OUTCOME]) == ("short", "COMPLETED")
    (of_pass,) = (attributes(span) for span in collector.named("pass"))
    assert of_pass[Attribute.KIND] == "prefill"
    assert of_pass[Attribute.COMPUTED_TOKENS] == of_pass[Attribute.TOKENS] == record.new_tokens
    padding = of_pass[Attribute.EXECUTED_TOKENS] - of_pass[Attribute.COMPUTED_TOKENS]
    assert of_pass[Attribute.PADDING_TOKENS] == padding == 28  # 100 tokens run in the class of 128
    assert of_pass[Attribute.REASON] == record.first_dispatch_reason
    assert of_pass[Attribute.PREDICTED_S] == pytest.approx(of_pass[Attribute.MEASURED_S])
    assert {Attribute.WINDOW_S, Attribute.DEPTH_TOKENS, Attribute.SLACK_S_MIN} <= of_pass.keys()


async def test_the_caller_is_the_parent(collector):
    async with watched(tracing(collector)) as service:
        await finish(service.submit("called", 40, metadata=SAMPLED), service.submit("alone", 40))

    called, alone = (collector.of_request(i)["request"] for i in ("called", "alone"))
    assert (called.trace_id.hex(), called.parent_span_id.hex()) == (TRACE_ID, SPAN_ID)
    assert called.trace_state == "vendor=x"
    assert alone.parent_span_id == b""
    assert alone.trace_id.hex() != TRACE_ID


async def test_ratio_0_exports_nothing_unless_the_caller_asks(collector):
    async with watched(tracing(collector, ratio=0.0)) as service:
        await finish(*(service.submit(f"r{index}", 40) for index in range(5)))
    assert collector.spans == []

    async with watched(tracing(collector, ratio=0.0)) as service:
        await finish(service.submit("r0", 40), service.submit("asked", 40, metadata=SAMPLED))
    (request,) = collector.named("request")
    assert attributes(request)[Attribute.REQUEST_ID] == "asked"
    assert all(links(span) == {request.span_id} for span in collector.named("pass"))


async def test_a_caller_that_does_not_sample_is_obeyed(collector):
    async with watched(tracing(collector)) as service:
        await finish(service.submit("a", 40, metadata=NOT_SAMPLED))
    assert collector.spans == []


async def test_a_traceparent_that_is_none_starts_a_new_trace(collector):
    async with watched(tracing(collector)) as service:
        await finish(service.submit("a", 40, metadata={"traceparent": "00-zz-01"}))
    assert collector.of_request("a")["request"].parent_span_id == b""


async def test_one_token_has_no_decode_and_a_refusal_no_prefill(collector):
    async with watched(tracing(collector)) as service:
        await finish(service.submit("one", 40, max_new_tokens=1), service.submit("huge", 50_000))

    assert collector.of_request("one").keys() == {"request", "queue", "prefill"}
    refused = collector.of_request("huge")
    assert refused.keys() == {"request", "queue"}
    assert refused["request"].status.code == 2
    assert attributes(refused["request"])[Attribute.ERROR_TYPE] == "REJECTED_TOO_LARGE"


async def test_a_pass_that_failed_is_shown_and_so_is_the_one_that_made_good(collector):
    async with watched(tracing(collector), behaviour=Behaviour(faults={1: Fault()})) as service:
        await finish(service.submit("a", 40))

    request = collector.of_request("a")["request"]
    failed, good = sorted(collector.named("pass"), key=lambda span: span.start_time_unix_nano)
    assert (failed.status.code, good.status.code, request.status.code) == (2, 0, 0)
    assert attributes(failed)[Attribute.ERROR_TYPE] == "pass_failed"
    assert links(failed) == links(good) == {request.span_id}
    assert links(collector.of_request("a")["prefill"]) == {failed.span_id, good.span_id}


async def test_nothing_is_kept_of_requests_that_ended(collector):
    faults = Behaviour(faults={2: Fault(), 4: Fault(fatal=True)})
    async with watched(tracing(collector), behaviour=faults) as service:
        handles = [service.submit(f"r{index}", 40 * (index + 1), metadata=SAMPLED) for index in range(6)]
        handles[0].cancel()
        with pytest.raises(ValueError, match="already live"):
            service.submit("r1", 40, metadata=SAMPLED)
        await asyncio.sleep(0.005)
        handles[1].cancel()
        await service.pump.drain(0.1)
    await finish(*handles)
    (observer,) = service.telemetry.observers
    assert (observer._live, observer._passes, observer._callers) == ({}, {}, {})
    assert len(collector.named("request")) == 6


async def test_a_collector_that_is_away_costs_spans_only(monkeypatch):
    monkeypatch.setattr(export, "FLUSH_S_MAX", 0.2)
    with collecting() as gone:
        endpoint = gone.endpoint
    async with watched(TelemetrySettings(enabled=False, otlp_endpoint=endpoint)) as service:
        await finish(service.submit("a", 40))
    assert service.records[0].outcome == "COMPLETED"


async def test_without_an_endpoint_there_are_no_traces():
    async with watched(QUIET) as service:
        await finish(service.submit("a", 40, metadata=SAMPLED))
    assert service.telemetry.observers == ()
