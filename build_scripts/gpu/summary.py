"""The tables of a measurement in one page of text, with the ratios that they were measured for."""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Row = dict[str, str]


def summarize(out: Path) -> str:
    """Of the directory that `measure` wrote; parts without rows say why."""
    run: dict[str, Any] = json.loads((out / "run.json").read_text(encoding="utf-8"))
    made = f"{run['card']}, driver {run['driver']}, torch {run['torch']}, {run['date']}"
    lines = [f"Measured on {made}, scale {run['scale']}"]
    if run["scale"] != "full" or not str(run["device"]).startswith("cuda"):
        lines.append("A trial run: these figures are of no GPU and no real model.")
    sections: tuple[tuple[str, Callable[[list[Row]], Iterable[str]]], ...] = (
        ("prefill", _prefill),
        ("launch", lambda rows: _launch(rows, read_rows(out / "kernels.csv"))),
        ("graphs", _graphs),
        ("interference", _interference),
        ("sm_split", _sm_split),
    )
    for name, section in sections:
        lines += ["", f"{name}.csv", *_notes(run, name)]
        lines += [f"  {line}" for line in section(read_rows(out / f"{name}.csv"))]
    return "\n".join(lines)


def read_rows(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _notes(run: dict[str, Any], part: str) -> list[str]:
    about = {part, "load"} | ({"kernels"} if part == "launch" else set())
    ended = [entry for entry in run["parts"] if entry["part"] in about]
    return [
        f"  {entry['model']} {entry['part']}: {entry['status']}. {entry.get('reason', '')}"
        for entry in ended
        if entry["status"] != "done"
    ]


def _prefill(rows: list[Row]) -> Iterable[str]:
    by_model: dict[str, dict[tuple[int, int, int], Row]] = defaultdict(dict)
    for row in rows:
        by_model[row["model"]][int(row["new_tokens"]), int(row["batch"]), int(row["history"])] = row
    for model, shapes in by_model.items():
        yield f"{model}: {len(shapes)} shapes"
        fastest = max(new * batch / float(row["prefill_ms"]) for (new, batch, _), row in shapes.items())
        alone = sorted((new, row) for (new, batch, past), row in shapes.items() if (batch, past) == (1, 0))
        for new, row in alone:
            ms, issue = float(row["prefill_ms"]), float(row["issue_ms"])
            share = new / ms / fastest
            yield f"  L {new:>5}  {ms:9.3f} ms  issue {issue:8.3f} ms  {share:6.1%} of the best tokens/s"
        yield from _of_history(shapes)


def _of_history(shapes: dict[tuple[int, int, int], Row]) -> Iterable[str]:
    for (new, batch, past), row in sorted(shapes.items()):
        bare = shapes.get((new, batch, 0))
        if past and batch == 1 and bare is not None and new in (64, 256):
            ratio = float(row["prefill_ms"]) / float(bare["prefill_ms"])
            yield f"  L {new:>5} over H {past:>6}: {ratio:.2f} times the pass without history"


def _launch(rows: list[Row], kernel_rows: list[Row]) -> Iterable[str]:
    kernels = {(row["model"], row["mode"], row["tokens"]): row for row in kernel_rows}
    pairs: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for row in rows:
        pairs[row["model"], row["tokens"]][row["mode"]] = float(row["pass_ms"])
    for (model, tokens), modes in pairs.items():
        if not {"eager", "graph"} <= modes.keys():
            continue
        seen = kernels.get((model, "eager", tokens))
        busy = f"{seen['kernels']} kernels of {seen['kernel_ms']} ms" if seen else "kernels not counted"
        yield (
            f"{model} T {tokens:>4}: eager {modes['eager']:.3f} ms ({busy}), graph {modes['graph']:.3f} ms, "
            f"eager/graph {modes['eager'] / modes['graph']:.2f}"
        )


def _graphs(rows: list[Row]) -> Iterable[str]:
    kinds: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        kinds[row["model"], row["kind"]].append(row)
    for (model, kind), members in kinds.items():
        setup, memory = (sum(float(row[name]) for row in members) for name in ("setup_ms", "memory_mb"))
        yield f"{model} {kind}: {len(members)} shapes, set up in {setup / 1e3:.2f} s, {memory:.0f} MB"


def _interference(rows: list[Row]) -> Iterable[str]:
    for row in rows:
        padded = row["padded_to_packed_ratio"] or "-"
        yield (
            f"{row['model']} {row['long_tokens']} + {row['shorts']} x {row['short_tokens']}: "
            f"long {row['long_slower_ratio']} times slower, shorts {row['short_slower_ratio']} times, "
            f"padded/packed {padded}"
        )


def _sm_split(rows: list[Row]) -> Iterable[str]:
    for row in rows:
        prefill = float(row["prefill_beside_ms"]) / float(row["prefill_alone_ms"])
        decode = float(row["decode_beside_ms"]) / float(row["decode_alone_ms"])
        yield (
            f"{row['model']} {row['sharing']} {row['prefill_sms']}+{row['decode_sms']} SMs: prefill "
            f"{row['prefill_alone_ms']} ms alone, {prefill:.2f} times beside; decode "
            f"{row['decode_alone_ms']} ms alone, {decode:.2f} times beside"
        )
