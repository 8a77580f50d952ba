"""Online correction of the cost model: what measured passes say of the times that were predicted.

Every prefill pass that ran as one forward gives a sample: the logarithm of the measured time over the one
that the believed model gives for what the pass really computed (not for what was planned: evicted blocks tell
nothing about speed). The believed model is the stated one with two factors (`CostModel.corrected`): one on
the memory side, which small passes pay, and one on the compute side, which large ones pay.

    level     of a class of samples: the median over instances of the median of each one's samples. One slow
              instance of several moves it by nothing that counts (of two, the faster one is believed);
              `outlier` looks after the slow one
    classes   passes in which memory, or compute, has the larger share of the time: below and above a T
    overall   both factors move by the mean level of the classes, and where these agree by that alone
    tilt      d = (y_m - y_c) delta / (delta^2 + RIDGE), delta the distance of the classes' mean shares: the
              least-squares step for two unknowns, held back where the classes are too much alike to tell

Windows of the last 16, 64 and 256 samples are looked at as they fill, so a large error is corrected within
16 passes and a small one when there is evidence: a level counts above `NOISE / sqrt(n)`, four standard
deviations of the median of n samples that are off by up to 10 %, and never below `HYSTERESIS`. L_m and the
knee depend on the ratio of the factors alone, and that moves by `TILT_MIN` at least or not at all.

A correction is for all instances of a kind (same capabilities, profiles and stated model), because what a
model has wrong it has wrong for all of them, and they learn as many times faster. An instance that was
calibrated by itself is a kind of its own. It is made of coefficients: a new model is published, which costs
nothing per price and keeps prices growing with tokens, and samples begin anew, beside the new model.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from engines.cost_model import CostModel, PassShape
from engines.types import Padding, Pass, PassKind, PassResult
from service.core.policy import Instance
from service.core.settings import SchedulerSettings

WARM_UP_PASSES = 8  # of each instance after it came up: caches, clocks, first use of a shape
WINDOWS = (16, 64, 256)  # samples
CLASS_SAMPLES_MIN = 4  # a class with fewer in a window is left out of it
ONE_SAMPLES_MIN = 32  # where all are of one instance, and the kind has others
NOISE = 0.4
HYSTERESIS = 0.02
TILT_MIN = 0.08
RIDGE = 0.05
AGREE = 0.1  # two middle instances that are no further apart are averaged


@dataclass(frozen=True, slots=True)
class Sample:
    """compute_share: see `CostModel.compute_share`. log_ratio: of measured over predicted time."""

    instance_id: str
    compute_share: float
    log_ratio: float


@dataclass(slots=True, eq=False)
class _Kind:
    """Instances that are alike. memory, compute: logarithms of the factors in `believed`."""

    stated: CostModel
    believed: CostModel
    memory: float = 0.0
    compute: float = 0.0
    members: dict[str, Instance] = field(default_factory=dict)
    warm_up: dict[str, int] = field(default_factory=dict)  # passes to go
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=WINDOWS[-1]))
    seen: int = 0  # samples since the model was published


class Corrections:
    """See the module text. Writes the prices of instances and nothing else."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._log_max = math.log(settings.cost_correction_max)
        self._kinds: dict[Hashable, _Kind] = {}
        self._kind_of: dict[str, _Kind] = {}  # by instance

    def joined(self, instance: Instance) -> None:
        """It is up: it is priced as the others of its kind are."""
        if not self._log_max:
            return
        cost = instance.spec.cost
        kind = self._kinds.setdefault(_key(instance), _Kind(cost, cost))
        self._kind_of[instance.instance_id] = kind
        kind.members[instance.instance_id] = instance
        kind.warm_up[instance.instance_id] = WARM_UP_PASSES
        if kind.believed is not kind.stated:
            _price([instance], kind)

    def left(self, instance: Instance) -> None:
        """It is gone; what was learnt goes with the last of a kind."""
        kind = self._kind_of.pop(instance.instance_id, None)
        if kind is None:
            return
        del kind.members[instance.instance_id], kind.warm_up[instance.instance_id]
        if not kind.members:
            del self._kinds[_key(instance)]

    def ran(self, instance: Instance, pass_: Pass, result: PassResult) -> Iterable[Instance]:
        """A pass is over. The instances that are priced anew because of it."""
        if not self._log_max or result.kind is not PassKind.PREFILL:
            return ()
        kind = self._kind_of[instance.instance_id]
        if kind.warm_up[instance.instance_id]:
            kind.warm_up[instance.instance_id] -= 1
            return ()
        sample = _sample(instance, pass_, result)
        if sample is None:
            return ()
        kind.samples.append(sample)
        kind.seen += 1
        for size in WINDOWS:
            if kind.seen % size == 0 and self._learn(kind, list(kind.samples)[-size:]):
                return kind.members.values()
        return ()

    def _learn(self, kind: _Kind, samples: Sequence[Sample]) -> bool:
        """Whether `samples` gave a new model, which is published."""
        step = step_of(samples, alone=len(kind.members) == 1)
        if step is None:
            return False
        memory, compute = (self._bounded(log) for log in (kind.memory + step[0], kind.compute + step[1]))
        if max(abs(memory - kind.memory), abs(compute - kind.compute)) <= HYSTERESIS:
            return False  # at the bound
        kind.memory, kind.compute = memory, compute
        kind.believed = kind.stated.corrected(math.exp(memory), math.exp(compute))
        kind.samples.clear()
        kind.seen = 0
        _price(kind.members.values(), kind)
        return True

    def _bounded(self, log: float) -> float:
        return min(max(log, -self._log_max), self._log_max)


def _price(instances: Iterable[Instance], kind: _Kind) -> None:
    factors, knee_tokens = (math.exp(kind.memory), math.exp(kind.compute)), kind.believed.knee_tokens()
    for instance in instances:
        instance.reprice(kind.believed, knee_tokens)
        instance.correction = factors


def step_of(samples: Sequence[Sample], *, alone: bool) -> tuple[float, float] | None:
    """How far the logarithms of the memory and the compute factor should move; None: nothing that counts.

    alone: the kind has one instance.
    """
    by_class: tuple[list[Sample], list[Sample]] = ([], [])
    for sample in samples:
        by_class[sample.compute_share >= 0.5].append(sample)
    classes = [of_class for of_class in by_class if _tells(of_class, alone)]
    if not classes:
        return None
    levels = [_level(of_class) for of_class in classes]
    limits = [_limit(len(of_class)) for of_class in classes]
    count = sum(map(len, classes))
    weight = len(classes[0]) / count  # of the first
    middle = weight * levels[0] + (1.0 - weight) * levels[-1]
    known = zip((*levels, middle), (*limits, _limit(count)), strict=True)
    if all(abs(level) <= limit for level, limit in known):
        return None
    if len(classes) == 1 or abs(levels[0] - levels[1]) <= math.hypot(*limits):
        return middle, middle
    shares = [_mean([sample.compute_share for sample in of_class]) for of_class in classes]
    delta = shares[1] - shares[0]
    tilt = (levels[0] - levels[1]) * delta / (delta * delta + RIDGE)
    if abs(tilt) < TILT_MIN:
        return middle, middle
    share = weight * shares[0] + (1.0 - weight) * shares[1]
    return middle + share * tilt, middle - (1.0 - share) * tilt


def _tells(samples: Sequence[Sample], alone: bool) -> bool:
    """Whether they are enough, and not those of one instance of several that may be slow itself."""
    of_one = not alone and len({sample.instance_id for sample in samples}) == 1
    return len(samples) >= (ONE_SAMPLES_MIN if of_one else CLASS_SAMPLES_MIN)


def _limit(count: int) -> float:
    """What the level of so many samples must exceed to count."""
    return max(HYSTERESIS, NOISE / math.sqrt(count))


def _level(samples: Iterable[Sample]) -> float:
    """The median over instances of their medians; the lower middle one where the two don't agree."""
    of_instance: dict[str, list[float]] = {}
    for sample in samples:
        of_instance.setdefault(sample.instance_id, []).append(sample.log_ratio)
    low, high = _middle([_mean(_middle(logs)) for logs in of_instance.values()])
    return (low + high) / 2.0 if high - low <= AGREE else low


def _middle(values: Sequence[float]) -> tuple[float, float]:
    """The two in the middle, the lower one first; of an odd number it is twice the same."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _sample(instance: Instance, pass_: Pass, result: PassResult) -> Sample | None:
    """None for a pass whose time tells nothing: in groups of layers, split by the engine, failed in part."""
    split = result.ran is not None and result.ran.iterations != 1
    if pass_.layer_blocks > 1 or split or not 0.0 < result.elapsed_s < math.inf:
        return None
    sizes: list[tuple[int, int]] = []
    parts = 0
    for item in result.items:
        if item.error is not None:
            return None
        if item.computed:
            sizes.append((item.computed, item.position - item.computed))
            parts += item.token is None
    if not sizes or min(sizes, key=lambda size: size[1])[1] < 0:
        return None
    profiles, cost = instance.spec.profiles, instance.pricer.cost
    unpadded = profiles.padding is Padding.NOTHING and not profiles.captured
    shape = PassShape.of(sizes) if unpadded else profiles.executed(sizes)  # what rides is beyond the limits
    if shape is None:
        return None
    log_ratio = math.log(result.elapsed_s / cost.pass_s(shape, parts))
    return Sample(instance.instance_id, cost.compute_share(shape, parts), log_ratio)


def _key(instance: Instance) -> Hashable:
    return instance.spec.capabilities, instance.spec.profiles, instance.spec.cost
