"""Traces: what happened to one request, made by hand from its record when it is over.

    request (SERVER, child of the caller's traceparent)
      queue     arrival .. start of its first pass (or its end)
      prefill   .. its first token; linked to every pass that computed its prompt
      decode    .. its end
    pass        one prefill pass, a trace of its own, linked to all its sampled requests

The stock gRPC interceptor opens and closes spans inside the call and halves the throughput; these are made
with explicit times, once, after the answer. Decode steps get no span: there are as many as tokens, and their
times are in the metrics.

Times are seconds of the event loop's clock, brought to Unix time by one offset taken at the start. A wall
clock that is set later moves no span: durations and order stay true.

A request that the sampler leaves out is not kept at all. A pass has a span if one of its requests has one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation import set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from engines.types import FinishReason, Pass, PassKind, PassResult
from service.core.types import Dispatch, Outcome, Reason
from service.runtime.contract import RequestRecord
from service.telemetry import names
from service.telemetry.names import Attribute

CALLERS_MAX = 1024  # trace contexts of requests that are on their way to the scheduler

Attributes = dict[str, AttributeValue]

_TRACEPARENT = "traceparent"
_PROPAGATOR = TraceContextTextMapPropagator()
NOT_FAILED = (Outcome.COMPLETED, Outcome.CANCELLED)


@dataclass(slots=True)
class _Traced:
    """A sampled request that lives: its open span, and the passes that it was in."""

    span: Span
    passes: list[SpanContext] = field(default_factory=list)


class TraceObserver:
    """`service.runtime.contract.Observer` that makes spans. Keeps sampled requests only."""

    def __init__(self, tracer: Tracer, model: str, backend: str, loop_time_s: float) -> None:
        """`loop_time_s`: the event loop's clock now."""
        self._tracer = tracer
        self._model = model
        self._backend = backend
        self._offset_ns = time.time_ns() - round(loop_time_s * 1e9)
        self._callers: dict[str, Context] = {}  # request id -> incoming trace context
        self._live: dict[str, _Traced] = {}
        self._passes: dict[int, tuple[Dispatch, list[_Traced]]] = {}  # prefill passes on their way

    def called(self, request_id: str, metadata: Mapping[str, str]) -> None:
        """The metadata of the call that will submit `request_id`: traceparent and tracestate."""
        if _TRACEPARENT not in metadata:
            self._callers.pop(request_id, None)
            return
        if len(self._callers) >= CALLERS_MAX:  # calls that never came to a submit
            del self._callers[next(iter(self._callers))]
        self._callers[request_id] = _PROPAGATOR.extract(dict(metadata), Context())

    def span_of(self, request_id: str) -> Span | None:
        """Of a sampled request that lives."""
        traced = self._live.get(request_id)
        return traced.span if traced is not None else None

    # --- service.runtime.contract.Observer ---

    def submitted(self, record: RequestRecord) -> None:
        request_id = record.request.request_id
        span = self._tracer.start_span(
            names.SPAN_REQUEST,
            self._callers.pop(request_id, Context()),
            SpanKind.SERVER,
            start_time=self._unix_ns(record.request.arrival_s),
        )
        if span.is_recording():
            self._live[request_id] = _Traced(span)

    def dispatched(self, command: Dispatch, now_s: float) -> None:
        if command.pass_.kind is not PassKind.PREFILL:
            return
        ids = (item.request_id for item in command.pass_.items)
        traced = [self._live[request_id] for request_id in ids if request_id in self._live]
        if traced:
            self._passes[command.pass_.pass_id] = command, traced

    def pass_finished(self, pass_: Pass, result: PassResult, start_s: float, end_s: float) -> None:
        sent = self._passes.pop(pass_.pass_id, None)
        if sent is not None:
            span = self._pass_span(*sent, start_s)
            computed = sum(item.computed for item in result.items)
            span.set_attributes(
                {
                    Attribute.COMPUTED_TOKENS: computed,
                    Attribute.EXECUTED_TOKENS: result.executed_tokens,
                    Attribute.PADDING_TOKENS: max(0, result.executed_tokens - computed),
                    Attribute.MEASURED_S: result.elapsed_s,
                }
            )
            span.end(self._unix_ns(end_s))

    def pass_lost(self, pass_: Pass, reason: Reason, detail: str, start_s: float, end_s: float) -> None:
        sent = self._passes.pop(pass_.pass_id, None)
        if sent is None or reason is Reason.URGENT_ARRIVAL:
            return  # revoked before it started: there was no pass
        span = self._pass_span(*sent, start_s)
        span.set_attribute(Attribute.ERROR_TYPE, reason.value)
        span.set_status(Status(StatusCode.ERROR, detail or None))
        span.end(self._unix_ns(end_s))

    def ended(self, record: RequestRecord) -> None:
        self._callers.pop(record.request.request_id, None)  # a call refused because this one was live
        traced = self._live.pop(record.request.request_id, None)
        if traced is None or record.end_s is None:
            return
        span = traced.span
        self._phases(record, record.end_s, traced)
        span.set_attributes(_request_attributes(record, self._model, self._backend))
        if record.outcome is not None and record.outcome not in NOT_FAILED:
            span.set_attribute(Attribute.ERROR_TYPE, record.outcome.value)
            span.set_status(Status(StatusCode.ERROR, record.detail or None))
        span.end(self._unix_ns(record.end_s))

    # --- spans ---

    def _phases(self, record: RequestRecord, end_s: float, traced: _Traced) -> None:
        parent = set_span_in_context(traced.span, Context())
        start_s, token_s = record.first_pass_start_s, record.first_token_s
        arrival_s = record.request.arrival_s
        reason = record.first_dispatch_reason
        why: Attributes = {Attribute.REASON: reason.value} if reason is not None else {}
        self._phase(names.SPAN_QUEUE, parent, arrival_s, end_s if start_s is None else start_s, why)
        if start_s is None:
            return
        links = [Link(context) for context in traced.passes]
        passes: Attributes = {Attribute.PASSES: len(links), Attribute.NEW_TOKENS: record.new_tokens}
        prefill_end_s = end_s if token_s is None else token_s
        self._phase(names.SPAN_PREFILL, parent, start_s, prefill_end_s, passes, links)
        only_token = record.output_tokens == 1 and record.finish is not None
        if token_s is not None and not only_token:
            decode: Attributes = {
                Attribute.OUTPUT_TOKENS: record.output_tokens,
                Attribute.ITL_S_MAX: max(record.itl_s, default=0.0),
            }
            self._phase(names.SPAN_DECODE, parent, token_s, end_s, decode)

    def _phase(
        self,
        name: str,
        parent: Context,
        start_s: float,
        end_s: float,
        attributes: Attributes,
        links: Sequence[Link] = (),
    ) -> None:
        span = self._tracer.start_span(
            name, parent, attributes=attributes, links=links, start_time=self._unix_ns(start_s)
        )
        span.end(self._unix_ns(end_s))

    def _pass_span(self, command: Dispatch, traced: list[_Traced], start_s: float) -> Span:
        """Open, and known to its requests."""
        span = self._tracer.start_span(
            names.SPAN_PASS,
            Context(),
            attributes=_pass_attributes(command),
            links=[Link(one.span.get_span_context()) for one in traced],
            start_time=self._unix_ns(start_s),
        )
        for one in traced:
            one.passes.append(span.get_span_context())
        return span

    def _unix_ns(self, time_s: float) -> int:
        return self._offset_ns + round(time_s * 1e9)


def _request_attributes(record: RequestRecord, model: str, backend: str) -> Attributes:
    request = record.request
    attributes: dict[str, AttributeValue | None] = {
        Attribute.OPERATION: "text_completion",
        Attribute.PROVIDER: "plaserve",
        Attribute.MODEL: model,
        Attribute.MAX_TOKENS: request.max_new_tokens,
        Attribute.INPUT_TOKENS: request.prompt_tokens,
        Attribute.CACHED_TOKENS: record.history_tokens,
        Attribute.OUTPUT_TOKENS: record.output_tokens,
        Attribute.FINISH_REASONS: _finish_reasons(record),
        Attribute.CONVERSATION: request.session or None,
        Attribute.REQUEST_ID: request.request_id,
        Attribute.BACKEND: backend,
        Attribute.LANE: record.lane.value if record.lane is not None else names.NO_LANE,
        Attribute.TENANT: request.tenant or None,
        Attribute.PRIORITY: request.priority,
        Attribute.NEW_TOKENS: record.new_tokens,
        Attribute.TARGET_S: record.ttft_target_s,
        Attribute.TARGET_MET: record.target_met,
        Attribute.OUTCOME: record.outcome.value if record.outcome is not None else None,
        Attribute.REASON: record.reason.value if record.reason is not None else None,
    }
    if record.first_token_s is not None:
        attributes[Attribute.TTFT_S] = record.first_token_s - request.arrival_s
    return {name: value for name, value in attributes.items() if value is not None}


def _finish_reasons(record: RequestRecord) -> tuple[str] | None:
    if record.finish is not None:
        return (record.finish.value,)
    stop_text = record.outcome is Outcome.COMPLETED  # the front end saw it and ended the request
    return (FinishReason.STOP.value,) if stop_text else None


def _pass_attributes(command: Dispatch) -> Attributes:
    pass_, numbers = command.pass_, command.numbers
    attributes: Attributes = {
        Attribute.PASS_ID: pass_.pass_id,
        Attribute.INSTANCE: command.instance_id,
        Attribute.KIND: pass_.kind.value,
        Attribute.STAGED: command.staged,
        Attribute.REASON: command.reason.value,
        Attribute.REQUESTS: len(pass_.items),
        Attribute.TOKENS: pass_.tokens,
        Attribute.PREDICTED_S: numbers.predicted_s,
        Attribute.WINDOW_S: numbers.window_s,
        Attribute.DEPTH_TOKENS: numbers.depth_tokens,
        Attribute.QUEUED_SHORT_TOKENS: numbers.queued_short_tokens,
        Attribute.QUEUED_LONG_TOKENS: numbers.queued_long_tokens,
    }
    if numbers.slack_s_min is not None:
        attributes[Attribute.SLACK_S_MIN] = numbers.slack_s_min
    return attributes
