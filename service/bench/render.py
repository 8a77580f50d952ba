"""A report for the terminal: one table, a picture of the TTFT distributions, and what may be concluded."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from service.bench.chart import ttft_chart
from service.bench.report import Report, Verdict
from service.bench.stats import Ratio
from service.bench.workload import SHORT_TARGET_S, Label

MEASURED = """\
On this machine ({cores} cores); one engine per policy, same bundle, same decode rule. Open loop, Poisson \
arrivals at {load:.0%} of the {capacity:.2f} requests/s that the fitted cost model gives for this mix \
({documents:.0%} documents of {low}-{high} tokens, the rest chats, max_tokens {max_tokens}). TTFT counts \
from the moment a request was due; lanes are the load generator's labels. Attainment: first token within \
{target} s (short) or max({target} s, 3 x alone + 0.2 s) (long), of all that arrived. Brackets: 95 % \
intervals, bootstrap over stretches of 5 s; another machine or mix can differ by more.
"""
SHOWN = """\
Order, chunking and reuse: short prompts overtake long ones at the edges of chunks, long ones take what is \
left, and a cached prefix is not computed twice.
"""
NOT_SHOWN = """\
The gain of batching: a few dozen tokens saturate this engine, so filling up a pass wins next to nothing, \
while on a GPU a hundred tokens and more ride along nearly free. Nor several instances, hand-over, or a \
trustworthy p99 of a lane with few requests.
"""
BASELINE = """\
`fcfs` has the token budget that servers use on GPUs, 2,048; on this engine so large a pass is dear, and a \
smaller budget makes a stronger baseline. See for yourself: plaserve bench compare --policies \
fcfs:budget_tokens=512,plaserve"""
GOAL_NAMES = {
    "short_ttft_p90": "short TTFT p90",
    "long_ttft_mean": "long TTFT mean",
    "requests_per_s": "throughput",
    "itl_p99": "ITL p99",
}


def render(report: Report) -> RenderableType:
    """The whole report, for a terminal of 80 columns and more."""
    parts: list[RenderableType] = [Text(_title(report)), _table(report), Text()]
    for label in Label:
        parts += [ttft_chart(report.rounds, label), Text()]
    if verdicts := report.verdicts():
        parts += [_goals(report, verdicts), Text()]
    parts.append(Padding(_conclusions(report), (0, 1)))
    return Group(*parts)


def _table(report: Report) -> Table:
    table = Table(box=box.ROUNDED, header_style="bold")
    table.add_column("")
    for policy in report.arms:
        table.add_column(policy, justify="right")
        if policy != report.base:
            table.add_column(f"/ {report.base}", justify="left")
    for label in Label:
        for which in ("mean", "p50", "p90", "p99"):
            values = [ms(getattr(arm.lanes[label].ttft_s, which)) for arm in report.arms.values()]
            _row(table, report, f"{label} TTFT {which}", values, f"{label}_ttft_{which}")
        values = [percent(arm.lanes[label].attainment) for arm in report.arms.values()]
        _row(table, report, f"{label} attainment", values, None, end_section=True)
    _row(table, report, "ITL p99", [ms(arm.itl_s_p99) for arm in report.arms.values()], "itl_p99")
    rates = [(arm.decode_tokens_per_s, arm.requests_per_s) for arm in report.arms.values()]
    _row(table, report, "decode tokens/s", [f"{tokens:.1f}" for tokens, _ in rates], "decode_tokens_per_s")
    _row(table, report, "requests/s", [f"{requests:.2f}" for _, requests in rates], "requests_per_s")
    return table


def _title(report: Report) -> str:
    lanes = report.arms[report.base].lanes
    settings = report.plan.settings
    return (
        f" {lanes[Label.SHORT].arrived} short and {lanes[Label.LONG].arrived} long requests to each policy, "
        f"{settings.rounds} rounds, {report.plan.demand.rate_rps:.2f} requests/s"
    )


def _row(
    table: Table,
    report: Report,
    name: str,
    values: Sequence[str],
    ratio: str | None,
    end_section: bool = False,
) -> None:
    cells = [name]
    for policy, value in zip(report.arms, values, strict=True):
        cells.append(value)
        if policy != report.base:
            cells.append(_ratio(report.ratios[policy][ratio]) if ratio else "")
    table.add_row(*cells, end_section=end_section)


def ms(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * 1e3:,.0f} ms"


def percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.1%}"


def _ratio(ratio: Ratio) -> str:
    if math.isnan(ratio.value):
        return "-"
    interval = "" if math.isnan(ratio.low) else f" [{ratio.low:.2f}, {ratio.high:.2f}]"
    return f"{ratio.value:.2f}x{interval}"


def _goals(report: Report, verdicts: Sequence[Verdict]) -> Text:
    text = Text()
    for verdict in verdicts:
        sign = "at most" if verdict.goal.at_most else "at least"
        word, colour = ("met", "green") if verdict.met else ("missed", "red")
        doubt = (
            "" if verdict.certain or math.isnan(verdict.ratio.low) else ", but the interval spans the goal"
        )
        text.append(f" goal {word:<6} ", style=colour)
        text.append(
            f" {GOAL_NAMES[verdict.goal.ratio]} {sign} {verdict.goal.bound:g}x of {report.base}: "
            f"{verdict.ratio.value:.2f}x{doubt}\n"
        )
    text.rstrip()
    return text


def _conclusions(report: Report) -> Text:
    settings, demand = report.plan.settings, report.plan.demand
    mix = settings.mix
    text = Text()
    text.append("How it was measured. ", style="bold")
    text.append(
        MEASURED.format(
            cores=os.cpu_count(),
            load=settings.load_ratio,
            capacity=demand.capacity_rps,
            documents=mix.document_ratio,
            low=mix.document_tokens_min,
            high=mix.document_tokens_max,
            max_tokens=mix.max_tokens,
            target=SHORT_TARGET_S,
        )
    )
    text.append("What it shows. ", style="bold").append(SHOWN)
    text.append("What it can't show. ", style="bold").append(NOT_SHOWN)
    text.append("The baseline. ", style="bold").append(BASELINE)
    return text
