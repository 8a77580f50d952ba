"""graphs.csv: capture time and memory a cell of the LAPS grid, against one graph a T-class and none at all.

kind
  eager        no capture: `setup_ms` is the first pass of a shape, with whatever libraries do for it once.
               This part runs first of all, and eager before the graphs: those find the libraries warm
  class_graph  one graph for each class of T, requests kept apart by where they begin (engines.torch_cuda)
  cell_graph   one graph for each (L, B), as LAPS captures them

Graphs of one kind share a memory pool, the largest first; `memory_mb` is by how much the free memory of the
device fell, so the sum over a kind is what that kind takes.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from build_scripts.gpu.bench import Bench, Deadline, Table
from build_scripts.gpu.timing import timed
from engines.torch_cuda_batch import probe_batch
from engines.torch_cuda_graphs import FixedPass, FixedShape

COLUMNS = (
    "model",
    "kind",
    "tokens",
    "requests",
    "new_tokens",
    "setup_ms",
    "memory_mb",
    "pass_ms",
    "issue_ms",
)


def run(bench: Bench, table: Table, deadline: Deadline) -> str:
    scale = bench.scale
    cells = sorted(
        ((length * b, b, length) for length in scale.cells[0] for b in scale.cells[1]), reverse=True
    )
    cells = [cell for cell in cells if cell[0] <= scale.tokens_max]
    classes = [(tokens, 1, tokens) for tokens in reversed(scale.classes)]
    done: dict[str, int] = {}
    for kind, shapes in (("eager", cells), ("class_graph", classes), ("cell_graph", cells)):
        pool = torch.cuda.graph_pool_handle() if bench.cuda and kind != "eager" else None
        held: list[FixedPass] = []  # as a server would hold them, so that memory adds up
        for tokens, requests, length in shapes:
            if deadline.passed:
                break
            _row(bench, table, kind, (tokens, requests, length), pool, held)
            done[kind] = done.get(kind, 0) + 1
        held.clear()
        if bench.cuda:
            torch.cuda.empty_cache()
    return ", ".join(f"{count} {kind}" for kind, count in done.items())


def _row(
    bench: Bench, table: Table, kind: str, cell: tuple[int, int, int], pool: Any, held: list[FixedPass]
) -> None:
    tokens, requests, length = cell
    model, sizes = bench.model, [(length, 0)] * requests
    before, start_s = free_mb(bench), time.perf_counter()
    if kind == "eager":
        passes = bench.eager(sizes)
        passes()
        synchronize(bench)
    else:
        attention = model.choose(captured=True)[0] if bench.cuda else model.attention
        slots_of = requests if kind == "cell_graph" else max(bench.scale.batches)
        start_s = time.perf_counter()
        fixed = FixedPass(model, FixedShape(tokens, tokens, slots_of), attention, pool)
        fixed.prepare(capture=bench.cuda)
        held.append(fixed)
        batch = probe_batch(sizes, model.slots, model.config.shape.vocab, bench.seed)

        def passes() -> Any:
            return fixed.run(batch).argmax(dim=-1)

    setup_ms = (time.perf_counter() - start_s) * 1e3
    memory_mb = max(0.0, before - free_mb(bench))
    timing = timed(passes, bench.device, spend_s=0.1)
    table.add(
        model=bench.name,
        kind=kind,
        tokens=tokens,
        requests=requests,
        new_tokens=length,
        setup_ms=setup_ms,
        memory_mb=memory_mb,
        pass_ms=timing.pass_ms,
        issue_ms=timing.issue_ms,
    )


def free_mb(bench: Bench) -> float:
    """Free memory of the device as its driver sees it; 0 without CUDA."""
    return torch.cuda.mem_get_info()[0] / 1e6 if bench.cuda else 0.0


def synchronize(bench: Bench) -> None:
    if bench.cuda:
        torch.cuda.synchronize()
