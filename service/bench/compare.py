"""Policies against each other, on the same requests.

Every arm serves the same bundle with the same settings but the policy. Load comes in rounds; within a round
each arm gets the same prompts at the same offsets, one arm after the other, and the order turns round from
round to round (a b, b a, a b ...), so that a drift of the machine does not favour one of them. Between two
turns the service is left to settle. Prompts are never used twice, so no cache carries from round to round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from engines.cost_model import CostModel
from engines.profiles import Profiles
from service.bench.arms import settled
from service.bench.capacity import Demand, demand, isolated_prefill_s
from service.bench.loadgen import LoadGenerator, Observation
from service.bench.stats import Round
from service.bench.workload import CountTokens, Label, Mix, PlannedRequest, Prompt, Workload, target_s

PROBE_PROMPTS = 200  # enough for the mean demand; no prompt of a probe is ever sent
PROBE_SEED_OFFSET = 1_000_003
WARM_UP_CHATS = 4


@dataclass(frozen=True, slots=True)
class Served:
    """What the generator must know of the model behind a service: what bundles carry."""

    cost: CostModel
    profiles: Profiles
    count_tokens: CountTokens


@dataclass(frozen=True, slots=True)
class Settings:
    """A comparison. `seconds` is one turn: the time under load is rounds x policies x seconds."""

    policies: tuple[str, ...] = ("fcfs", "plaserve")
    rounds: int = 4
    seconds: float = 25.0
    load_ratio: float = 0.7
    seed: int = 1
    timeout_s: float = 60.0
    mix: Mix = field(default_factory=Mix)

    def __post_init__(self) -> None:
        if not self.policies or len(set(self.policies)) != len(self.policies):
            raise ValueError(f"policies: name at least one, each once, got {','.join(self.policies)!r}")
        if not 1 <= self.rounds <= 1000:
            raise ValueError(f"rounds must be between 1 and 1000, got {self.rounds}")
        if not 1.0 <= self.seconds <= 3600.0:
            raise ValueError(f"seconds must be between 1 and 3600, got {self.seconds}")


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is decided before the first request goes out."""

    settings: Settings
    demand: Demand
    warm_up: tuple[PlannedRequest, ...]
    rounds: tuple[tuple[PlannedRequest, ...], ...]

    def turns(self) -> Iterator[tuple[int, str]]:
        """(round, policy) in the order in which they run."""
        for index in range(len(self.rounds)):
            policies = self.settings.policies
            for policy in policies if index % 2 == 0 else reversed(policies):
                yield index, policy


def make_plan(settings: Settings, served: Served) -> Plan:
    """Draw the whole load. Raises ValueError when the profiles or the text at hand can't bear it."""

    def target(prompt: Prompt) -> float:
        if prompt.label is Label.SHORT:
            return target_s(prompt, 0.0)
        return target_s(prompt, isolated_prefill_s(prompt.tokens, served.cost, served.profiles))

    mix = settings.mix
    probe = Workload(mix, settings.seed + PROBE_SEED_OFFSET, served.count_tokens).sample(PROBE_PROMPTS)
    needed = demand(
        [prompt.tokens for prompt in probe], mix.max_tokens, settings.load_ratio, served.cost, served.profiles
    )
    workload = Workload(mix, settings.seed, served.count_tokens)
    warm_prompts = [workload.chat() for _ in range(WARM_UP_CHATS)] + [workload.document()]
    warm_up = tuple(
        PlannedRequest(f"warm-{n}", prompt, 0.5 * n, target(prompt), mix.max_tokens)
        for n, prompt in enumerate(warm_prompts)
    )
    rounds = tuple(
        workload.round(index, needed.rate_rps, settings.seconds, target) for index in range(settings.rounds)
    )
    return Plan(settings, needed, warm_up, rounds)


@dataclass(frozen=True, slots=True)
class Turn:
    """Where a comparison stands, for whoever shows progress."""

    number: int
    count: int
    round_index: int
    policy: str
    requests: int


async def run_plan(
    plan: Plan,
    addresses: Mapping[str, str],
    on_turn: Callable[[Turn], None] = lambda _: None,
    on_end: Callable[[Observation], None] = lambda _: None,
) -> dict[str, list[Round]]:
    """Warm every arm up, then run all turns; the rounds of each policy, in round order."""
    for address in addresses.values():
        await _turn(address, plan.warm_up, plan.settings.timeout_s, lambda _: None)
    results: dict[str, list[Round]] = {policy: [] for policy in plan.settings.policies}
    turns = list(plan.turns())
    for number, (index, policy) in enumerate(turns, 1):
        requests = plan.rounds[index]
        on_turn(Turn(number, len(turns), index, policy, len(requests)))
        seen = await _turn(addresses[policy], requests, plan.settings.timeout_s, on_end)
        results[policy].append(Round(tuple(seen)))
    return results


async def _turn(
    address: str,
    requests: Sequence[PlannedRequest],
    timeout_s: float,
    on_end: Callable[[Observation], None],
) -> list[Observation]:
    async with LoadGenerator(address, timeout_s=timeout_s) as generator:
        seen = await generator.open_loop(requests, on_end)
    await settled(address)
    return seen
