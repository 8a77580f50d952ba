"""The waiting window: how long should shorts be gathered? (LAPS Fig. 5, slides.)

Every scene is run with windows of fixed length and with the one that `plaserve` chooses. The passes are those
of `plaserve` each time (`ablations.WithoutAdaptation`), so only the window differs; once they are those of
`laps_artifact`, as published.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engines.models import load_model
from engines.simulated_settings import engine_setting
from service.core.types import Lane, Role
from service.sim.exhibits.exhibit import Cell, Exhibit, Kind, Plot, Series, Table
from service.sim.exhibits.runs import CLIENT_S_MEAN, Scene, play, summary
from service.sim.lengths import TOKENS_MAX
from service.sim.sources import WorkloadSpec

MODEL = "qwen2.5-14b"
CLIENTS = 64
WINDOWS_MS = (0.0, 1.0, 2.0, 4.0, 6.0, 8.0, 12.0)
REQUESTS = 2500
WANTED = 1.05  # of the mean TTFT under the best fixed window
SHORTS_MAX = 255
SHOWN_MS = 6.0  # in the table beside none and the best: what was published
OURS, LAPS = "plaserve", "laps_artifact"


@dataclass(frozen=True, slots=True)
class Place:
    """clients: of a closed loop, or 0; rate_per_s: of an open one. pools: one short, one long, and one in
    ten prompts is a document."""

    name: str
    engine: str = "packed"
    instances: int = 1
    clients: int = 0
    rate_per_s: float | None = None
    pools: bool = False
    passes: str = OURS

    @property
    def label(self) -> str:
        passes = "" if self.passes == OURS else f", passes of {self.passes}"
        instances = "" if self.instances == 1 else f", {self.instances} instances"
        return f"{self.name}, {self.engine}{instances}{passes}"

    def scene(self) -> Scene:
        workload = WorkloadSpec(
            parts=(("lmsys_chat_1m", 0.9), ("rag", 0.1)) if self.pools else (("lmsys_chat_1m", 1.0),),
            arrivals="closed" if self.clients else "poisson",
            concurrency=self.clients,
            prompt_tokens_max=TOKENS_MAX if self.pools else SHORTS_MAX,
        )
        return Scene(
            workload,
            engine_setting(load_model(MODEL), self.engine),
            self.instances,
            rate_per_s=self.rate_per_s,
            requests_max=REQUESTS,
            roles=(Role.SP, Role.LP) if self.pools else (),
            client_s_mean=CLIENT_S_MEAN if self.clients else 0.0,
        )

    def fixed(self, window_s: float) -> str:
        """The policy with a window of this length."""
        if self.passes == LAPS:
            return f"{LAPS}:window_s={window_s},window_requests={self.clients}"
        return f"{OURS}-adaptation:window_s_max={window_s}{',mode=spatial' if self.pools else ''}"

    @property
    def ours(self) -> str:
        return f"{OURS}:mode=spatial" if self.pools else OURS


PLACES = (
    Place(f"closed loop, {CLIENTS} clients", clients=CLIENTS, passes=LAPS),
    Place(f"closed loop, {CLIENTS} clients", clients=CLIENTS),
    Place("closed loop, 8 clients", clients=8),
    Place("open loop, 60 requests/s", rate_per_s=60.0),
    Place("open loop, 200 requests/s", rate_per_s=200.0),
    Place("open loop, 300 requests/s", rate_per_s=300.0),
    Place("open loop, 800 requests/s", instances=4, rate_per_s=800.0),
    Place(f"closed loop, {CLIENTS} clients", engine="padded_grid", clients=CLIENTS),
    Place("open loop, 30 requests/s", engine="padded_grid", rate_per_s=30.0),
    Place("open loop, 120 requests/s", engine="padded_grid", rate_per_s=120.0),
    Place("pools 1:1, documents too, 20 requests/s", instances=2, rate_per_s=20.0, pools=True),
    Place("pools 1:1, documents too, 40 requests/s", instances=2, rate_per_s=40.0, pools=True),
)


@dataclass(frozen=True, slots=True)
class Found:
    """Mean TTFT of shorts, seconds: by window, and under the one chosen."""

    place: Place
    fixed_s: tuple[float, ...]
    ours_s: float

    @property
    def over_best(self) -> float:
        return self.ours_s / min(self.fixed_s)


def window() -> Exhibit:
    found = [_found(place) for place in PLACES]
    columns = ("scene", "no window", f"{SHOWN_MS:g} ms", "best fixed", "its mean", OURS, "over the best")
    packed = [each for each in found if each.place.engine == "packed" and not each.place.pools]
    others = [each for each in found if each not in packed]
    return Exhibit(
        "window",
        "The waiting window: mean TTFT of shorts in ms, fixed windows against the one chosen",
        Kind.SIMULATED,
        "LAPS Fig. 5, 14B, 64-way shorts below 256 tokens: latency minimum near 6 to 8 ms (slides: about 6).",
        Table(columns, tuple(_row(each) for each in found)),
        " ".join(_reading(found)),
        tuple(_plot(*pair) for pair in (("window", packed), ("window_others", others)) if pair[1]),
    )


def _found(place: Place) -> Found:
    scene = place.scene()

    def mean_s(policy: str) -> float:
        return summary(play(scene, policy, static=place.pools), lane=Lane.SHORT).ttft_s_mean

    return Found(place, tuple(mean_s(place.fixed(ms / 1e3)) for ms in WINDOWS_MS), mean_s(place.ours))


def _row(found: Found) -> tuple[Cell, ...]:
    best = min(found.fixed_s)
    return (
        found.place.label,
        1e3 * found.fixed_s[0],
        1e3 * found.fixed_s[WINDOWS_MS.index(SHOWN_MS)],
        f"{WINDOWS_MS[found.fixed_s.index(best)]:g} ms",
        1e3 * best,
        1e3 * found.ours_s,
        f"{found.over_best - 1.0:+.1%}",
    )


def _reading(found: Sequence[Found]) -> Iterator[str]:
    within = sum(each.over_best <= WANTED for each in found)
    worst = max(found, key=lambda each: each.over_best)
    yield (
        f"The window that plaserve chooses is within {WANTED - 1.0:.0%} of the best fixed one in {within} of "
        f"{len(found)} scenes; the worst is {worst.over_best - 1.0:+.1%} "
        f"({worst.place.label})."
    )
    none = sum(each.fixed_s[0] <= (1.0 + 0.005) * min(each.fixed_s) for each in found)
    yield (
        f"No window at all is within 0.5 % of the best in {none} of {len(found)}: under load a queue forms "
        "while a pass runs, and an idle engine gains little by waiting. Where the optimum of a closed "
        "loop lies depends on how long clients take to come back, which the source does not say; here an "
        f"exponential time of {CLIENT_S_MEAN * 1e3:g} ms on average is assumed. {MODEL}, one seed, "
        f"{REQUESTS:,} requests a run; fixed windows of {', '.join(f'{ms:g}' for ms in WINDOWS_MS)} ms."
    )


def _plot(name: str, found: Sequence[Found]) -> Plot:
    return Plot(
        name,
        f"Mean TTFT of shorts over a fixed window, {MODEL} on H200 (simulated)",
        "window, ms",
        "mean TTFT over the best",
        tuple(
            Series(each.place.label, WINDOWS_MS, tuple(mean_s / min(each.fixed_s) for mean_s in each.fixed_s))
            for each in found
        ),
    )
