"""Traces across the processes of a fleet: one request is one trace, from its client to the workers.

    frontend (SERVER, child of the caller's traceparent)         front end
      request > queue, prefill (linked to its passes), decode    scheduler, as in one process (`traces`)
        execute                                                  worker, one for each prefill pass

The context goes with the messages, in W3C form and by OpenTelemetry's propagator: with each request to the
scheduler (a stream carries many, so call metadata would not do), and to a worker with the pass that brings
the request there. The front end decides what is sampled, and its decision goes with the context, so nothing
is sampled in parts.

Times are the event loop's, brought to Unix time once at the start of each process: spans of two machines are
as far apart as their clocks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, get_current_span
from opentelemetry.trace.propagation import set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from engines.types import Pass, PassKind, PassResult
from service.core.types import Dispatch, Outcome, Reason
from service.runtime.contract import RequestRecord
from service.telemetry import fleet_names as names
from service.telemetry.names import NO_LANE, Attribute
from service.telemetry.traces import CALLERS_MAX, NOT_FAILED

Carrier = dict[str, str]

_PROPAGATOR = TraceContextTextMapPropagator()


def carrier_of(span: Span) -> Carrier:
    """The context of a span, as it is sent."""
    carrier: Carrier = {}
    _PROPAGATOR.inject(carrier, set_span_in_context(span, Context()))
    return carrier


class FrontEndTraces:
    """`service.runtime.contract.Observer` of a front end: one span a request, and the context to send on."""

    def __init__(self, tracer: Tracer, loop_time_s: float) -> None:
        """`loop_time_s`: the event loop's clock now."""
        self._tracer = tracer
        self._offset_ns = time.time_ns() - round(loop_time_s * 1e9)
        self._callers: dict[str, Context] = {}
        self._live: dict[str, tuple[Span, int]] = {}  # request id -> its span, and how often it was sent

    def called(self, request_id: str, metadata: Mapping[str, str]) -> None:
        """The metadata of the call that will submit `request_id`."""
        if "traceparent" not in metadata:
            self._callers.pop(request_id, None)
            return
        if len(self._callers) >= CALLERS_MAX:  # calls that never came to a submit
            del self._callers[next(iter(self._callers))]
        self._callers[request_id] = _PROPAGATOR.extract(dict(metadata), Context())

    def carrier(self, request_id: str) -> Carrier:
        """To be sent with the request, each time that it is."""
        live = self._live.get(request_id)
        if live is None:
            return {}
        span, sent = live
        self._live[request_id] = span, sent + 1
        if sent:
            span.add_event(names.EVENT_SENT_AGAIN)
        return carrier_of(span)

    # --- service.runtime.contract.Observer ---

    def submitted(self, record: RequestRecord) -> None:
        request_id, arrival_s = record.request.request_id, record.request.arrival_s
        caller = self._callers.pop(request_id, Context())
        span = self._tracer.start_span(
            names.SPAN_FRONT_END, caller, SpanKind.SERVER, start_time=self._unix_ns(arrival_s)
        )
        self._live[request_id] = span, 0

    def dispatched(self, command: Dispatch, now_s: float) -> None: ...

    def pass_finished(self, pass_: Pass, result: PassResult, start_s: float, end_s: float) -> None: ...

    def pass_lost(self, pass_: Pass, reason: Reason, detail: str, start_s: float, end_s: float) -> None: ...

    def ended(self, record: RequestRecord) -> None:
        request = record.request
        self._callers.pop(request.request_id, None)
        span, sent = self._live.pop(request.request_id, (None, 0))
        if span is None or record.end_s is None:
            return
        if span.is_recording():
            span.set_attributes(
                {
                    Attribute.REQUEST_ID: request.request_id,
                    Attribute.INPUT_TOKENS: request.prompt_tokens,
                    Attribute.OUTPUT_TOKENS: record.output_tokens,
                    Attribute.LANE: record.lane.value if record.lane is not None else NO_LANE,
                    names.TRIES: sent,
                }
            )
            if record.first_token_s is not None:
                span.set_attribute(Attribute.TTFT_S, record.first_token_s - request.arrival_s)
            _note_outcome(span, record.outcome, record.detail)
        span.end(self._unix_ns(record.end_s))

    def _unix_ns(self, time_s: float) -> int:
        return self._offset_ns + round(time_s * 1e9)


class WorkerTraces:
    """`service.fleet.worker_watch.WorkerObserver` that makes spans of sampled requests."""

    def __init__(self, tracer: Tracer, instance_id: str, loop_time_s: float) -> None:
        """`loop_time_s`: the event loop's clock now."""
        self._tracer = tracer
        self._instance_id = instance_id
        self._offset_ns = time.time_ns() - round(loop_time_s * 1e9)
        self._live: dict[str, Context] = {}

    def brought(self, request_id: str, carrier: Mapping[str, str]) -> None:
        if carrier:
            context = _PROPAGATOR.extract(dict(carrier), Context())
            if get_current_span(context).get_span_context().trace_flags.sampled:
                self._live[request_id] = context

    def left(self, request_id: str) -> None:
        self._live.pop(request_id, None)

    def ran(self, pass_: Pass, result: PassResult, start_s: float, end_s: float) -> None:
        if not self._live or pass_.kind is not PassKind.PREFILL:
            return
        computed = {item.request_id: item.computed for item in result.items}
        for span, request_id in self._spans(pass_, start_s):
            span.set_attributes(
                {
                    Attribute.COMPUTED_TOKENS: computed.get(request_id, 0),
                    Attribute.EXECUTED_TOKENS: result.executed_tokens,
                    Attribute.MEASURED_S: result.elapsed_s,
                }
            )
            span.end(self._unix_ns(end_s))

    def failed(self, pass_: Pass, error: str, start_s: float, end_s: float) -> None:
        if not self._live or pass_.kind is not PassKind.PREFILL:
            return
        for span, _ in self._spans(pass_, start_s):
            span.set_attribute(Attribute.ERROR_TYPE, Reason.PASS_FAILED.value)
            span.set_status(Status(StatusCode.ERROR, error or None))
            span.end(self._unix_ns(end_s))

    def _spans(self, pass_: Pass, start_s: float) -> list[tuple[Span, str]]:
        made = []
        for item in pass_.items:
            context = self._live.get(item.request_id)
            if context is not None:
                span = self._tracer.start_span(
                    names.SPAN_EXECUTE,
                    context,
                    attributes={
                        Attribute.PASS_ID: pass_.pass_id,
                        Attribute.INSTANCE: self._instance_id,
                        Attribute.REQUESTS: len(pass_.items),
                        Attribute.TOKENS: item.new_tokens,
                    },
                    start_time=self._unix_ns(start_s),
                )
                made.append((span, item.request_id))
        return made

    def _unix_ns(self, time_s: float) -> int:
        return self._offset_ns + round(time_s * 1e9)


def _note_outcome(span: Span, outcome: Outcome | None, detail: str) -> None:
    if outcome is None:
        return
    span.set_attribute(Attribute.OUTCOME, outcome.value)
    if outcome not in NOT_FAILED:
        span.set_attribute(Attribute.ERROR_TYPE, outcome.value)
        span.set_status(Status(StatusCode.ERROR, detail or None))
