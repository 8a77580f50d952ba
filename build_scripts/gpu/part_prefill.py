"""prefill.csv: T(L, B, H), in the columns that `plaserve calibrate --csv` reads.

Shapes come in tiers, so that a run that is cut off still has what a fit needs most: one request without
history, then several, then history, then the rest. Within a tier their order is random, so that a drift of
the clocks does not look like an effect of size.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from build_scripts.gpu.bench import Bench, Deadline, Scale, Table
from build_scripts.gpu.timing import timed

Shape = tuple[int, int, int]  # L, B, H


def run(bench: Bench, table: Table, deadline: Deadline) -> str:
    """Measure the grid; how much of it was done."""
    shapes = list(ordered_shapes(bench.scale, bench.seed))
    taken = [s for s in shapes if bench.takes([(s[0], s[2])] * s[1])]
    done = too_large = 0
    for new, batch, past in taken:
        if deadline.passed:
            break
        try:
            timing = timed(bench.eager([(new, past)] * batch), bench.device)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            too_large += 1
            continue
        table.add(
            model=bench.name,
            batch=batch,
            new_tokens=new,
            history=past,
            prefill_ms=timing.pass_ms,
            passes=len(timing.pass_s),
            fastest_ms=min(timing.pass_s) * 1e3,
            slowest_ms=max(timing.pass_s) * 1e3,
            wall_ms=timing.wall_ms,
            issue_ms=timing.issue_ms,
        )
        done += 1
    left = len(shapes) - len(taken)
    unfit = f"{left} more do not fit into the KV pool, {too_large} ran out of memory"
    return f"{done} of {len(taken)} shapes; {unfit}"


def ordered_shapes(scale: Scale, seed: int) -> Iterator[Shape]:
    """Every shape of the grid once, in the order to measure them in."""
    tiers: dict[int, list[Shape]] = {}
    for new in scale.prompts:
        for batch in scale.batches:
            if new * batch > scale.tokens_max:
                continue
            for past in scale.histories:
                tiers.setdefault(_tier(new, batch, past, scale), []).append((new, batch, past))
    order = random.Random(seed)
    for tier in sorted(tiers):
        yield from order.sample(tiers[tier], len(tiers[tier]))


def _tier(new: int, batch: int, past: int, scale: Scale) -> int:
    edges = {scale.batches[0], scale.batches[len(scale.batches) // 2], scale.batches[-1]}
    if past == 0:
        return 0 if batch == 1 else (1 if batch in edges else 3)
    if batch == 1:
        return 2
    return 4 if batch in edges and new <= 256 else 5
