"""Measure everything on a GPU machine: python -m build_scripts.gpu.measure

Needs torch and numpy and this checkout, nothing else; weights are random and made on the device. Each part
writes one CSV, a row at a time, and run.json beside them says on what, and how each part ended. A part that
fails leaves its reason there and the next one runs. Each part gets its share of the time that is left, so
that what one does not use goes to those after it; the time limit holds for the whole run.

With --device cpu --scale tiny the same code runs anywhere in seconds; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from build_scripts.gpu import (
    columns,
    machine,
    part_graphs,
    part_interference,
    part_launch,
    part_prefill,
    part_sm_split,
)
from build_scripts.gpu.bench import SCALES, Bench, Deadline, Skip, Table, make_bench
from build_scripts.gpu.summary import summarize
from engines.models import known_models

Run = Callable[[Bench, Table, Deadline], str]


@dataclass(frozen=True, slots=True)
class Part:
    """weight: share of the time. every_model: else only the first one. last: after all other parts."""

    name: str
    columns: tuple[str, ...]
    run: Run
    weight: float
    every_model: bool = False
    last: bool = False

    @property
    def file(self) -> str:
        return f"{self.name}.csv"


PARTS = (
    Part("graphs", part_graphs.COLUMNS, part_graphs.run, 1.3),
    Part("prefill", columns.PREFILL, part_prefill.run, 3.0, every_model=True),
    Part("launch", part_launch.COLUMNS, part_launch.run, 0.7),
    Part("interference", part_interference.COLUMNS, part_interference.run, 0.8),
    Part("sm_split", part_sm_split.COLUMNS, part_sm_split.run, 0.7),
    Part("kernels", part_launch.KERNEL_COLUMNS, part_launch.run_kernels, 0.3, last=True),
)
MODELS = "qwen2.5-7b,qwen2.5-14b,qwen2.5-32b"
NO_GPU = "device cuda: torch sees no GPU; use --device cpu --scale tiny for a trial run"
_MINUTES = 9.0
_END_S = 10.0  # kept for the last row, which may be slow, and the summary


class Log:
    """run.json: written anew after every change."""

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        self._path = path
        self.data: dict[str, Any] = {**head, "parts": []}
        self.write()

    def add(self, **entry: object) -> None:
        self.data["parts"].append(entry)
        self.write()

    def write(self) -> None:
        text = json.dumps(self.data, indent=2, default=str)
        self._path.write_text(text + "\n", encoding="utf-8")


def measure(
    out: Path, models: Sequence[str], minutes: float, device: str, scale_name: str, seed: int = 0
) -> Path:
    """Run all parts into `out`; the path of run.json. Raises ValueError for a name that is not known."""
    if scale_name not in SCALES:
        raise ValueError(f"scale {scale_name!r} is not known; choose from {', '.join(SCALES)}")
    if not models or minutes <= 0.0:
        raise ValueError("models must name at least one model, and minutes be above 0")
    unknown = [model for model in models if model not in known_models()]
    if unknown:
        raise ValueError(f"model {unknown[0]!r} is not known; known are {', '.join(known_models())}")
    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            raise ValueError(NO_GPU)
        torch.cuda.set_device(ordinal(device))
    out.mkdir(parents=True, exist_ok=True)
    old = [part.file for part in PARTS if (out / part.file).exists()]
    if old:
        raise ValueError(f"{out} holds {', '.join(old)} of another run: choose another directory")
    start_s = time.monotonic()
    end_s = start_s + max(1.0, 60.0 * minutes - _END_S)
    head = {**machine.describe(device), "scale": scale_name, "models": list(models), "minutes": minutes}
    log = Log(out / "run.json", head)
    tables = {part.name: Table(out / part.file, part.columns) for part in PARTS}
    _run_all(plan(models), tables, log, end_s, lambda model: _load(model, device, scale_name, seed, log))
    for table in tables.values():
        table.close()
    log.data["state_at_end"] = machine.state() if device.startswith("cuda") else {}
    log.data["seconds"] = round(time.monotonic() - start_s, 1)
    log.write()
    return out / "run.json"


def ordinal(device: str) -> int:
    """Number of a CUDA device: torch wants one, and `cuda` alone has none."""
    return int(torch.device(device).index or 0)


def plan(models: Sequence[str]) -> list[tuple[str, Part]]:
    """What to measure, in order: all of the first model, then the others, then what has to be last."""
    first = [(model, part) for model in models for part in PARTS if part.every_model or model == models[0]]
    return sorted(first, key=lambda entry: entry[1].last)


def _run_all(
    todo: list[tuple[str, Part]],
    tables: dict[str, Table],
    log: Log,
    end_s: float,
    load: Callable[[str], Bench | None],
) -> None:
    """Run `todo`, one model in memory at a time."""
    bench: Bench | None = None
    loaded = ""
    for number, (model, part) in enumerate(todo):
        if model != loaded:
            bench = None  # give its memory back before the next one asks for it
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            bench, loaded = load(model), model
        if bench is None:
            continue
        weights = [_weight(other) for other in todo[number:]]
        left_s = max(0.0, end_s - time.monotonic())
        deadline = Deadline(time.monotonic() + left_s * weights[0] / sum(weights))
        _run_part(part, bench, tables[part.name], deadline, log)


def _load(model: str, device: str, scale_name: str, seed: int, log: Log) -> Bench | None:
    start_s = time.monotonic()
    try:
        bench = make_bench(model, device, SCALES[scale_name], seed)
    except RuntimeError as error:  # out of memory is one
        log.add(part="load", model=model, status="failed", reason=_short(error))
        return None
    log.add(
        part="load",
        model=model,
        status="done",
        seconds=round(time.monotonic() - start_s, 1),
        attention=bench.model.attention.name,
        attention_refused=bench.model.attention_refused,
        kv_tokens=bench.kv_tokens,
    )
    return bench


def _weight(entry: tuple[str, Part]) -> float:
    """Larger models take longer for a row."""
    model, part = entry
    return part.weight * (1.5 if "32b" in model else 1.0)


def _run_part(part: Part, bench: Bench, table: Table, deadline: Deadline, log: Log) -> None:
    start_s, before = time.monotonic(), table.rows
    status, reason, trace = "done", "", None
    try:
        reason = part.run(bench, table, deadline)
    except Skip as skip:
        status, reason = "skipped", str(skip)
    except Exception as error:  # whatever it is, the other parts are still wanted
        status, reason, trace = "failed", _short(error), traceback.format_exc(limit=-4)
    seconds, rows = round(time.monotonic() - start_s, 1), table.rows - before
    entry: dict[str, object] = {"part": part.name, "model": bench.name, "status": status, "rows": rows}
    entry |= {"seconds": seconds, "reason": reason}
    log.add(**entry, **({"traceback": trace} if trace else {}))
    print(f"{bench.name} {part.name}: {status}, {rows} rows in {seconds} s. {reason}", flush=True)  # noqa: T201


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def default_directory(device: str) -> Path:
    """var/gpu/CARD-DATE, below the working directory. Raises ValueError where there is no such device."""
    name = platform.machine()
    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            raise ValueError(NO_GPU)
        name = torch.cuda.get_device_name(device)
    card = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return Path("var") / "gpu" / f"{card}-{datetime.now(UTC):%Y%m%d-%H%M%S}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m build_scripts.gpu.measure", description=__doc__)
    parser.add_argument(
        "--out", default="auto", help="a new directory for the tables; auto: var/gpu/CARD-DATE (the default)"
    )
    parser.add_argument("--models", default=MODELS, help=f"names of shipped shapes; default {MODELS}")
    parser.add_argument("--minutes", type=float, default=_MINUTES, help="for the whole run; default 9")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, cpu; default cuda")
    parser.add_argument("--scale", default="full", choices=list(SCALES))
    options = parser.parse_args(arguments)
    models = [name for name in options.models.split(",") if name]
    try:
        out = default_directory(options.device) if options.out == "auto" else Path(options.out)
        measure(out, models, options.minutes, options.device, options.scale)
    except ValueError as error:
        parser.error(str(error))
    print(summarize(out))  # noqa: T201
    print(f"\nWritten to {out}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
