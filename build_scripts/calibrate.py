"""Measure what passes cost on this machine and fit the cost model to it.

Prefill sizes over history are measured, and the small T that decode steps map to. Rounds visit all shapes
in a new random order each, so that a slow drift of the machine (temperature, its neighbours) spreads over
all shapes alike. Short passes are repeated within a visit, slow ones measured once. Time is bounded: rounds
until the budget is spent, two at least, one on a very slow machine.

Disturbance only ever adds time. What a pass waited while other processes had its core is known to the kernel
and subtracted. What its core lost to a busy sibling is not: therefore the lower quartile of a shape's times
is its sample, which on a quiet machine is close to the median.
"""

from __future__ import annotations

import csv
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from build_scripts.progress import Progress, Silent
from build_scripts.spec import CALIBRATION_S, QUICK_CALIBRATION_S, THREADS_MAX, BuildError
from engines.bundle import Bundle, Host
from engines.cost_fit import FitResult, Sample, fit
from engines.profiles import Profiles

MEASURED = "measured.json"  # the fit and the limits of the engine that was measured

Measure = Callable[[int, int], float]  # (new tokens, history tokens) -> seconds of one pass
Shape = tuple[int, int]

_QUICK_TOKENS_MAX = 512
_ATTENTION_MAX = 5e6  # T (T + 2H) beyond which a pass over history takes seconds and is not measured
_ROUNDS_MAX = 25
_VISIT_S = 0.15  # short passes are repeated for about this long in a visit
_VISIT_PASSES_MAX = 5
_SLOW_SHARE = 0.03  # of the budget: slower passes are measured in the first round only
_OVERRUN = 3.0  # times the budget, waiting included, after which one round must do


@dataclass(frozen=True, slots=True)
class Calibration:
    """Every time that was measured, seconds without waiting, and the share of all time that was waited."""

    times_s: dict[Shape, list[float]]
    waited_share: float

    @property
    def samples(self) -> tuple[Sample, ...]:
        return tuple(Sample(t, h, _lower_quartile(times)) for (t, h), times in sorted(self.times_s.items()))


def calibration_profiles(profiles: Profiles, *, quick: bool) -> Profiles:
    """What the engine loads to be measured: all profiles, or for a quick calibration fewer T-classes."""
    if not quick or len(profiles.t_classes) <= 3:
        return profiles
    small = [t for t in profiles.t_classes if t <= _QUICK_TOKENS_MAX] or [profiles.t_classes[0]]
    return replace(profiles, t_classes=tuple(sorted({*small[::2], small[-1]})))


def shapes_of(profiles: Profiles) -> tuple[Shape, ...]:
    """The shapes to measure: all T-classes, every other one of a long list over all histories."""
    h_classes = profiles.h_classes or (0,)
    over_history = profiles.t_classes[:: 2 if len(profiles.t_classes) > 8 else 1]
    shapes = {(t, h_classes[0]) for t in profiles.t_classes} | {
        (t, h) for t in over_history for h in h_classes
    }
    attention_max = max(_ATTENTION_MAX, profiles.tokens_max * (profiles.tokens_max + 2 * h_classes[0]))
    return tuple(sorted((t, h) for t, h in shapes if t * (t + 2 * h) <= attention_max))


def measure_shapes(
    measure: Measure,
    shapes: Sequence[Shape],
    budget_s: float,
    *,
    seed: int = 0,
    update: Callable[[float], None] = lambda share: None,
) -> Calibration:
    """Times of every shape, in rounds (module text). `update` hears the share of the budget that is spent."""
    times_s: dict[Shape, list[float]] = {shape: [] for shape in shapes}
    order = random.Random(seed)
    waited_s = measured_s = 0.0
    start_s = time.monotonic()

    def result() -> Calibration:
        return Calibration(times_s, waited_s / (waited_s + measured_s))

    for round_ in range(_ROUNDS_MAX):
        kept = [s for s in shapes if round_ == 0 or min(times_s[s]) < _SLOW_SHARE * budget_s]
        for shape in order.sample(kept, len(kept)):
            late = time.monotonic() - start_s > _OVERRUN * budget_s
            if (round_ >= 2 and measured_s > budget_s) or (round_ >= 1 and late):
                return result()
            update(min(1.0, measured_s / budget_s))
            for _ in range(1 if not times_s[shape] else _repeats(times_s[shape][-1])):
                time_s, wait_s = _undisturbed(measure, shape)
                times_s[shape].append(time_s)
                measured_s += time_s
                waited_s += wait_s
    return result()


def measure_bundle(
    bundle: Bundle,
    *,
    threads: int | None = None,
    budget_s: float | None = None,
    quick: bool = False,
    progress: Progress | None = None,
) -> tuple[Calibration, str]:
    """Measure the engine of a bundle anew: (times, where they come from). The bundle stays as it is.

    threads: None takes those it was built for. budget_s: None takes that of a build. Raises BuildError
    naming a bad option.
    """
    from engines.openvino_cpu import OpenVinoCpuEngine

    backend, progress = bundle.manifest.backend, progress or Silent()
    threads = backend.threads if threads is None else threads
    if not 1 <= threads <= THREADS_MAX:
        raise BuildError(f"threads must be between 1 and {THREADS_MAX}, got {threads}")
    budget_s = (QUICK_CALIBRATION_S if quick else CALIBRATION_S) if budget_s is None else budget_s
    profiles = calibration_profiles(bundle.manifest.profiles, quick=quick)
    shapes = shapes_of(profiles)
    progress.begin("warm", "loading the engine")
    engine = OpenVinoCpuEngine.load(
        bundle.path,
        profiles,
        threads=threads,
        precision=backend.precision,
        progress=lambda done, count: progress.update(done / count, f"profile {done} of {count}"),
    )
    try:
        progress.end(f"{len(shapes)} profiles to measure")
        progress.begin("measure", f"for about {budget_s:.0f} s")
        calibration = measure_shapes(engine.measure, shapes, budget_s, update=progress.update)
        progress.end(f"{calibration.waited_share:.0%} of the time lost to other processes")
    finally:
        engine.close()
    return calibration, measured_origin(backend.name, threads, backend.precision)


def measured_origin(backend: str, threads: int, precision: str) -> str:
    """Day, machine and engine of a measurement that was made just now."""
    host = Host.current(backend)
    return (
        f"measured {datetime.now(UTC):%Y-%m-%d} on {host.cpu.model_name}, {threads} thread(s), "
        f"{precision}, openvino {host.library_version}"
    )


def fit_calibration(calibration: Calibration, origin: str) -> FitResult:
    return fit(calibration.samples, origin=origin)


def write_csv(path: Path, model: str, calibration: Calibration, result: FitResult) -> None:
    """The samples in the columns of `engines.cost_fit.read_csv`, with what the fit says beside them."""
    head = ["model", "batch", "new_tokens", "history", "prefill_ms"]
    beside = ["passes", "fastest_ms", "slowest_ms", "fitted_ms"]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*head, *beside])
        for sample in calibration.samples:
            times = calibration.times_s[(sample.new_tokens, sample.history)]
            figures = (sample.time_s, min(times), max(times), result.model.pass_s(sample.shape))
            middle, fastest, slowest, fitted = (f"{value * 1e3:.4f}" for value in figures)
            row = [model, sample.batch, sample.new_tokens, sample.history, middle]
            writer.writerow([*row, len(times), fastest, slowest, fitted])


def _repeats(last_s: float) -> int:
    return max(1, min(_VISIT_PASSES_MAX, int(_VISIT_S / max(last_s, 1e-6))))


def _undisturbed(measure: Measure, shape: Shape) -> tuple[float, float]:
    """(seconds of one pass without waiting for a core, seconds waited)."""
    before = _waiting_s()
    time_s = measure(*shape)
    # The pass ends with its slowest thread, so the thread that waited longest is what it was held up by.
    waits = [wait_s - before.get(thread, 0.0) for thread, wait_s in _waiting_s().items()]
    waited_s = min(max(waits, default=0.0), 0.9 * time_s)
    return time_s - waited_s, waited_s


def _waiting_s() -> dict[str, float]:
    """Seconds that each thread of this process was ready to run but had no core; empty if not known."""
    waiting: dict[str, float] = {}
    try:
        for thread in os.scandir("/proc/self/task"):
            # running ns, waiting ns, time slices
            waiting[thread.name] = int(Path(thread.path, "schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):  # another system, or a thread that ended meanwhile
        pass
    return waiting


def _lower_quartile(times: Sequence[float]) -> float:
    return sorted(times)[(len(times) - 1) // 4]
