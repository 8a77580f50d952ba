"""sm_split.csv: a prefill pass and decode steps beside each other, each on its share of the SMs.

`sharing` is `green` for a split by green contexts (`build_scripts.gpu.green`), `streams` for two ordinary
streams on all SMs, for comparison. The SMs are those that the driver gave, which rounds.

Both sides run eager and are issued by one thread, prefill first; `overlap_ratio` says for which part of the
longer side both ran. `prefill_alone_ms` and `decode_alone_ms` are on the same share with nothing beside.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from build_scripts.gpu.bench import Bench, Deadline, Skip, Table
from build_scripts.gpu.green import NoGreenContexts, load_driver, split

COLUMNS = (
    "model",
    "sharing",
    "prefill_sms",
    "decode_sms",
    "prefill_tokens",
    "decode_requests",
    "decode_history",
    "prefill_alone_ms",
    "decode_alone_ms",
    "prefill_beside_ms",
    "decode_beside_ms",
    "overlap_ratio",
)
_DECODE_SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2)
_SM_STEP = 8  # shares are multiples of it on recent GPUs
_STEPS_MAX = 200

Lane = Callable[[], AbstractContextManager[None]]


def run(bench: Bench, table: Table, deadline: Deadline) -> str:
    if not bench.cuda:
        raise Skip("SM shares need CUDA")
    requests, history = bench.scale.split_decode
    prefill = bench.on_device([(bench.scale.split_prefill, 0)])
    decode = bench.on_device([(1, history)] * requests)
    for _ in range(3):
        prefill(), decode()
    torch.cuda.synchronize()
    total = torch.cuda.get_device_properties(bench.device).multi_processor_count
    lanes = stream_lane(torch.cuda.Stream()), stream_lane(torch.cuda.Stream())
    _row(bench, table, "streams", (total, total), lanes, (prefill, decode))
    try:
        driver = load_driver()
        for sms in shares(total):
            if deadline.passed:
                return "out of time"
            ours, others = split(driver, torch.cuda.current_device(), total, sms)
            lanes = _external_lane(others.stream), _external_lane(ours.stream)
            _row(bench, table, "green", (others.sms, ours.sms), lanes, (prefill, decode))
    except NoGreenContexts as reason:
        raise Skip(f"no shares of SMs: {reason}") from reason
    return ""


def shares(total: int) -> list[int]:
    """SMs for decode, multiples of the step, at least one step for each side."""
    rounded = {max(_SM_STEP, round(total * share / _SM_STEP) * _SM_STEP) for share in _DECODE_SHARES}
    return sorted(sms for sms in rounded if sms <= total - _SM_STEP)


def stream_lane(stream: Any) -> Lane:
    """Where work goes to `stream`."""

    @contextlib.contextmanager
    def lane() -> Iterator[None]:
        with torch.cuda.stream(stream):
            yield

    return lane


def _external_lane(handle: int) -> Lane:
    return stream_lane(torch.cuda.ExternalStream(handle))


def _row(
    bench: Bench,
    table: Table,
    sharing: str,
    sms: tuple[int, int],
    lanes: tuple[Lane, Lane],
    sides: tuple[Callable[[], Any], Callable[[], Any]],
) -> None:
    prefill_alone = _median_ms(lambda: _issue(lanes[0], sides[0], 1))
    decode_alone = _median_ms(lambda: _issue(lanes[1], sides[1], 4)) / 4
    steps = max(1, min(_STEPS_MAX, math.ceil(prefill_alone / decode_alone)))
    pairs = []
    for _ in range(3):
        torch.cuda.synchronize()
        one = _issue(lanes[0], sides[0], 1)
        two = _issue(lanes[1], sides[1], steps)
        torch.cuda.synchronize()
        pairs.append((_elapsed(one), _elapsed(two)))
    prefill_beside, decode_total = sorted(pairs)[1]
    table.add(
        model=bench.name,
        sharing=sharing,
        prefill_sms=sms[0],
        decode_sms=sms[1],
        prefill_tokens=bench.scale.split_prefill,
        decode_requests=bench.scale.split_decode[0],
        decode_history=bench.scale.split_decode[1],
        prefill_alone_ms=prefill_alone,
        decode_alone_ms=decode_alone,
        prefill_beside_ms=prefill_beside,
        decode_beside_ms=decode_total / steps,
        overlap_ratio=min(prefill_beside, decode_total) / max(prefill_beside, decode_total),
    )


def _issue(lane: Lane, side: Callable[[], Any], count: int) -> tuple[Any, Any]:
    """Issue `count` passes on a lane; events around them."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with lane():
        begin.record()
        for _ in range(count):
            side()
        end.record()
    return begin, end


def _elapsed(events: tuple[Any, Any]) -> float:
    elapsed: float = events[0].elapsed_time(events[1])
    return elapsed


def _median_ms(issue: Callable[[], tuple[Any, Any]]) -> float:
    times = []
    for _ in range(4):  # the first warms the lane
        torch.cuda.synchronize()
        events = issue()
        torch.cuda.synchronize()
        times.append(_elapsed(events))
    return sorted(times[1:])[1]
