"""`plaserve simulate`: policies side by side on the same requests, at one rate.

A question is a `Case` with one rate and a window of a given length; everything else is the lab's own run. The
metric is not scored here (goodput needs a search over rates), so the window may be short: the figures say
what happened at this rate, no more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from service.core.types import Lane
from service.sim.case import Case, Limits
from service.sim.exhibits.exhibit import Plot, Series
from service.sim.figures import MetricSettings, PointFigures
from service.sim.hand_over import HandOverFigures, HandOvers, HandOverSettings
from service.sim.lengths import TOKENS_MAX
from service.sim.point import run_with_records
from service.sim.result import SimResult
from service.sim.run_length import Load
from service.sim.sources import recorded_rate_per_s
from service.sim.traces import KNOWN_TRACES
from service.sim.workload_spec import SESSION_SETS, Arrivals, WorkloadSpec

__all__ = ["Answer", "ask", "curve_plots", "question", "rate_for", "workload_of"]

LOAD_DEFAULT = 0.7  # of capacity, where no rate is recorded
CURVE_POINTS = 200


@dataclass(frozen=True, slots=True)
class Answer:
    """hand_over: where the question was to hand KV over."""

    policy: str
    figures: PointFigures
    result: SimResult
    hand_over: HandOverFigures | None = None


def workload_of(
    text: str,
    *,
    arrivals: str | None = None,
    cv: float = 1.0,
    concurrency: int = 0,
    output_tokens: int | None = 1,
    prompt_tokens_max: int | None = None,
) -> WorkloadSpec:
    """From `name` or `name:share,name:share`; names are length sets, known traces, or paths.

    arrivals None: as recorded for one trace, closed with a concurrency, else Poisson.
    """
    parts = []
    for piece in text.split(","):
        name, colon, share = piece.rpartition(":")
        try:
            parts.append((name, float(share)) if colon else (piece, 1.0))
        except ValueError:
            raise ValueError(f"--trace: {piece!r} is not name:share with a number for the share") from None
    if arrivals is None:
        arrivals = _arrivals_for(tuple(name for name, _ in parts), concurrency)
    return WorkloadSpec(
        parts=tuple(parts),
        arrivals=arrivals,
        cv=cv,
        concurrency=concurrency,
        output_tokens=output_tokens,
        prompt_tokens_max=prompt_tokens_max or TOKENS_MAX,
    )


def _arrivals_for(names: Sequence[str], concurrency: int) -> str:
    if names[0] in SESSION_SETS:
        return Arrivals.SESSIONS
    if concurrency:
        return Arrivals.CLOSED
    recorded = len(names) == 1 and (names[0] in KNOWN_TRACES or "." in names[0])
    return Arrivals.RECORDED if recorded else Arrivals.POISSON


def question(
    workload: WorkloadSpec,
    *,
    model: str,
    engine: str = "packed",
    instances: int = 1,
    link_s: float = 0.0,
    targets: tuple[float, float, float] = (0.4, 3.0, 0.2),
    seed: int = 1,
    settings: Mapping[str, float | str] | None = None,
) -> Case:
    """targets: (short_s, long_factor, long_offset_s) of DESIGN 9. Raises ValueError naming what is wrong."""
    short_s, factor, offset_s = targets
    return Case(
        name="simulate",
        workload=workload,
        model=model,
        instances=instances,
        engine=engine,
        link_s=link_s,
        seeds=(seed,),
        tuning_seed=seed + 1,
        short_target_s=short_s,
        long_target_factor=factor,
        long_target_offset_s=offset_s,
        limits=Limits(requests_max=100_000_000),
        settings=settings or {},
    )


def metric_for(seconds: float) -> MetricSettings:
    """Anything may be looked at: a window of at least `seconds`, whatever lanes it then has."""
    return MetricSettings(window_s_min=seconds, window_targets_min=1e-6, lane_requests_min=20)


def rate_for(
    case: Case, load: Load, *, rate_per_s: float | None, rate_scale: float | None, load_ratio: float | None
) -> float | None:
    """Requests a second: as given, times what was recorded, or a share of capacity; None in a closed loop."""
    given = [value for value in (rate_per_s, rate_scale, load_ratio) if value is not None]
    if len(given) > 1:
        raise ValueError("give one of --rate, --rate-scale and --load")
    if given and given[0] <= 0.0:
        raise ValueError(f"the rate must be above 0, got {given[0]}")
    if case.closed:
        if given:
            raise ValueError("a closed loop sets its own pace: leave --rate, --rate-scale and --load out")
        return None
    if rate_per_s is not None:
        return rate_per_s
    if load_ratio is None and case.workload.arrivals is Arrivals.RECORDED:
        return recorded_rate_per_s(case.workload) * (rate_scale or 1.0)
    if rate_scale is not None:
        raise ValueError("--rate-scale: only recorded arrivals have a rate to scale; give --rate or --load")
    return load.capacity_per_s * (LOAD_DEFAULT if load_ratio is None else load_ratio)


def ask(
    case: Case,
    policies: Sequence[str],
    rate_per_s: float | None,
    load: Load,
    done: Callable[[str], None] = lambda policy: None,
    *,
    log_of: str | None = None,
    hand_over: HandOverSettings | None = None,
) -> list[Answer]:
    """Run every policy on the same requests; the run of `log_of` keeps its log.

    hand_over: KV goes to a decode side, and requests end with their first token.
    Raises ValueError for a rate far beyond capacity.
    """
    seed = case.seeds[0]
    answers = []
    for policy in policies:
        hand_overs = None if hand_over is None else HandOvers(hand_over)
        figures, result = run_with_records(
            case,
            policy,
            rate_per_s,
            seed,
            load.metric,
            load=load,
            keep_log=policy == log_of,
            hand_overs=hand_overs,
        )
        if result is None:
            raise ValueError(
                f"{rate_per_s:.4g} requests/s is above {load.rate_max_per_s:.4g}, more than these instances "
                "can do by any policy; add instances or lower the rate"
            )
        handed = None if hand_overs is None else hand_overs.figures()
        answers.append(Answer(policy, figures, result, handed))
        done(policy)
    return answers


def curve_plots(answers: Sequence[Answer]) -> tuple[Plot, ...]:
    """Of each lane: the share of requests whose first token came within x seconds."""
    plots = []
    for lane in Lane:
        series = [s for answer in answers if (s := _curve(answer, lane)) is not None]
        if series:
            title = f"First token within so many seconds, {lane} lane (simulated)"
            plots.append(
                Plot(f"ttft_{lane}", title, "TTFT, s", "share of arrivals", tuple(series), x_log=True)
            )
    return tuple(plots)


def _curve(answer: Answer, lane: Lane) -> Series | None:
    seen = [r for r in answer.result.records.values() if r.lane is lane]
    times = sorted(r.ttft_s for r in seen if r.ttft_s is not None and r.ttft_s > 0.0)
    if not times:
        return None
    count = min(CURVE_POINTS, len(times))
    ranks = [(n + 1) * len(times) // count for n in range(count)]
    x = tuple(times[rank - 1] for rank in ranks)
    return Series(answer.policy, x, tuple(rank / len(seen) for rank in ranks))
