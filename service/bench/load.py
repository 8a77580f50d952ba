"""Load against a service that runs already, with its books beside those of the clients.

A test of strength and honesty, not a comparison: chats are always new, documents come over and over and may
be answered from the prefix cache. Lengths are estimated, as the service's tokenizer may not be at hand.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from service.bench.arms import settled, status
from service.bench.books import Balance, ServiceBooks, balance
from service.bench.loadgen import Ending, LoadGenerator, Observation
from service.bench.render import ms, percent
from service.bench.report import arm_json, without_nan
from service.bench.stats import ArmFigures, Round, figures
from service.bench.tokens import approximate_tokens
from service.bench.workload import SHORT_TARGET_S, Label, Mix, Prompt, Workload

LONG_TARGET_S = 5.0  # without a cost model at hand there is no time alone to scale from
CHANNELS_MAX = 8  # one connection carries about 100 streams well


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """`rate_rps` None: a closed loop of `clients`; else an open loop. Times in seconds."""

    address: str
    clients: int = 200
    rate_rps: float | None = None
    seconds: float = 60.0
    cancel_ratio: float = 0.0
    timeout_s: float = 60.0
    seed: int = 1
    mix: Mix = field(default_factory=lambda: Mix(document_ratio=0.0))

    def __post_init__(self) -> None:
        if not 1 <= self.clients <= 10_000:
            raise ValueError(f"clients must be between 1 and 10000, got {self.clients}")
        if self.rate_rps is not None and not 0.0 < self.rate_rps <= 10_000.0:
            raise ValueError(f"rate must be above 0 and at most 10000 requests/s, got {self.rate_rps}")
        if not 0.0 < self.seconds <= 3600.0:
            raise ValueError(f"seconds must be above 0 and at most 3600, got {self.seconds}")
        if not 0.0 <= self.cancel_ratio <= 1.0:
            raise ValueError(f"cancel must lie in [0, 1], got {self.cancel_ratio}")
        if not 0.0 < self.timeout_s <= 3600.0:
            raise ValueError(f"timeout must be above 0 and at most 3600 seconds, got {self.timeout_s}")


@dataclass(frozen=True, slots=True)
class LoadResult:
    observations: tuple[Observation, ...]
    figures: ArmFigures
    balance: Balance

    @property
    def failed(self) -> list[Observation]:
        return [seen for seen in self.observations if seen.ending is Ending.FAILED]


async def run_load(settings: LoadSettings) -> LoadResult:
    """Load the service, let it settle, compare the books. Raises AioRpcError when it can't be reached."""
    before = ServiceBooks.of(await status(settings.address))
    channels = min(CHANNELS_MAX, -(-settings.clients // 25))
    async with LoadGenerator(settings.address, timeout_s=settings.timeout_s, channels=channels) as generator:
        observations = await _send(settings, generator)
    await settled(settings.address)
    after = ServiceBooks.of(await status(settings.address))
    measured = figures([Round(tuple(observations))])
    return LoadResult(tuple(observations), measured, balance(observations, before, after))


async def _send(settings: LoadSettings, generator: LoadGenerator) -> list[Observation]:
    workload = Workload(settings.mix, settings.seed, approximate_tokens)
    if settings.rate_rps is not None:
        return await generator.open_loop(workload.round(0, settings.rate_rps, settings.seconds, _target_s))
    prompts = workload.endless(_target_s)
    return await generator.closed_loop(
        prompts, settings.clients, settings.seconds, settings.cancel_ratio, settings.seed
    )


def _target_s(prompt: Prompt) -> float:
    return SHORT_TARGET_S if prompt.label is Label.SHORT else LONG_TARGET_S


def render_load(result: LoadResult) -> RenderableType:
    """Latency by lane, then the two books side by side."""
    return Group(_latency(result.figures), _books(result.balance), _verdict(result.balance))


def _latency(measured: ArmFigures) -> Table:
    table = Table("lane", "requests", "mean", "p50", "p90", "p99", "in time", title="Time to first token")
    for label, lane in measured.lanes.items():
        if lane.arrived:
            ttft = lane.ttft_s
            times = (ms(value) for value in (ttft.mean, ttft.p50, ttft.p90, ttft.p99))
            table.add_row(label, f"{lane.arrived:,}", *times, percent(lane.attainment))
    table.caption = (
        f"{measured.requests_per_s:,.1f} completed requests/s, {measured.decode_tokens_per_s:,.0f} decode "
        f"tokens/s, ITL p99 {ms(measured.itl_s_p99)}"
    )
    return table


def _books(found: Balance) -> Table:
    table = Table("", "clients", "service", title="Books")
    refused, cancelled = found.client[Ending.REFUSED], found.client[Ending.CANCELLED]
    rest = sum(found.service.outcomes.values()) - found.service.completed - found.service.refused
    table.add_row("sent / submitted", f"{found.sent:,}", f"{found.service.submitted:,}")
    table.add_row("completed", f"{found.client[Ending.COMPLETED]:,}", f"{found.service.completed:,}")
    table.add_row("refused", f"{refused:,}", f"{found.service.refused:,}")
    table.add_row("cancelled, failed", f"{cancelled + found.client[Ending.FAILED]:,}", f"{rest:,}")
    return table


def _verdict(found: Balance) -> Text:
    if not found.faults:
        return Text("The books balance.", style="green")
    return Text("\n".join(("The books do not balance:", *found.faults)), style="red")


def load_json(result: LoadResult) -> dict[str, Any]:
    """Figures of the clients and both books."""
    service = result.balance.service
    document = {
        "clients": arm_json(result.figures),
        "service": {**asdict(service), "completed": service.completed, "refused": service.refused},
        "faults": list(result.balance.faults),
    }
    cleaned: dict[str, Any] = without_nan(document)
    return cleaned
