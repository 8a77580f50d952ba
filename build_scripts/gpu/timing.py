"""Time of passes on a device: by events on the device and by the host's clock, warm-up left out.

On CUDA `pass_s` lies between two events around the pass, so that it holds the gaps in which the device waits
for launches; `issue_s` is how long the host took to issue it; `wall_s` ends when the host knows it is done.
On a CPU all three are the same clock, and say nothing of a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

_SPEND_S = 0.3  # for the repeats of one shape
_REPEATS = 3, 12
_SLOW_S = 0.5  # a pass of this length is run twice


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of every counted pass, in order."""

    pass_s: tuple[float, ...]
    issue_s: tuple[float, ...]
    wall_s: tuple[float, ...]

    @property
    def pass_ms(self) -> float:
        return median(self.pass_s) * 1e3

    @property
    def issue_ms(self) -> float:
        return median(self.issue_s) * 1e3

    @property
    def wall_ms(self) -> float:
        return median(self.wall_s) * 1e3


def timed(run: Callable[[], Any], device: torch.device, *, spend_s: float = _SPEND_S) -> Timing:
    """Times of `run`: two passes to warm up and to know its length, then as many as `spend_s` allows."""
    run()
    estimate_s = _once(run, device)[2]
    least, most = _REPEATS
    repeats = 2 if estimate_s > _SLOW_S else max(least, min(most, int(spend_s / max(estimate_s, 1e-6))))
    passes = [_once(run, device) for _ in range(repeats)]
    return Timing(*(tuple(values) for values in zip(*passes, strict=True)))


def _once(run: Callable[[], Any], device: torch.device) -> tuple[float, float, float]:
    """(device, issue, wall) seconds of one pass."""
    if device.type != "cuda":
        start_s = time.perf_counter()
        run()
        wall_s = time.perf_counter() - start_s
        return wall_s, wall_s, wall_s
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    start_s = time.perf_counter()
    begin.record()
    run()
    end.record()
    issue_s = time.perf_counter() - start_s
    end.synchronize()
    wall_s = time.perf_counter() - start_s
    return begin.elapsed_time(end) / 1e3, issue_s, wall_s


def kernels(run: Callable[[], Any], device: torch.device) -> tuple[int, float]:
    """(kernels of one pass, milliseconds of all of them), by torch's profiler. On a CPU: operators.

    Raises RuntimeError where the profiler saw nothing (no right to read the device's counters).
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
    run()
    with profile(activities=activities) as seen:
        run()
        if cuda:
            torch.cuda.synchronize(device)
    wanted = DeviceType.CUDA if cuda else DeviceType.CPU
    found = [event for event in seen.events() if event.device_type == wanted]
    if cuda:
        found = [event for event in found if not event.name.startswith(("Memcpy", "Memset"))]
    if not found:
        raise RuntimeError("the profiler saw no kernels")
    return len(found), sum(event.time_range.elapsed_us() for event in found) / 1e3
