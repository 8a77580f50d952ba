"""Answers of `plaserve simulate` as a table, JSON, rows and plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from service.core.types import Lane
from service.sim.case import Case
from service.sim.figures import PointFigures
from service.sim.plots import draw
from service.sim.whatif import Answer, curve_plots

_FIGURES = TypeAdapter(PointFigures)
_CASE = TypeAdapter(Case)


def render(
    case: Case, answers: Sequence[Answer], rate_per_s: float | None, capacity_per_s: float
) -> RenderableType:
    pace = (
        f"{case.workload.concurrency} at a time"
        if rate_per_s is None
        else f"{rate_per_s:.4g} requests/s ({rate_per_s / capacity_per_s:.0%} of capacity)"
    )
    parts = " + ".join(f"{share:g} {name}" for name, share in case.workload.parts)
    title = (
        f"Simulated: {case.model} on {case.instances} x {case.engine}, {parts}, {pace}, "
        f"{answers[0].figures.window_s:.0f} s"
    )
    table = Table(box=box.ROUNDED, header_style="bold")
    table.add_column("")
    for answer in answers:
        table.add_column(answer.policy, justify="right")
    for lane in Lane:
        _lane_rows(table, [a.figures for a in answers], lane)
    for name, values in _common_rows([a.figures for a in answers]):
        table.add_row(name, *values)
    for name, values in _hand_over_rows(answers):
        table.add_row(name, *values)
    return Group(Text(title), table, Text(_note(case), style="dim"))


def _lane_rows(table: Table, figures: Sequence[PointFigures], lane: Lane) -> None:
    lanes = [f.lanes.get(lane) for f in figures]
    if all(found is None for found in lanes):
        return

    def row(name: str, of: Any, end_section: bool = False) -> None:
        cells = ("-" if found is None else of(found) for found in lanes)
        table.add_row(f"{lane} {name}", *cells, end_section=end_section)

    row("arrived", lambda f: f"{f.arrived:,}")
    row("first token in time", lambda f: f"{f.attainment:.1%}")
    for which in ("mean", "p50", "p90", "p99"):
        row(f"TTFT {which}", lambda f, which=which: _ms(getattr(f, f"ttft_s_{which}")))
    row("of it waiting", lambda f: "-" if f.waiting_ratio is None else f"{f.waiting_ratio:.0%}", True)


def _common_rows(figures: Sequence[PointFigures]) -> list[tuple[str, list[str]]]:
    rows = [
        ("requests/s", [f"{f.requests_per_s:.4g}" for f in figures]),
        ("prompt tokens/s", [f"{f.prompt_tokens_per_s:,.0f}" for f in figures]),
        ("utilisation", [f"{f.utilisation_ratio:.1%}" for f in figures]),
        ("padding", [f"{f.padding_ratio:.1%}" for f in figures]),
        ("refused or failed", [f"{f.refused:,}" for f in figures]),
        ("fairness (Jain)", [f"{f.fairness:.3f}" for f in figures]),
    ]
    if any(f.decode_tokens_per_s for f in figures):
        rows.append(("decode tokens/s", [f"{f.decode_tokens_per_s:,.0f}" for f in figures]))
        rows.append(("ITL p99", [_ms(f.itl_s_p99) for f in figures]))
    return rows


def _hand_over_rows(answers: Sequence[Answer]) -> list[tuple[str, list[str]]]:
    figures = [a.hand_over for a in answers if a.hand_over is not None]
    if not figures:
        return []
    return [
        ("KV handed over", [f"{f.handed_over:,}" for f in figures]),
        ("first token to decode", [_ms(f.delay_s_mean) for f in figures]),
        ("p99 of that", [_ms(f.delay_s_p99) for f in figures]),
        ("KV peak over 100 ms", [f"{f.peak_bytes_per_s / 1e9:.2f} GB/s" for f in figures]),
        ("KV held at most", [f"{f.held_bytes_max / 1e9:.2f} GB" for f in figures]),
        ("hand-overs expired", [f"{f.expired:,}" for f in figures]),
    ]


def _note(case: Case) -> str:
    short_s, factor, offset_s = case.short_target_s, case.long_target_factor, case.long_target_offset_s
    return (
        f"In time: within {short_s:g} s (short: up to 256 tokens that no earlier request brought) or "
        f"max({short_s:g}, {factor:g} x alone + {offset_s:g}) s (long), of all that arrived. Quantiles are "
        "over all that arrived; '-' where too many got no answer."
    )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.0f} ms"


def answers_json(case: Case, answers: Sequence[Answer]) -> dict[str, Any]:
    return {
        "kind": "simulated",
        "case": _CASE.dump_python(case, mode="json"),
        "answers": [
            {
                "policy": a.policy,
                "figures": _FIGURES.dump_python(a.figures, mode="json"),
                **({} if a.hand_over is None else {"hand_over": asdict(a.hand_over)}),
            }
            for a in answers
        ],
    }


def write_rows(answers: Sequence[Answer], path: Path) -> None:
    """One row a request and policy; times in seconds, null where there was none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "policy": answer.policy,
            "request_id": record.request.request_id,
            "lane": str(record.lane),
            "arrival_s": record.request.arrival_s,
            "prompt_tokens": record.request.prompt_tokens,
            "computed_tokens": record.new_tokens,
            "reused_tokens": record.history_tokens,
            "target_s": record.request.ttft_target_s,
            "first_pass_s": record.first_pass_s,
            "first_token_s": record.first_token_s,
            "end_s": record.end_s,
            "outcome": None if record.outcome is None else str(record.outcome),
        }
        for answer in answers
        for record in answer.result.records.values()
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


def write_plots(answers: Sequence[Answer], path: Path) -> None:
    """`path` with the lane put before its suffix."""
    for plot in curve_plots(answers):
        draw(plot, path.with_name(f"{path.stem}-{plot.name.removeprefix('ttft_')}{path.suffix}"))
