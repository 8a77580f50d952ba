"""L_m, the length at which a prefill turns from memory- to compute-bound (LAPS section 3)."""

from __future__ import annotations

from engines.models import load_model
from service.sim.exhibits.exhibit import Cell, Exhibit, Kind, Plot, Series, Table

MODELS = ("llama-3.1-8b", "qwen3-32b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b")
HISTORIES = (0, 1024, 4096, 16_384)
PUBLISHED_TOKENS = 256.0


def boundary() -> Exhibit:
    rows: list[tuple[Cell, ...]] = []
    for name in MODELS:
        known = load_model(name)
        cost = known.cost
        at_history = tuple(cost.boundary_tokens(history) for history in HISTORIES)
        origin = "derived" if known.derived else "fitted"
        rows.append((name, origin, *at_history, round(cost.printed_boundary_tokens()), cost.knee_tokens()))
    columns = (
        "model",
        "cost model",
        *(f"L_m at H = {history}" for history in HISTORIES),
        "L_m as printed",
        "knee, tokens of a pass",
    )
    at_zero = [load_model(name).cost.boundary_tokens(0) for name in MODELS]
    reading = (
        f"With the reading of the weights in the memory term L_m is {min(at_zero)} to {max(at_zero)} tokens "
        f"without history (published: {PUBLISHED_TOKENS:.0f}) and falls as history grows, because attention "
        "over it is compute. The formula as printed, (gamma_w - beta) / alpha, leaves the weights out and "
        "comes out negative: by it every prefill would be compute-bound. It is shown and used nowhere. What "
        "a pass costs depends on its tokens in all, so the knee of the pass says more about batching than "
        "L_m does."
    )
    histories = tuple(float(h) for h in range(0, 32_769, 1024))
    series = tuple(
        Series(
            name, histories, tuple(float(load_model(name).cost.boundary_tokens(int(h))) for h in histories)
        )
        for name in MODELS
    )
    published = Series("published, H200", histories, (PUBLISHED_TOKENS,) * len(histories), dashed=True)
    plot = Plot(
        "boundary",
        "L_m over history (cost model, H200)",
        "history tokens",
        "L_m, tokens",
        (*series, published),
    )
    return Exhibit(
        "boundary",
        "L_m on H200",
        Kind.COMPUTED,
        "LAPS talk: L_m = (gamma_w - beta) / alpha, about 256 on H200; paper: 150 to 512 on A100 to H200.",
        Table(columns, tuple(rows)),
        reading,
        (plot,),
    )
