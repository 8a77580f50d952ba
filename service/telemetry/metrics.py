"""Metrics counted where they happen: an observer of the runtime that feeds Prometheus counters.

Children (a metric with its labels filled in) are bound once at the start: an increment of a bound child costs
0.25 us, finding it by label 1 us. What a gauge can tell is not counted here but read from the service at
scrape time (`gauges.py`).

Time to first token, queue wait and target are booked when the first token comes, gaps between tokens as they
arise: an answer of minutes would come too late for an alert. So live records are kept, from `submitted` to
`ended`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as PyCounter
from collections.abc import Iterable, Mapping
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client import Gauge as PrometheusGauge

from engines.types import ItemResult, Pass, PassKind, PassResult, Ran
from service.core.types import Dispatch, Lane, Outcome, Reason
from service.runtime.contract import RequestRecord
from service.telemetry import names
from service.telemetry.names import Metric

K = TypeVar("K", bound=str)


class MetricsObserver:
    """`service.runtime.contract.Observer` that counts into `registry`."""

    def __init__(
        self, registry: CollectorRegistry, model: str, backend: str, t_classes: tuple[int, ...]
    ) -> None:
        # Off: a second series for every series, which nobody reads.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._live: dict[str, RequestRecord] = {}
        self._predicted_s: dict[int, float] = {}  # pass id -> predicted time, of passes on their way
        self._t_classes = t_classes
        lanes, kinds = tuple(Lane), tuple(PassKind)
        self._ttft_s = _histograms(registry, names.TTFT, lanes)
        self._queue_wait_s = _histograms(registry, names.QUEUE_WAIT, lanes)
        self._itl_s = _histogram(registry, names.ITL)
        self._slack_s = _histogram(registry, names.SLACK)
        self._pass_s = _histograms(registry, names.PASS_TIME, kinds)
        self._pass_ratio = _histograms(registry, names.PASS_RATIO, kinds)
        self._pass_tokens = _counters(registry, names.PASS_TOKENS, kinds)
        self._padding_tokens = _counters(registry, names.PADDING, kinds)
        self._prompt_tokens = _counters(registry, names.PROMPT_TOKENS, (names.COMPUTED, names.REUSED))
        self._decode_tokens = _counter(registry, names.DECODE_TOKENS)
        classes = (*(str(edge) for edge in t_classes), names.OVER)
        self._t_class_hits = tuple(_counters(registry, names.T_CLASS_HITS, classes).values())
        verdicts = (names.AS_PLANNED, names.MERGED, names.SPLIT)
        self._fidelity = _counters(registry, names.BATCH_FIDELITY, verdicts)
        self._targets = _targets(registry)
        self._dispatches = _counter(registry, names.DISPATCHES)
        self._passes_lost = _counter(registry, names.PASSES_LOST)
        info = PrometheusGauge(names.INFO.name, names.INFO.meaning, names.INFO.labels, registry=registry)
        info.labels(model, backend).set(1)

    # --- service.runtime.contract.Observer ---

    def submitted(self, record: RequestRecord) -> None:
        self._live[record.request.request_id] = record

    def dispatched(self, command: Dispatch, now_s: float) -> None:
        numbers = command.numbers
        self._predicted_s[command.pass_.pass_id] = numbers.predicted_s
        self._dispatches.labels(command.pass_.kind.value, command.reason.value).inc()
        if numbers.slack_s_min is not None:
            self._slack_s.observe(numbers.slack_s_min)

    def pass_finished(self, pass_: Pass, result: PassResult, start_s: float, end_s: float) -> None:
        kind = result.kind
        self._pass_s[kind].observe(result.elapsed_s)
        predicted_s = self._predicted_s.pop(result.pass_id, 0.0)
        if predicted_s > 0.0:
            self._pass_ratio[kind].observe(result.elapsed_s / predicted_s)
        computed = sum(item.computed for item in result.items)
        self._pass_tokens[kind].inc(computed)
        self._padding_tokens[kind].inc(max(0, result.executed_tokens - computed))
        if kind is PassKind.PREFILL:
            self._prefilled(pass_, result)
        self._answered(result.items)

    def pass_lost(self, pass_: Pass, reason: Reason, detail: str, start_s: float, end_s: float) -> None:
        self._predicted_s.pop(pass_.pass_id, None)
        self._passes_lost.labels(reason.value).inc()

    def ended(self, record: RequestRecord) -> None:
        self._live.pop(record.request.request_id, None)
        if record.first_token_s is not None or record.end_s is None:
            return
        if record.lane is not None:
            start_s = record.end_s if record.first_pass_start_s is None else record.first_pass_start_s
            self._queue_wait_s[record.lane].observe(start_s - record.request.arrival_s)
        if record.outcome is not Outcome.CANCELLED and not record.request.deadline_free:
            self._targets[record.lane, names.MISSED].inc()

    # --- what passes did ---

    def _prefilled(self, pass_: Pass, result: PassResult) -> None:
        prompts = result.items[: len(pass_.items)]  # what decodes beside them follows
        computed = sum(item.computed for item in prompts)
        self._t_class_hits[bisect_left(self._t_classes, result.executed_tokens)].inc()
        self._prompt_tokens[names.COMPUTED].inc(computed)
        self._prompt_tokens[names.REUSED].inc(sum(item.reused for item in prompts))
        if result.ran is not None:
            self._fidelity[_fidelity(result.ran, computed)].inc()

    def _answered(self, items: Iterable[ItemResult]) -> None:
        later: PyCounter[str] = PyCounter()  # tokens after the first, by request
        for item in items:
            record = self._live.get(item.request_id)
            if item.token is None:
                continue
            if record is not None and item.position <= record.request.prompt_tokens:
                self._first_token(record)
            else:
                later[item.request_id] += 1
        self._decode_tokens.inc(later.total())
        for request_id, tokens in later.items():
            record = self._live.get(request_id)
            for gap_s in record.itl_s[-tokens:] if record is not None else ():
                self._itl_s.observe(gap_s)

    def _first_token(self, record: RequestRecord) -> None:
        lane, arrival_s = record.lane, record.request.arrival_s
        if lane is None or record.first_token_s is None or record.first_pass_start_s is None:
            return
        self._queue_wait_s[lane].observe(record.first_pass_start_s - arrival_s)
        self._ttft_s[lane].observe(record.first_token_s - arrival_s)
        if record.target_met is not None:
            self._targets[lane, names.MET if record.target_met else names.MISSED].inc()


def _fidelity(ran: Ran, computed: int) -> str:
    """How what the engine says that it ran compares with the prompt tokens of the pass."""
    if ran.iterations > 1:
        return names.SPLIT
    return names.MERGED if ran.tokens > computed else names.AS_PLANNED


def _counter(registry: CollectorRegistry, metric: Metric) -> Counter:
    return Counter(metric.name, metric.meaning, metric.labels, registry=registry)


def _histogram(registry: CollectorRegistry, metric: Metric) -> Histogram:
    return Histogram(metric.name, metric.meaning, metric.labels, registry=registry, buckets=metric.buckets)


def _counters(registry: CollectorRegistry, metric: Metric, values: Iterable[K]) -> Mapping[K, Counter]:
    family = _counter(registry, metric)
    return {value: family.labels(str(value)) for value in values}


def _histograms(registry: CollectorRegistry, metric: Metric, values: Iterable[K]) -> Mapping[K, Histogram]:
    family = _histogram(registry, metric)
    return {value: family.labels(str(value)) for value in values}


def _targets(registry: CollectorRegistry) -> Mapping[tuple[Lane | None, str], Counter]:
    """By (lane, result); without a lane a request was refused at the door, which always misses."""
    family = _counter(registry, names.TARGETS)
    bound: dict[tuple[Lane | None, str], Counter] = {
        (lane, result): family.labels(lane.value, result)
        for lane in Lane
        for result in (names.MET, names.MISSED)
    }
    bound[None, names.MISSED] = family.labels(names.NO_LANE, names.MISSED)
    return bound
