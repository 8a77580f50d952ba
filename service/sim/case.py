"""A case: one point of a suite, in plain data. What arrives, on which engines, and how long a run may be.

Everything that a run depends on besides policy, rate and seed is in it, so that equal cases give equal
results and a result can be cached by it. `cases_of` reads cases from the tables of a TOML file; a wrong or
unknown key is an error that names it.

Where something happens at set times (bursts, flips, outages, speeds), the window must be told, because time
then does not scale with the rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from pydantic import TypeAdapter

from engines.models import load_model
from engines.simulated import SimulatedModel
from engines.simulated_settings import KINDS, Behaviour, Fault, Setting, engine_setting
from service.core.pricing import Pricer
from service.core.settings import SchedulerSettings
from service.core.types import InstanceSpec, Role
from service.sim.cluster import SimInstance
from service.sim.sources import Targets, block_tokens
from service.sim.tables import STRICT, checked, dotted
from service.sim.workload_spec import Arrivals, WorkloadSpec

BLOCK_TOKENS = 32  # of engines under workloads without block hashes: TensorRT-LLM's default


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a run may be.

    requests_max: arrivals of one run at the highest rate that is looked at, warm-up included.
    window_s: a measured window of this length at any rate; None: as long as the metric asks for.
    """

    requests_max: int = 1_000_000
    window_s: float | None = None


@dataclass(frozen=True, slots=True)
class Join:
    """An instance joins late."""

    instance: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Outage:
    """An instance is killed, and is back at `to_s`; None: never."""

    instance: int
    from_s: float
    to_s: float | None = None


@dataclass(frozen=True, slots=True)
class Speed:
    """From `from_s` on passes take `factor` times as long, on one instance or (None) on all: a power cap."""

    from_s: float
    factor: float
    instance: int | None = None


@dataclass(frozen=True, slots=True)
class PassFault:
    """Pass number `pass_number` of an instance fails; `fatal`: the engine with it."""

    instance: int
    pass_number: int
    fatal: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """See the module text.

    model: a name that `engines.models` knows, or a calibration file. engine: a kind of `engine_setting`.
    link_s: delay between front end and worker, each way.
    roles: how many instances of each role; empty: all mixed.
    model_error: the scheduler believes that passes take so many times as long, or (memory, compute): so many
        times on each side of the cost model. Engines, targets and metric keep to the model.
    cold_passes, cold_factor: the first passes after each start of an instance take so many times as long.
    seeds: of the scored runs. tuning_seed: of the runs that choose knobs, never a scored one.
    short_target_s, long_target_factor, long_target_offset_s: the targets of DESIGN 9.
    rates_per_s: run these rates, search nothing. A closed loop has no rate: one point each seed.
    settings: `SchedulerSettings` that differ from the default, for all policies.
    """

    name: str
    workload: WorkloadSpec
    model: str
    instances: int = 1
    engine: str = "packed"
    link_s: float = 0.0
    model_error: float | tuple[float, float] = 1.0
    roles: Mapping[Role, int] = field(default_factory=dict)
    joins: tuple[Join, ...] = ()
    outages: tuple[Outage, ...] = ()
    speeds: tuple[Speed, ...] = ()
    cold_passes: int = 0
    cold_factor: float = 1.0
    faults: tuple[PassFault, ...] = ()
    seeds: tuple[int, ...] = (1, 2, 3)
    tuning_seed: int = 1000
    short_target_s: float = 0.4
    long_target_factor: float = 3.0
    long_target_offset_s: float = 0.2
    limits: Limits = field(default_factory=Limits)
    rates_per_s: tuple[float, ...] = ()
    settings: Mapping[str, float | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name:
            raise ValueError(f"name must be given and hold no '/', got {self.name!r}")
        if self.instances < 1:
            raise ValueError(f"instances must be at least 1, got {self.instances}")
        if not 0.0 <= self.link_s < math.inf:
            raise ValueError(f"link_s must be finite and at least 0, got {self.link_s}")
        if any(not 0.0 < factor < math.inf for factor in self._errors):
            raise ValueError(f"model_error must be above 0 and finite, got {self.model_error}")
        if self.roles and sum(self.roles.values()) != self.instances:
            raise ValueError(f"roles: {sum(self.roles.values())} in all, but instances is {self.instances}")
        for name in ("joins", "outages", "speeds", "faults"):
            for item in getattr(self, name):
                number = item.instance
                if number is not None and not 0 <= number < self.instances:
                    raise ValueError(f"{name}: instance must be from 0 to {self.instances - 1}, got {number}")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or min(*self.seeds, self.tuning_seed) < 0:
            raise ValueError(f"seeds must be different, at least one and not negative, got {self.seeds}")
        if self.tuning_seed in self.seeds:
            raise ValueError(
                f"tuning_seed {self.tuning_seed} is one of seeds; knobs are not tuned on scored runs"
            )
        if any(not 0.0 < rate < math.inf for rate in self.rates_per_s):
            raise ValueError(f"rates_per_s must be above 0, got {self.rates_per_s}")
        if self.engine not in KINDS:
            raise ValueError(f"engine must be one of {', '.join(KINDS)}, got {self.engine!r}")
        load_model(self.model)
        self._check_limits()
        self.scheduler_settings()

    def _check_limits(self) -> None:
        if self.limits.requests_max < 100:
            raise ValueError(f"limits.requests_max must be at least 100, got {self.limits.requests_max}")
        window_s = self.limits.window_s
        if window_s is not None and not 0.0 < window_s < math.inf:
            raise ValueError(f"limits.window_s must be above 0, got {window_s}")
        if window_s is None and self.has_set_times:
            raise ValueError("limits.window_s must be given where something happens at set times")
        if self.closed and self.rates_per_s:
            raise ValueError("rates_per_s: a closed loop sets its own pace; leave them out")

    # --- what it is ---

    @property
    def closed(self) -> bool:
        """So many requests or sessions at a time; there is no rate."""
        return self.workload.concurrency > 0

    @property
    def open(self) -> bool:
        """Arrivals do not depend on answers."""
        return not self.closed and self.workload.arrivals is not Arrivals.SESSIONS

    @property
    def has_set_times(self) -> bool:
        """Something happens at a time that does not scale with the rate."""
        happens = (self.workload.bursts, self.workload.flips, self.joins, self.outages, self.speeds)
        return any(happens)

    @property
    def scales(self) -> bool:
        """A run at twice the rate has the same requests in half the time."""
        return self.open and not self.has_set_times

    @property
    def decodes(self) -> bool:
        return self.workload.output_tokens != 1

    # --- what it stands for ---

    def setting(self) -> Setting:
        """The engine of every instance, its blocks as large as the workload's hashes stand for."""
        size = block_tokens(self.workload) or BLOCK_TOKENS
        return engine_setting(load_model(self.model), self.engine, block_tokens=size)

    def targets(self) -> Targets:
        """Of the metric; alone is the predicted time on one of these engines, in the largest passes."""
        _, profiles, cost = self.setting()
        return Targets(
            Pricer(cost, profiles).request_s,
            self.short_target_s,
            self.long_target_factor,
            self.long_target_offset_s,
        )

    def scheduler_settings(self) -> SchedulerSettings:
        """The same for every policy, before its knobs. The bounds of the queue grow with the fleet."""
        base = SchedulerSettings()
        known = {item.name: item for item in fields(SchedulerSettings)}
        for key in self.settings:
            if key not in known:
                raise ValueError(f"settings: unknown key {key!r}; choose from {', '.join(known)}")
        own: dict[str, Any] = {key: type(getattr(base, key))(value) for key, value in self.settings.items()}
        return replace(
            base,
            **{
                "queue_requests_max": base.queue_requests_max * self.instances,
                "queue_tokens_max": base.queue_tokens_max * self.instances,
                "ttft_target_short_s": self.short_target_s,
                "ttft_target_long_factor": self.long_target_factor,
                "ttft_target_long_offset_s": self.long_target_offset_s,
                **own,
            },
        )

    def sim_instances(self) -> list[SimInstance]:
        """Fresh ones for one run."""
        setting = self.setting()
        roles = [role for role, count in self.roles.items() for _ in range(count)]
        return [
            self._instance(number, setting, roles[number] if roles else Role.MIXED)
            for number in range(self.instances)
        ]

    @property
    def _errors(self) -> tuple[float, float]:
        """Of the memory and of the compute side."""
        error = self.model_error
        return error if isinstance(error, tuple) else (error, error)

    def _instance(self, number: int, setting: Setting, role: Role) -> SimInstance:
        capabilities, profiles, cost = setting
        faults = {f.pass_number: Fault(f.fatal) for f in self.faults if f.instance == number}
        make: Callable[[], SimulatedModel] | None = None
        believed = cost if self._errors == (1.0, 1.0) else cost.corrected(*self._errors)
        if faults or believed is not cost:
            make = lambda: SimulatedModel(capabilities, profiles, cost, Behaviour(faults))  # noqa: E731
        return SimInstance(
            InstanceSpec(f"i{number}", capabilities, profiles, believed, role),
            make_model=make,
            up_s=next((join.at_s for join in self.joins if join.instance == number), 0.0),
            outages=tuple(
                sorted(
                    (outage.from_s, math.inf if outage.to_s is None else outage.to_s)
                    for outage in self.outages
                    if outage.instance == number
                )
            ),
            speed=tuple(sorted((s.from_s, s.factor) for s in self.speeds if s.instance in (None, number))),
            cold_passes=self.cold_passes,
            cold_factor=self.cold_factor,
        )


_CASES = TypeAdapter(tuple[Case, ...], config=STRICT)


def cases_of(tables: Sequence[Mapping[str, Any]]) -> tuple[Case, ...]:
    """The cases of a suite from its `[[case]]` tables. Raises ValueError naming case and key."""

    def name_of(path: tuple[Any, ...]) -> str:
        number, *key = path or ("",)
        name = tables[number].get("name", f"number {number}") if isinstance(number, int) else number
        return f"case {name}: {dotted(tuple(key))}" if key else f"case {name}"

    cases: tuple[Case, ...] = checked(_CASES, list(tables), name_of)
    names = [case.name for case in cases]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"case {twice[0]}: the name comes twice")
    return cases
