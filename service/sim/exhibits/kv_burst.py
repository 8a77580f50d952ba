"""What makes the KV burst at hand-over: the window, the batch, or the long prompt? (D2 of the LAPS talk.)

One instance and an unpaced link. A burst is the KV of all prompts whose first tokens come at one instant,
each handed over at its end. Windows are fixed as in the window exhibit; the batch is the token budget of
`fcfs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from engines.models import load_model
from engines.simulated_settings import engine_setting
from service.core.kv_link import LinkSettings, peak_bytes_per_s
from service.sim.exhibits.exhibit import Cell, Exhibit, Kind, Plot, Series, Table
from service.sim.exhibits.kv_pacing import CHAT, MIX, SEEDS, TALK
from service.sim.exhibits.runs import CLIENT_S_MEAN, Scene, play
from service.sim.hand_over import HandOvers, HandOverSettings, kv_bytes
from service.sim.sources import WorkloadSpec

MODEL = "qwen3-32b"
BYTES_PER_S = 12.5e9  # 100 Gbit/s
REQUESTS = 2000
WINDOWS_MS = (0.0, 6.0, 12.0, 25.0)
BATCHES = (512, 1024, 2048, 4096, 8192)
CLIENTS = 64
CLOSED = WorkloadSpec(parts=CHAT.parts, arrivals="closed", concurrency=CLIENTS)
OURS, SLIDES = "plaserve", "laps_slides"


@dataclass(frozen=True, slots=True)
class Traffic:
    """policies: by the name that they have in the table. rate_per_s: None in a closed loop."""

    name: str
    workload: WorkloadSpec
    rate_per_s: float | None
    policies: Mapping[str, str]


def window(ms: float) -> str:
    return f"window {ms:g} ms"


def batch(tokens: int) -> str:
    return f"fcfs, {tokens:,} tokens"


PLAIN = {OURS: OURS, SLIDES: SLIDES}
BY_WINDOW = PLAIN | {window(ms): f"plaserve-adaptation:window_s_max={ms / 1e3}" for ms in WINDOWS_MS}
BY_BATCH = PLAIN | {batch(tokens): f"fcfs:budget_tokens={tokens}" for tokens in BATCHES}
SHORT = Traffic("chat, 60 requests/s", CHAT, 60.0, BY_WINDOW)
LOOP = Traffic(f"chat, {CLIENTS} clients", CLOSED, None, BY_BATCH)
LONG = Traffic("chat and 5 % RAG, 25 requests/s", MIX, 25.0, BY_WINDOW)


@dataclass(frozen=True, slots=True)
class Burst:
    """One row: means over the seeds."""

    prompts: float
    mean_mb: float
    p99_mb: float
    max_mb: float
    peak: float  # GB/s over 100 ms
    delay_ms: float
    delay_ms_p99: float
    ttft_ms: float

    def row(self) -> tuple[float, ...]:
        return (
            *(self.prompts, self.mean_mb, self.p99_mb, self.max_mb, self.peak),
            *(self.delay_ms, self.delay_ms_p99, self.ttft_ms),
        )


Found = Mapping[tuple[str, str], Burst]


def kv_burst() -> Exhibit:
    found = {
        (traffic.name, name): _figures(traffic, policy)
        for traffic in (SHORT, LOOP, LONG)
        for name, policy in traffic.policies.items()
    }
    columns = (
        *("traffic", "passes", "prompts a burst", "burst MB", "p99", "max", "peak 100 ms GB/s"),
        *("delay ms", "delay p99 ms", "TTFT ms"),
    )
    rows: tuple[tuple[Cell, ...], ...] = tuple((*key, *burst.row()) for key, burst in found.items())
    return Exhibit(
        "kv_burst",
        "Hand-over of KV: what makes the burst",
        Kind.SIMULATED,
        TALK,
        Table(columns, rows),
        " ".join(_reading(found)),
        (_by_batch(found),),
    )


def _reading(found: Found) -> Iterator[str]:
    for traffic in (SHORT, LONG):
        none, wide = found[traffic.name, window(0.0)], found[traffic.name, window(WINDOWS_MS[-1])]
        yield (
            f"On {traffic.name}, a window of {WINDOWS_MS[-1]:g} ms makes the burst "
            f"{wide.mean_mb / none.mean_mb:.2f} times as large on average and "
            f"{wide.p99_mb / none.p99_mb:.2f} at P99; the peak over 100 ms is "
            f"{wide.peak / none.peak:.2f} times that without, the delay {wide.delay_ms / none.delay_ms:.2f}."
        )
    ours, slides = found[LOOP.name, OURS], found[LOOP.name, SLIDES]
    batches = [found[LOOP.name, batch(tokens)] for tokens in BATCHES]
    yield (
        f"On {LOOP.name}, the batch makes it: from {BATCHES[0]:,} to {BATCHES[-1]:,} tokens a pass of fcfs "
        f"P99 of the burst goes from {batches[0].p99_mb:,.0f} to {batches[-1].p99_mb:,.0f} MB and the delay "
        f"from {batches[0].delay_ms:.0f} to {batches[-1].delay_ms:.0f} ms, at a mean TTFT of "
        f"{min(b.ttft_ms for b in batches):.0f} ms at best. {OURS} has {ours.p99_mb:,.0f} MB, "
        f"{ours.delay_ms:.0f} ms and a TTFT of {ours.ttft_ms:.0f}, {SLIDES} {slides.p99_mb:,.0f} MB, "
        f"{slides.delay_ms:.0f} ms and {slides.ttft_ms:.0f}."
    )
    chat, mixed = found[SHORT.name, window(0.0)], found[LONG.name, window(0.0)]
    yield (
        "And so does the long prompt that is handed over whole: with 5 % of them P99 is "
        f"{mixed.p99_mb / chat.p99_mb:.1f} times that of chat. A burst follows the tokens that end at one "
        "instant. The window adds little to those and is left alone; the hand-over is streamed and paced. "
        f"{MODEL}, one instance, 100 Gbit/s without a budget, in order of arrival, {len(SEEDS)} seeds of "
        f"{REQUESTS:,} requests; clients take {CLIENT_S_MEAN * 1e3:g} ms on average between an answer and "
        "the next request."
    )


def _figures(traffic: Traffic, policy: str) -> Burst:
    return Burst(*np.mean([_one(traffic, policy, seed).row() for seed in SEEDS], axis=0).tolist())


def _one(traffic: Traffic, policy: str, seed: int) -> Burst:
    setting, size = engine_setting(load_model(MODEL), "packed"), kv_bytes(MODEL)
    link = LinkSettings(BYTES_PER_S, budget_ratio=1.0, stretch=0.0)
    hand_overs = HandOvers(HandOverSettings(link, size, streamed=False))
    scene = Scene(
        traffic.workload,
        setting,
        rate_per_s=traffic.rate_per_s,
        requests_max=REQUESTS,
        seed=seed,
        client_s_mean=0.0 if traffic.rate_per_s else CLIENT_S_MEAN,
    )
    result = play(scene, policy, hand_overs=hand_overs)
    bursts: dict[float, int] = {}
    for each in hand_overs.done:
        bursts[each.first_token_s] = bursts.get(each.first_token_s, 0) + size * each.request.prompt_tokens
    mega = np.array(list(bursts.values())) / 1e6
    delays_ms = 1e3 * np.array([each.delay_s for each in hand_overs.done])
    return Burst(
        prompts=len(delays_ms) / len(bursts),
        mean_mb=float(mega.mean()),
        p99_mb=float(np.quantile(mega, 0.99)),
        max_mb=float(mega.max()),
        peak=max(peak_bytes_per_s(used, 0.1) for used in hand_overs.links) / 1e9,
        delay_ms=float(delays_ms.mean()),
        delay_ms_p99=float(np.quantile(delays_ms, 0.99)),
        ttft_ms=1e3 * float(np.mean([r.ttft_s for r in result.records.values() if r.ttft_s is not None])),
    )


def _by_batch(found: Found) -> Plot:
    bursts = [found[LOOP.name, batch(tokens)] for tokens in BATCHES]
    x = tuple(map(float, BATCHES))
    ours = (found[LOOP.name, OURS].p99_mb,) * len(x)
    return Plot(
        "kv_burst",
        f"KV that leaves at one instant, {LOOP.name}, {MODEL} (simulated)",
        "most tokens in a pass of fcfs",
        "MB",
        (
            Series("P99", x, tuple(b.p99_mb for b in bursts)),
            Series("mean", x, tuple(b.mean_mb for b in bursts)),
            Series(f"{OURS}: P99", x, ours, dashed=True),
        ),
        x_log=True,
    )
