"""launch.csv: what a small pass costs the host, eager and replayed; kernels.csv: its kernels by the profiler.

`kernel_ms` is the sum of the kernels of a pass. What `pass_ms` exceeds it by is waiting for launches. The
profiler leaves hooks in the driver that slow every launch after it, so its part runs when all else is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from build_scripts.gpu.bench import Bench, Deadline, Table
from build_scripts.gpu.timing import kernels, timed
from engines.torch_cuda_batch import probe_batch
from engines.torch_cuda_graphs import FixedPass, FixedShape

COLUMNS = ("model", "mode", "tokens", "requests", "pass_ms", "wall_ms", "issue_ms")
KERNEL_COLUMNS = ("model", "mode", "tokens", "requests", "kernels", "kernel_ms")


def run(bench: Bench, table: Table, deadline: Deadline) -> str:
    for mode, tokens, passes in _passes(bench):
        if deadline.passed:
            return "out of time"
        timing = timed(passes, bench.device)
        table.add(
            model=bench.name,
            mode=mode,
            tokens=tokens,
            requests=1,
            pass_ms=timing.pass_ms,
            wall_ms=timing.wall_ms,
            issue_ms=timing.issue_ms,
        )
    return ""


def run_kernels(bench: Bench, table: Table, deadline: Deadline) -> str:
    for mode, tokens, passes in _passes(bench):
        if deadline.passed:
            return "out of time"
        count, kernel_ms = kernels(passes, bench.device)
        table.add(model=bench.name, mode=mode, tokens=tokens, requests=1, kernels=count, kernel_ms=kernel_ms)
    return ""


def _passes(bench: Bench) -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """(mode, tokens, pass), one prompt each."""
    for tokens in bench.scale.launch_tokens:
        yield "eager", tokens, bench.eager([(tokens, 0)])
        yield "graph", tokens, replayed(bench, tokens)


def replayed(bench: Bench, tokens: int) -> Callable[[], Any]:
    """A pass of one prompt of `tokens` from a graph of exactly that class; uncaptured without CUDA."""
    model = bench.model
    attention = model.choose(captured=True)[0] if bench.cuda else model.attention
    fixed = FixedPass(model, FixedShape(tokens, tokens, 1), attention)
    fixed.prepare(capture=bench.cuda)
    batch = probe_batch([(tokens, 0)], model.slots, model.config.shape.vocab, bench.seed)
    return lambda: fixed.run(batch).argmax(dim=-1)
