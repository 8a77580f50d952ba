"""The lab's page: everything that was computed and simulated, from one JSON, as Markdown and pictures.

    lab.json    {"version", "exhibits": [...], "suites": {name: {"title", "summary", "skipped", "settings"}}}

The page and the pictures follow from that file alone, so equal files give equal pages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from service.sim.ablation_report import ablation_table, is_ablation, worth_table
from service.sim.exhibits.exhibit import Exhibit, from_json, to_json
from service.sim.exhibits.markdown import exhibit_markdown, table_markdown
from service.sim.plots import draw
from service.sim.suite_report import case_table, draw_goodputs, levels, policy_table, reference_table
from service.sim.suite_run import SuiteResult
from service.sim.tasks import LabSettings
from service.sim.verdicts import Summary, decode_table, means_table, peer_rate_table, verdict_table

PICTURES = "lab"
_SETTINGS = TypeAdapter(LabSettings)

VERDICTS = """\
Each is defined in [metric](metric.md#verdicts). The best peer of a case is the one of all others with the
highest goodput there, chosen by the figures that it is then compared by, so luck is on its side.
"""

HEAD = """\
# The lab

Made by `plaserve lab page`, which makes [controllers](controllers.md) too; [lab.json](lab/lab.json) holds
every figure on it. Nothing here was measured on a GPU. *Computed* figures come from the cost model alone,
*simulated* ones from the scheduling core that serves, run in virtual time over that cost model. The cost
models rest on published estimates for H200 ([cost model](cost-model.md)); passes above 4,096 tokens are
extrapolated. Who is compared stands in [policies](policies/README.md), how in [metric](metric.md) and
[workloads](workloads.md); how far the simulator itself can be trusted, in
[outside checks](outside-checks.md).
"""


def lab_json(exhibits: Sequence[Exhibit], suites: Sequence[SuiteResult]) -> dict[str, Any]:
    return {
        "version": version("plaserve"),
        "exhibits": [to_json(exhibit) for exhibit in exhibits],
        "suites": {
            result.suite.name: {
                "title": result.suite.title,
                "settings": _SETTINGS.dump_python(result.suite.settings, mode="json"),
                "summary": result.summary(),
                "skipped": [{"case": s.case, "why": s.why} for s in result.skipped],
            }
            for result in suites
        },
    }


def write_page(data: Mapping[str, Any], directory: Path) -> Path:
    """`lab.md` in `directory`, the rest in its folder `lab`."""
    pictures = directory / PICTURES
    pictures.mkdir(parents=True, exist_ok=True)
    text = json.dumps(data, indent=1, allow_nan=False) + "\n"
    (pictures / "lab.json").write_text(text, encoding="utf-8")
    exhibits = [from_json(plain) for plain in data["exhibits"]]
    for exhibit in exhibits:
        for plot in exhibit.plots:
            draw(plot, pictures / f"{plot.name}.png")
    parts = [HEAD]
    for name, suite in data["suites"].items():
        parts += _suite(name, suite, pictures)
    parts.append("## The published tables beside ours\n")
    parts += [exhibit_markdown(exhibit, PICTURES) for exhibit in exhibits]
    path = directory / "lab.md"
    path.write_text("\n".join(parts), encoding="utf-8")
    return path


def _suite(name: str, suite: Mapping[str, Any], pictures: Path) -> Iterator[str]:
    summary = suite["summary"]
    yield f"## Suite {suite['title']}\n"
    yield _how(suite["settings"], summary)
    if is_ablation(summary):
        yield from _ablation(suite, summary)
    else:
        yield from _against_peers(name, suite, pictures)
    if summary["without_goodput"]:
        yield f"No peer has any goodput in: {', '.join(summary['without_goodput'])}.\n"
    if suite["skipped"]:
        yield "Skipped, because the trace is not here:\n"
        yield "\n".join(f"- {item['case']}: {item['why']}" for item in suite["skipped"]) + "\n"


def _against_peers(name: str, suite: Mapping[str, Any], pictures: Path) -> Iterator[str]:
    summary, settings = suite["summary"], suite["settings"]
    for level in levels(summary):
        percent = f"{float(level):.0%}"
        picture = f"{name}_{level.partition('.')[2]}.png"
        draw_goodputs(summary, level, pictures / picture)
        yield f"### What is asked for, and what holds, {percent}\n"
        yield VERDICTS
        yield table_markdown(verdict_table(summary, level)) + "\n"
        yield f"### Goodput at {percent} attainment in each lane, requests/s\n"
        yield f"![Goodput over its bound, {percent}]({PICTURES}/{picture})\n"
        yield table_markdown(case_table(summary, level)) + "\n"
        yield f"Geometric means over the cases of *plaserve*'s goodput over others', {percent}.\n"
        yield table_markdown(means_table(summary, level)) + "\n"
        yield (
            f"Geometric means over the cases, {percent}. *leads*: cases in which it has the highest goodput. "
            "Cases without goodput are not in the means.\n"
        )
        yield table_markdown(policy_table(summary, level)) + "\n"
    share, of_peer = settings["reference_ratio"], settings.get("peer_ratio")
    if of_peer is not None and levels(summary):
        yield from _at_peer_rate(summary, levels(summary)[0], of_peer)
    if share is not None:
        yield f"### At a common rate, {share:.0%} of the bound\n"
        yield table_markdown(reference_table(summary)) + "\n"


def _at_peer_rate(summary: Summary, level: str, of_peer: float) -> Iterator[str]:
    table = peer_rate_table(summary, level)
    if not table.rows:
        return
    yield f"### At {of_peer:.0%} of the best peer's goodput\n"
    yield (
        f"*best peer*: of the peers that attain {float(level):.0%} in each lane at this rate the one with "
        "the lowest mean TTFT in the short lane. *bound*: the mean time of the shorts, each alone on an idle "
        "engine with all of its prompt cached that could be; no policy is below. An empty P99: more than 1 % "
        "got no first token.\n"
    )
    yield table_markdown(table) + "\n"
    decoded = decode_table(summary, level)
    if decoded.rows:
        yield "Decode beside it, at the same rate: the best peer is that of the goodput.\n"
        yield table_markdown(decoded) + "\n"


def _ablation(suite: Mapping[str, Any], summary: Summary) -> Iterator[str]:
    share = suite["settings"]["reference_ratio"]
    for level in levels(summary):
        percent = f"{float(level):.0%}"
        yield (
            f"*plaserve* without one mechanism over *plaserve*: goodput at {percent}, and mean TTFT at "
            f"{share:.0%} of the bound; geometric means over the cases. Below 1 in goodput, or above 1 in "
            "TTFT, the mechanism pays. Knobs are at their defaults. *most lost in*: the case where goodput "
            "falls most, if by 1 %.\n"
        )
        yield table_markdown(worth_table(summary, level)) + "\n"
        yield "By case; the interval is what the brackets of both searches leave possible.\n"
        yield table_markdown(ablation_table(summary, level)) + "\n"


def _how(settings: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    metric, tuning = settings["metric"], settings["tuning"]
    seeds = sorted({len(case["seeds"]) for case in summary["cases"].values()})
    length = f"{metric['window_s_min']:g} s and {metric['window_targets_min']:g} targets"
    budget = 1 if tuning is None else tuning["budget"]
    knobs = f"knobs of every policy tuned with up to {budget} candidates" if budget > 1 else "knobs not tuned"
    tolerance = f"{settings['search']['tolerances'][0]:.0%}"
    return (
        f"Windows of at least {length}; a lane counts from {metric['lane_requests_min']} requests on; "
        f"{' or '.join(map(str, seeds))} seed(s) a case; {knobs}. The metric in full asks for 60 s, 100 "
        "targets, 2,000 requests and three seeds. Goodput is the highest rate that was run and held; with "
        f"one seed it is good to about the tolerance of the search, {tolerance}, and to the luck of that "
        "seed.\n"
    )
