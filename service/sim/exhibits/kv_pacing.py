"""The KV burst at hand-over: what makes it, and what pacing it costs (open problem D2 of the LAPS talk).

Prefill instances run `plaserve`; each has a link to the decode side (`service.sim.hand_over`). A prompt is
handed over at its end or streamed by chunk, in order of arrival or of need (`service.core.kv_link`), at a
budget that is a share of the link. KV bytes a token follow from the model's shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engines.models import load_model
from engines.simulated_settings import engine_setting
from service.core.kv_link import KvLink, LinkSettings, peak_bytes_per_s
from service.sim.exhibits.exhibit import Cell, Exhibit, Kind, Plot, Series, Table
from service.sim.exhibits.runs import Scene, play
from service.sim.hand_over import HandOvers, HandOverSettings, kv_bytes
from service.sim.result import SimResult
from service.sim.sources import WorkloadSpec, mean_tokens
from service.sim.workload import REPORT_SHORT_TOKENS

CHAT = WorkloadSpec(parts=(("lmsys_chat_1m", 1.0),))
MIX = WorkloadSpec(parts=(("lmsys_chat_1m", 0.95), ("rag", 0.05)))
INSTANCES = 4
LOAD = 0.8  # of the saturated token rate
REQUESTS = 2000
SEEDS = (1, 2, 3)
WINDOWS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
BUDGETS = (1.0, 0.7, 0.5, 0.35, 0.25, 0.2)
DEFAULT = LinkSettings(1.0).budget_ratio
TALK = (
    "LAPS talk, D2: prompts gathered in a window finish together, so their KV leaves at once. InfiniBand "
    "absorbs it; without, it may saturate the network, the more the larger W. Left open."
)


@dataclass(frozen=True, slots=True)
class Way:
    """How KV leaves."""

    name: str
    streamed: bool
    stretch: float


WHOLE = Way("whole, by arrival", streamed=False, stretch=0.0)
WHOLE_NEED = Way("whole, by need", streamed=False, stretch=1.0)
STREAMED = Way("chunks, by arrival", streamed=True, stretch=0.0)
OURS = Way("chunks, by need", streamed=True, stretch=LinkSettings(1.0).stretch)
SMALLEST = Way("chunks, smallest first", streamed=True, stretch=1e6)
WAYS = (WHOLE, WHOLE_NEED, STREAMED, OURS)


@dataclass(frozen=True, slots=True)
class Place:
    """gbit: of the link of each instance, Gbit/s. shared: all use one of as much as theirs together."""

    model: str
    gbit: float
    shared: bool = False

    @property
    def label(self) -> str:
        link = f"{INSTANCES} x {self.gbit:g} shared" if self.shared else f"{self.gbit:g}"
        return f"{self.model}, {link} Gbit/s"

    @property
    def bytes_per_s(self) -> float:
        return self.gbit * 1e9 / 8.0


DRAWN = Place("qwen3-32b", 100.0)
# What is in the table beside every way on the drawn link: way and budget.
OTHERS: tuple[tuple[Place, Way, float], ...] = (
    (DRAWN, SMALLEST, DEFAULT),
    (Place("qwen3-32b", 100.0, shared=True), OURS, DEFAULT),
    *(
        (place, way, budget)
        for place in (Place("qwen3-32b", 400.0), Place("llama-3.1-8b", 100.0), Place("qwen3-32b", 25.0))
        for way, budget in ((WHOLE, 1.0), (OURS, 1.0), (OURS, DEFAULT))
    ),
)


@dataclass(frozen=True, slots=True)
class Found:
    """All seeds together. Seconds; bytes and bytes a second of an instance's share of the links, peaks and
    held bytes as means over the seeds."""

    short_s: NDArray[np.float64]  # from first token to decode
    long_s: NDArray[np.float64]
    ttft_s: NDArray[np.float64]
    mean_rate: float
    peaks: Mapping[float, float]  # by window
    p99s: Mapping[float, float]
    held_mean: float
    held_max: float
    expired_ratio: float

    @property
    def delay_s(self) -> float:
        return float(np.concatenate([self.short_s, self.long_s]).mean())


def kv_pacing() -> Exhibit:
    found = {(DRAWN, way, budget): _found(DRAWN, way, budget) for way in WAYS for budget in BUDGETS}
    for place, way, budget in OTHERS:
        found[place, way, budget] = _found(place, way, budget)
    shown = [(DRAWN, way, budget) for way in WAYS for budget in (1.0, DEFAULT, 0.25)] + list(OTHERS)
    columns = (
        *("link", "KV leaves", "budget", "mean rate %", "short ms", "short p99", "long ms", "long p99"),
        *("peak 100 ms %", "held MB", "held max MB", "expired %"),
    )
    return Exhibit(
        "kv_pacing",
        "Hand-over of KV: what pacing the burst costs",
        Kind.SIMULATED,
        TALK,
        Table(columns, tuple(_row(key, found[key]) for key in shown)),
        " ".join(_reading(found)),
        (_trade_off(found), _over_windows(found)),
    )


def _found(place: Place, way: Way, budget: float) -> Found:
    runs = [_run(place, way, budget, seed) for seed in SEEDS]
    handed = [each for _, hand_overs in runs for each in hand_overs.done]
    delays = np.array([each.delay_s for each in handed])
    short = np.array([each.request.prompt_tokens <= REPORT_SHORT_TOKENS for each in handed])
    links = [link for _, hand_overs in runs for link in hand_overs.links]
    sharing = INSTANCES if place.shared else 1
    carried = sum(link.bytes_carried for link in links)
    return Found(
        short_s=delays[short],
        long_s=delays[~short],
        ttft_s=np.array([r.ttft_s for result, _ in runs for r in result.records.values()]),
        mean_rate=carried / sum(result.end_s for result, _ in runs) / INSTANCES,
        peaks={w: _mean(_peak(h.links, w) / sharing for _, h in runs) for w in WINDOWS_S},
        p99s={
            w: _p99([window_rates(n, w, r.end_s) for r, h in runs for n in h.links]) / sharing
            for w in WINDOWS_S
        },
        held_mean=_mean(h.held_byte_s / r.end_s for r, h in runs) / INSTANCES,
        held_max=_mean(float(h.held_bytes_max) for _, h in runs) / INSTANCES,
        expired_ratio=sum(h.expired for _, h in runs) / sum(r.submitted for r, _ in runs),
    )


def _run(place: Place, way: Way, budget: float, seed: int) -> tuple[SimResult, HandOvers]:
    known = load_model(place.model)
    setting = engine_setting(known, "packed")
    rate_per_s = LOAD * INSTANCES * 4096.0 / setting[2].request_s(4096) / mean_tokens(MIX)[0]
    scene = Scene(MIX, setting, INSTANCES, rate_per_s=rate_per_s, requests_max=REQUESTS, seed=seed)
    link = LinkSettings(place.bytes_per_s * (INSTANCES if place.shared else 1), budget, way.stretch)
    hand_overs = HandOvers(HandOverSettings(link, kv_bytes(place.model), way.streamed, place.shared))
    return play(scene, "plaserve", hand_overs=hand_overs), hand_overs


def _mean(values: Iterator[float]) -> float:
    return float(np.mean(list(values)))


def _peak(links: Sequence[KvLink], over_s: float) -> float:
    return max(peak_bytes_per_s(link, over_s) for link in links)


def window_rates(link: KvLink, over_s: float, end_s: float) -> NDArray[np.float64]:
    """Bytes a second in stretches that follow each other."""
    busy = np.array(link.busy)
    carried_s = np.cumsum(busy[:, 1] - busy[:, 0])
    moments, carrying_s = np.zeros(1 + busy.size), np.zeros(1 + busy.size)
    moments[1:] = busy.ravel()
    carrying_s[2::2], carrying_s[3::2] = carried_s, carried_s[:-1]
    edges = np.arange(0.0, end_s + over_s, over_s)
    shares: NDArray[np.float64] = np.diff(np.interp(edges, moments, carrying_s)) / over_s
    return shares * link.settings.pull_bytes_per_s


def _p99(rates: Sequence[NDArray[np.float64]]) -> float:
    return float(np.quantile(np.concatenate(rates), 0.99))


Key = tuple[Place, Way, float]


def _row(key: Key, found: Found) -> tuple[Cell, ...]:
    place, way, budget = key

    def share(rate: float) -> float:
        return 100.0 * rate / place.bytes_per_s

    return (
        place.label,
        way.name,
        budget,
        share(found.mean_rate),
        1e3 * float(found.short_s.mean()),
        1e3 * float(np.quantile(found.short_s, 0.99)),
        1e3 * float(found.long_s.mean()),
        1e3 * float(np.quantile(found.long_s, 0.99)),
        share(found.peaks[0.1]),
        found.held_mean / 1e6,
        found.held_max / 1e6,
        100.0 * found.expired_ratio,
    )


def _reading(found: Mapping[Key, Found]) -> Iterator[str]:
    free, paced = found[DRAWN, OURS, 1.0], found[DRAWN, OURS, DEFAULT]
    plain = found[DRAWN, WHOLE, 1.0]
    ttft = [each.ttft_s.mean() for (place, _, _), each in found.items() if place == DRAWN]
    yield (
        f"{INSTANCES} instances at {LOAD:.0%} of the saturated token rate, 95 % chat and 5 % RAG, "
        f"{len(SEEDS)} seeds of {REQUESTS:,} requests. Delay is from the first token to where decode can "
        "begin; rates are of the link of an instance, held is KV on an instance that waits for its pull. "
        f"The first token is left alone: its mean is {1e3 * ttft[0]:.0f} ms in every arm on the drawn link, "
        f"{(max(ttft) - min(ttft)) / min(ttft):.1%} between the extremes."
    )
    chunks, at_once = found[DRAWN, STREAMED, DEFAULT], found[DRAWN, SMALLEST, DEFAULT]
    yield (
        f"Streaming by chunk does most: without a budget the mean delay falls from {_ms(plain)} to "
        f"{_ms(found[DRAWN, STREAMED, 1.0])} ms, the peak over 100 ms from {plain.peaks[0.1] / 1e9:.1f} to "
        f"{free.peaks[0.1] / 1e9:.1f} GB/s, what is held to {free.held_mean / plain.held_mean:.0%}. Order by "
        f"need pays for shorts: streamed within a budget of {DEFAULT:.0%} their mean delay is "
        f"{_mean_ms(paced.short_s)} ms against {_mean_ms(chunks.short_s)} in order of arrival, that of longs "
        f"{_mean_ms(paced.long_s)} against {_mean_ms(chunks.long_s)}. Smallest first gives "
        f"{_mean_ms(at_once.short_s)} and {_mean_ms(at_once.long_s)}: nothing more, and no bound."
    )
    yield (
        f"With both, a budget of {DEFAULT:.0%} leaves the rest of the link to others at every moment and "
        f"costs {_ms(paced, free)} ms on average; P99 is {_p99_ms(paced.short_s)} ms for shorts and "
        f"{_p99_ms(paced.long_s)} for longs. The delay grows as 1 / budget while that is at least twice the "
        "mean KV rate; nearer to it queues add to that, and below it no order helps: KV piles up until "
        "hand-overs expire (25 Gbit/s at half). So half of the link, or twice the mean KV rate where that is "
        "more. One budget for the fleet instead of one each lets a burst use what the others leave. "
        "Not modelled: the links of decode instances, the round trip before a pull, other traffic."
    )


def _ms(found: Found, less: Found | None = None) -> str:
    return f"{1e3 * (found.delay_s - (less.delay_s if less is not None else 0.0)):.1f}"


def _p99_ms(delays_s: NDArray[np.float64]) -> str:
    return f"{1e3 * float(np.quantile(delays_s, 0.99)):.0f}"


def _mean_ms(delays_s: NDArray[np.float64]) -> str:
    return f"{1e3 * float(delays_s.mean()):.1f}"


def _trade_off(found: Mapping[Key, Found]) -> Plot:
    share = 100.0 / DRAWN.bytes_per_s
    series = []
    for way in WAYS:
        arms = [found[DRAWN, way, budget] for budget in BUDGETS]
        x = tuple(arm.peaks[0.01] * share for arm in arms)
        series.append(Series(way.name, x, tuple(1e3 * arm.delay_s for arm in arms)))
    mean = found[DRAWN, OURS, 1.0].mean_rate * share
    return Plot(
        "kv_pacing",
        f"From first token to decode over the peak rate, {DRAWN.label} (simulated)",
        "peak over 10 ms, % of the link",
        "mean delay, ms",
        tuple(series),
        y_log=True,
        marks=((mean, "mean rate"), (100.0 * DEFAULT, "default budget")),
    )


def _over_windows(found: Mapping[Key, Found]) -> Plot:
    x = tuple(1e3 * over_s for over_s in WINDOWS_S)
    series = []
    arms = (("whole", WHOLE, 1.0), ("chunks", OURS, 1.0), (f"chunks, budget {DEFAULT:.0%}", OURS, DEFAULT))
    for name, way, budget in arms:
        arm = found[DRAWN, way, budget]
        for what, rates, dashed in (("peak", arm.peaks, False), ("P99", arm.p99s, True)):
            y = tuple(rates[over_s] / 1e9 for over_s in WINDOWS_S)
            series.append(Series(f"{name}: {what}", x, y, dashed=dashed))
    return Plot(
        "kv_pacing_windows",
        f"KV rate of an instance over windows of time, {DRAWN.label} (simulated)",
        "window, ms",
        "GB/s",
        tuple(series),
        x_log=True,
    )
