"""interference.csv: a long prompt and short ones in one pass, against each alone, packed and padded.

Packed, T is the sum of the prompts. Padded to a rectangle, a pass has as many rows of the long prompt's
length as it has requests; where that exceeds the largest pass, `padded_ms` is empty.
"""

from __future__ import annotations

from build_scripts.gpu.bench import Bench, Deadline, Table
from build_scripts.gpu.timing import timed

COLUMNS = (
    "model",
    "long_tokens",
    "shorts",
    "short_tokens",
    "long_ms",
    "shorts_ms",
    "mixed_ms",
    "padded_ms",
    "long_slower_ratio",
    "short_slower_ratio",
    "padded_to_packed_ratio",
)


def run(bench: Bench, table: Table, deadline: Deadline) -> str:
    scale, done = bench.scale, 0
    for long_tokens in scale.long_prompts:
        long_ms = _pass_ms(bench, [(long_tokens, 0)])
        for shorts in scale.shorts:
            if deadline.passed:
                return f"{done} rows, then out of time"
            short = [(scale.short_prompt, 0)] * shorts
            rectangle = [(long_tokens, 0)] * (shorts + 1)
            shorts_ms = _pass_ms(bench, short)
            mixed_ms = _pass_ms(bench, [(long_tokens, 0), *short])
            padded_ms = _pass_ms(bench, rectangle) if bench.takes(rectangle) else None
            table.add(
                model=bench.name,
                long_tokens=long_tokens,
                shorts=shorts,
                short_tokens=scale.short_prompt,
                long_ms=long_ms,
                shorts_ms=shorts_ms,
                mixed_ms=mixed_ms,
                padded_ms=padded_ms,
                long_slower_ratio=mixed_ms / long_ms,
                short_slower_ratio=mixed_ms / shorts_ms,
                padded_to_packed_ratio=None if padded_ms is None else padded_ms / mixed_ms,
            )
            done += 1
    return f"{done} rows"


def _pass_ms(bench: Bench, sizes: list[tuple[int, int]]) -> float:
    return timed(bench.eager(sizes), bench.device, spend_s=0.2).pass_ms
