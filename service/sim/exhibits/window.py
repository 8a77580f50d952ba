"""The waiting window in a closed loop: how long should shorts be gathered? (LAPS Fig. 5, slides)."""

from __future__ import annotations

from engines.models import load_model
from engines.simulated_settings import engine_setting
from service.sim.exhibits.exhibit import Cell, Exhibit, Kind, Plot, Series, Table
from service.sim.exhibits.runs import CLIENT_S_MEAN, Scene, Summary, play, summary
from service.sim.sources import WorkloadSpec

MODEL = "qwen2.5-14b"
CLIENTS = 64
WINDOWS_MS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 12.0, 16.0)
REQUESTS = 6000


def window() -> Exhibit:
    setting = engine_setting(load_model(MODEL), "packed")
    shorts = WorkloadSpec(
        parts=(("lmsys_chat_1m", 1.0),),
        arrivals="closed",
        concurrency=CLIENTS,
        prompt_tokens_max=255,
    )
    scene = Scene(shorts, setting, requests_max=REQUESTS, client_s_mean=CLIENT_S_MEAN)
    swept = [
        (ms, summary(play(scene, f"laps_artifact:window_s={ms / 1e3},window_requests={CLIENTS}")))
        for ms in WINDOWS_MS
    ]
    ours = summary(play(scene, "plaserve"))
    best_ms, best = min(swept, key=lambda point: point[1].ttft_s_mean)
    rows: list[tuple[Cell, ...]] = [(f"fixed, {ms:g} ms", *_figures(point)) for ms, point in swept]
    rows.append(("plaserve, chosen by itself", *_figures(ours)))
    no_window = swept[0][1]
    reading = (
        f"The best fixed window here is {best_ms:g} ms (mean TTFT {best.ttft_s_mean * 1e3:.1f} ms, "
        f"{best.ttft_s_mean / no_window.ttft_s_mean - 1:+.1%} against none, requests/s "
        f"{best.requests_per_s / no_window.requests_per_s - 1:+.1%}). plaserve, which is not told, has "
        f"{ours.ttft_s_mean * 1e3:.1f} ms ({ours.ttft_s_mean / best.ttft_s_mean - 1:+.1%} against the best) "
        f"and {ours.requests_per_s / best.requests_per_s - 1:+.1%} requests/s. Where the optimum lies "
        "depends on how long clients take to come back, which the source does not say; here an exponential "
        f"time of {CLIENT_S_MEAN * 1e3:g} ms on average is assumed. With {CLIENTS} clients in a closed loop "
        "a queue forms while a pass runs, so a window gathers little that would not be there anyway."
    )
    return Exhibit(
        "window",
        f"The waiting window, {CLIENTS} clients in a closed loop, shorts only",
        Kind.SIMULATED,
        "LAPS Fig. 5, 14B, 64-way shorts below 256 tokens: latency minimum near 6 to 8 ms (slides: about 6).",
        Table(("window", "requests/s", "mean TTFT ms", "p90 ms", "p99 ms"), tuple(rows)),
        reading,
        (_plot(swept, ours),),
    )


def _figures(point: Summary) -> tuple[float, float, float, float]:
    return (
        point.requests_per_s,
        point.ttft_s_mean * 1e3,
        point.ttft_s_p90 * 1e3,
        point.ttft_s_p99 * 1e3,
    )


def _plot(swept: list[tuple[float, Summary]], ours: Summary) -> Plot:
    x = tuple(ms for ms, _ in swept)
    return Plot(
        "window",
        f"TTFT over a fixed window, {MODEL} on H200 (simulated)",
        "window, ms",
        "TTFT, ms",
        (
            Series("mean", x, tuple(point.ttft_s_mean * 1e3 for _, point in swept)),
            Series("p90", x, tuple(point.ttft_s_p90 * 1e3 for _, point in swept)),
            Series("plaserve, mean", x, (ours.ttft_s_mean * 1e3,) * len(x), dashed=True),
            Series("plaserve, p90", x, (ours.ttft_s_p90 * 1e3,) * len(x), dashed=True),
        ),
    )
