"""Schedules of chaos on real processes: who asks, and what breaks when. Plain data, made from a seed.

Seconds are wall seconds after the start of the load. The words are those of `service.sim.chaos_schedule`:

    die     kill -9; started again after `for_s`
    hang    SIGSTOP, and SIGCONT after `for_s`
    slow    for `for_s` it runs one part in `factor` of the time (SIGSTOP and SIGCONT in turn)
    drain   `plaserve fleet drain`; what has ended by itself is started again after `for_s`
    role    `plaserve fleet move` to `how`
    cut     for `for_s` nothing comes through to it or from it: of all (`how` network), or of etcd (etcd)
    delay   what goes to etcd comes `factor` seconds late, for `for_s`
    clock   its time of day jumps by `factor` seconds, and back after `for_s`
    stall   every process of the fleet stands still for `for_s`

Targets are processes by name (w0, s1, f0, c1, etcd), or who leads at that moment: `scheduler`, `controller`.
Which process that is, and what each request met, differs from run to run: the schedule is what repeats.

The first two faults of a seed go through all variants in turn, so that 16 seeds in a row have every one; the
others are drawn.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from typing import Any

from service.sim.chaos_schedule import Ask

KINDS = ("die", "hang", "slow", "drain", "role", "cut", "delay", "clock", "stall")
HOW = {"cut": ("network", "etcd"), "role": ("sp", "lp", "mixed")}
VARIANTS = (  # kind, target or what kind of process it is, how
    ("die", "worker", ""), ("hang", "scheduler", ""), ("cut", "worker", "network"), ("slow", "etcd", ""),
    ("die", "scheduler", ""), ("hang", "worker", ""), ("cut", "scheduler", "etcd"), ("slow", "worker", ""),
    ("drain", "worker", ""), ("cut", "scheduler", "network"), ("hang", "frontend", ""), ("die", "etcd", ""),
    ("clock", "worker", ""), ("role", "worker", ""), ("hang", "etcd", ""), ("stall", "all", ""),
    ("die", "controller", ""), ("slow", "frontend", ""), ("delay", "etcd", ""), ("die", "frontend", ""),
    ("cut", "frontend", "network"), ("slow", "scheduler", ""), ("cut", "worker", "etcd"),
    ("hang", "controller", ""), ("clock", "scheduler", ""), ("cut", "frontend", "etcd"),
    ("die", "scheduler", ""), ("role", "worker", ""), ("die", "worker", ""), ("hang", "worker", ""),
    ("cut", "controller", "network"),
)  # fmt: skip
LOAD_S = 10.0
FAULT_S_MIN, FAULT_S_MAX = 1.0, 8.0
LONG_S = 6.0  # above any lease here
LONGER_S = 18.0  # above what a request may wait for another scheduler
TRIES = 20  # to find a time at which no other fault has the process


@dataclass(frozen=True, slots=True)
class RealFault:
    """One fault; see the module text. for_s: 0 where it does not last."""

    kind: str
    at_s: float
    target: str
    for_s: float = 0.0
    factor: float = 1.0
    how: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"faults: kind {self.kind!r} is not known; choose from {', '.join(KINDS)}")
        known = HOW.get(self.kind, ("",))
        if self.how not in known:
            raise ValueError(f"faults: {self.kind} needs how to be {' or '.join(known)}, got {self.how!r}")
        if self.at_s < 0.0 or self.for_s < 0.0:
            raise ValueError(f"faults: at_s and for_s must be at least 0, got {self.at_s} and {self.for_s}")
        if self.kind == "slow" and not 1.0 < self.factor <= 100.0:
            raise ValueError(f"faults: factor of slow must be above 1 and at most 100, got {self.factor}")

    @property
    def end_s(self) -> float:
        return self.at_s + self.for_s

    def __str__(self) -> str:
        """For people, in a line."""
        words = [f"{self.at_s:.1f} s:", self.kind, self.target, self.how]
        words += [f"for {self.for_s:.1f} s"] if self.for_s else []
        words += [f"x {self.factor:.1f}"] if self.kind == "slow" else []
        words += [f"{self.factor:+.2g} s"] if self.kind in ("delay", "clock") else []
        return " ".join(word for word in words if word)


@dataclass(frozen=True, slots=True)
class RealSchedule:
    """A run. seed: where it came from, for its name only. scale: how many times slower than modelled the
    engines run. Two schedulers, front ends and controllers each, and one etcd."""

    seed: int
    mode: str
    workers: int
    scale: float
    lease_ttl_s: float
    asks: tuple[Ask, ...]
    faults: tuple[RealFault, ...]

    @property
    def last_s(self) -> float:
        """When the last thing of the schedule happens."""
        return max([ask.at_s for ask in self.asks] + [fault.end_s for fault in self.faults])

    @property
    def needs_network(self) -> bool:
        """Whether a process is cut off from everything, for which it needs a network of its own."""
        return any(fault.kind == "cut" and fault.how == "network" for fault in self.faults)

    @property
    def clocks(self) -> frozenset[str]:
        """Processes whose time of day jumps."""
        return frozenset(fault.target for fault in self.faults if fault.kind == "clock")


def to_json(schedule: RealSchedule) -> str:
    return json.dumps(asdict(schedule))


def from_json(text: str) -> RealSchedule:
    """Raises ValueError or TypeError where the text is no schedule."""
    values: dict[str, Any] = json.loads(text)
    asks = tuple(Ask(**ask) for ask in values.pop("asks"))
    faults = tuple(RealFault(**fault) for fault in values.pop("faults"))
    return RealSchedule(**values, asks=asks, faults=faults)


def make_schedule(seed: int) -> RealSchedule:
    rng = random.Random(seed)
    half = len(VARIANTS) // 2
    variants = [VARIANTS[seed % len(VARIANTS)], VARIANTS[(seed + half) % len(VARIANTS)]]
    variants += rng.choices(VARIANTS, k=rng.randint(0, 3))
    workers = rng.choice((3, 3, 4))
    networks = ("cut", "network") in {(kind, how) for kind, _, how in variants}
    faults: list[RealFault] = []
    for variant in variants:
        for _ in range(TRIES):
            fault = _fault(rng, variant, workers, networks)
            if not any(_clash(fault, other) for other in faults):
                faults.append(fault)
                break
    return RealSchedule(
        seed=seed,
        mode=rng.choice(("spatial", "spatial", "auto")),
        workers=workers,
        scale=2.0,
        lease_ttl_s=rng.choice((3.0, 4.0)),
        asks=tuple(_asks(rng)),
        faults=tuple(sorted(faults, key=lambda fault: (fault.at_s, fault.kind, fault.target))),
    )


def _clash(one: RealFault, other: RealFault) -> bool:
    """Whether both are about the same process at the same time."""
    apart = one.end_s < other.at_s or other.end_s < one.at_s
    same = one.target == other.target or "all" in (one.target, other.target)
    return same and not apart


def _asks(rng: random.Random) -> list[Ask]:
    """4 to 12 a second for `LOAD_S`; a fifth of the clients go away, a tenth has a deadline."""
    gap_s = 1.0 / rng.uniform(4.0, 12.0)
    asks: list[Ask] = []
    now_s = rng.expovariate(1.0 / gap_s)
    while now_s < LOAD_S:
        long = rng.random() < 0.15
        prompt = rng.randint(1500, 6000) if long else min(500, int(rng.lognormvariate(3.5, 1.0)) + 16)
        cancel_s = now_s + rng.expovariate(2.0) if rng.random() < 0.2 else None
        deadline_s = now_s + rng.uniform(0.05, 3.0) if rng.random() < 0.1 else None
        answer = rng.choice((1, 1, 2, 3, 6, 20))
        asks.append(Ask(now_s, prompt, answer, rng.randint(0, 4), cancel_s, deadline_s))
        now_s += rng.expovariate(1.0 / gap_s)
    return asks


def _fault(rng: random.Random, variant: tuple[str, str, str], workers: int, networks: bool) -> RealFault:
    kind, target, how = variant
    at_s = rng.uniform(FAULT_S_MIN, FAULT_S_MAX)
    brief = rng.random() < 0.3
    for_s = rng.uniform(0.2, 1.5) if brief else rng.uniform(2.5, LONG_S)
    factor = 1.0
    number = rng.randrange(workers)
    if target == "worker":
        target = f"w{number}"
    elif target == "frontend":
        target = f"f{number % 2}"
    elif kind == "clock":
        target = f"s{number % 2}"  # from its start on it must be one that can
    elif target == "scheduler" and (kind, how) in (("hang", ""), ("cut", "network")) and rng.random() < 0.4:
        for_s = LONGER_S
    if kind == "role":
        how, for_s = rng.choice(HOW["role"]), 0.0
    elif kind == "slow":
        factor = rng.uniform(3.0, 12.0)
    elif kind == "delay":
        factor = rng.uniform(0.1, 0.8)
    elif kind == "clock":  # certificates are not valid before today
        factor = rng.choice((3600.0, 86_400.0, 3600.0 if networks else -3600.0))
    elif kind == "stall":
        for_s = rng.uniform(0.2, 5.0)
    elif kind == "die" and target != "etcd":
        for_s = rng.uniform(0.1, 3.0)
    return RealFault(kind, at_s, target, for_s, factor, how)
