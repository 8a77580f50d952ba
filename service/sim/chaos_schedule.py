"""Schedules of a chaos run: who asks, and what breaks when. Plain data, made from a seed.

A schedule says everything that a run depends on, so its JSON is a whole bug report: the same schedule gives
the same run, byte for byte, whatever the seed meant when it was made.

Faults, all in virtual seconds:

    die         the process is gone in the middle of what it does; a new one with an empty cache after `for_s`
    hang        its passes do not end for `for_s`; for ever where that is left out
    slow        its passes take `factor` times as long for `for_s`
    fail        its pass number `factor` fails, with the KV of its requests (`how` all) or without loss (none)
    cut         the link breaks, both sides know it (`how` reset), or nothing comes through and what was sent
                arrives when it heals (silent), for `for_s`
    repeat      all that the worker says of its passes is heard twice, for `for_s`
    restart     the scheduler is gone, and back after `for_s` without memory; workers keep their KV
    controller  it does not look for `for_s`
    role        somebody gives the instance the role `how`
    drain       the worker wants nothing new; it leaves when what it holds has ended, and a new one with an
                empty cache comes after `for_s` (`how` leaves), or it goes on as before after `for_s` (stays)
    stall       everything in the process stands still for `for_s`; then the clock has jumped
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from service.core.types import Role

POLICIES = ("plaserve", "fcfs", "laps_slides")
MODES = ("temporal", "spatial")
ENGINES = ("packed", "small_cpu", "trtllm_like")
KINDS = ("die", "hang", "slow", "fail", "cut", "repeat", "restart", "controller", "role", "stall", "drain")
_WEIGHTS = (3, 2, 3, 3, 3, 1, 1, 1, 2, 1, 2)
REQUESTS_MAX = 500


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. family: prompts of a family share their beginning; 0: none. cancel_s: when its client
    goes away, None: it stays. deadline_s: its gRPC deadline, a moment; None: none."""

    at_s: float
    prompt_tokens: int
    answer_tokens: int
    family: int = 0
    cancel_s: float | None = None
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class ChaosFault:
    """One fault; see the module text. for_s: None for ever. instance: a number, -1 where it is of none."""

    kind: str
    at_s: float
    instance: int = -1
    for_s: float | None = None
    factor: float = 1.0
    how: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"faults: kind {self.kind!r} is not known; choose from {', '.join(KINDS)}")


@dataclass(frozen=True, slots=True)
class Schedule:
    """A run. seed: where it came from, for its name only. kv_blocks: of each instance."""

    seed: int
    policy: str
    mode: str
    engine: str
    instances: int
    kv_blocks: int
    link_s: float
    stage_lead_s: float
    queue_requests_max: int
    asks: tuple[Ask, ...]
    faults: tuple[ChaosFault, ...]

    @property
    def last_s(self) -> float:
        """When the last thing of the schedule happens."""
        ends = [fault.at_s + (fault.for_s or 0.0) for fault in self.faults]
        return max([ask.at_s for ask in self.asks] + ends)


def to_json(schedule: Schedule) -> str:
    return json.dumps(asdict(schedule))


def from_json(text: str) -> Schedule:
    """Raises ValueError or TypeError where the text is no schedule."""
    fields: dict[str, Any] = json.loads(text)
    asks = tuple(Ask(**ask) for ask in fields.pop("asks"))
    faults = tuple(ChaosFault(**fault) for fault in fields.pop("faults"))
    return Schedule(**fields, asks=asks, faults=faults)


def make_schedule(seed: int) -> Schedule:
    """The schedule of a seed: most are small, one in forty has up to `REQUESTS_MAX` requests."""
    rng = random.Random(seed)
    engine = rng.choice(ENGINES)
    instances = rng.randint(2, 8)
    policy, mode = POLICIES[seed % 3], rng.choice(MODES)
    count = rng.randint(150, REQUESTS_MAX) if rng.random() < 0.025 else rng.randint(15, 90)
    asks = _asks(rng, engine, instances, count)
    span_s = max(asks[-1].at_s, 0.5)
    faults = [_fault(rng, instances, span_s) for _ in range(rng.randint(1, 8))]
    return Schedule(
        seed=seed,
        policy=policy,
        mode=mode,
        engine=engine,
        instances=instances,
        kv_blocks=rng.choice((120, 200, 500)),
        link_s=rng.choice((0.0, 0.0, 0.0005, 0.004)),
        stage_lead_s=rng.choice((0.0, 0.0, 0.02)),
        queue_requests_max=rng.choice((24, 200)),
        asks=tuple(asks),
        faults=tuple(sorted(faults, key=lambda fault: (fault.at_s, fault.kind, fault.instance))),
    )


def _asks(rng: random.Random, engine: str, instances: int, count: int) -> list[Ask]:
    """At 0.3 to 1.3 times of what the instances can do, roughly; a fifth of the clients go away."""
    request_s = 0.15 if engine == "small_cpu" else 0.06
    gap_s = request_s / instances / rng.uniform(0.3, 1.3)
    asks: list[Ask] = []
    now_s = 0.0
    for _ in range(count):
        now_s += rng.expovariate(1.0 / gap_s) if rng.random() < 0.9 else 0.0
        long = rng.random() < 0.15
        prompt = rng.randint(300, 2500) if long else min(250, int(rng.lognormvariate(3.5, 1.0)) + 1)
        cancel_s = now_s + rng.expovariate(5.0) if rng.random() < 0.2 else None
        deadline_s = now_s + rng.uniform(0.05, 2.0) if rng.random() < 0.1 else None
        answer = rng.choice((1, 1, 2, 3, 6))
        asks.append(Ask(now_s, prompt, answer, rng.randint(0, 4), cancel_s, deadline_s))
    return asks


def _fault(rng: random.Random, instances: int, span_s: float) -> ChaosFault:
    kind = rng.choices(KINDS, _WEIGHTS)[0]
    at_s, number = rng.uniform(0.0, span_s), rng.randrange(instances)
    brief_s = rng.uniform(0.01, 1.0) * rng.choice((0.1, 1.0, 3.0))
    make: Mapping[str, ChaosFault] = {
        "die": ChaosFault(kind, at_s, number, None if rng.random() < 0.3 else brief_s),
        "hang": ChaosFault(kind, at_s, number, None if rng.random() < 0.5 else brief_s),
        "slow": ChaosFault(kind, at_s, number, brief_s * 4, rng.uniform(3.0, 20.0)),
        "fail": ChaosFault(
            kind, 0.0, number, factor=float(rng.randint(1, 20)), how=rng.choice(("all", "none"))
        ),
        "cut": ChaosFault(kind, at_s, number, brief_s, how=rng.choice(("reset", "silent"))),
        "repeat": ChaosFault(kind, at_s, number, brief_s),
        "restart": ChaosFault(kind, at_s, for_s=brief_s),
        "controller": ChaosFault(kind, at_s, for_s=brief_s * 5),
        "role": ChaosFault(kind, at_s, number, how=rng.choice([role.value for role in Role])),
        "stall": ChaosFault(kind, at_s, for_s=brief_s * rng.choice((1.0, 10.0))),
        "drain": ChaosFault(kind, at_s, number, brief_s, how=rng.choice(("leaves", "stays"))),
    }
    return make[kind]
