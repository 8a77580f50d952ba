"""Pools that move: the 4:4 -> 5:3 example of the talk, and static pools under a skewed burst."""

from __future__ import annotations

from dataclasses import dataclass

from engines.models import load_model
from engines.simulated_settings import engine_setting
from service.core.types import Lane, Role
from service.sim.exhibits.exhibit import Cell, Exhibit, Kind, Plot, Series, Table
from service.sim.exhibits.runs import Scene, attainment_over_time, play, summary
from service.sim.result import SimResult
from service.sim.sources import Burst, Flip, WorkloadSpec

MODEL = "qwen2.5-32b"
HALVES = (Role.SP,) * 4 + (Role.LP,) * 4
SECONDS = 90.0
FLIP_S = 30.0
EVEN = (0.98, 0.02)  # of LMSYS and RAG: about half of the tokens each
SHORTS = (0.995, 0.005)
MOVERS = ("laps_printed", "laps_slides", "plaserve:mode=spatial", "plaserve")


def moving_pools() -> Exhibit:
    """From `FLIP_S` on more shorts than four instances can do, and fewer longs than four need."""
    workload = WorkloadSpec(
        parts=(("lmsys_chat_1m", EVEN[0]), ("rag", EVEN[1])),
        flips=(Flip(FLIP_S, SHORTS),),
        bursts=(Burst(FLIP_S, 1e6, 2.2),),
    )
    scene = _scene(workload, rate_per_s=300.0)
    paths = {policy: _PoolPath.of(play(scene, policy)) for policy in MOVERS}
    columns = ("policy", "split at the flip", "next", "after s", "split at the end", "moves in all")
    rows = tuple((policy, *path.row()) for policy, path in paths.items())
    plot = Plot(
        "pools_moving",
        "Instances in the short pool, of 8 (simulated)",
        "time, s",
        "instances",
        tuple(Series(policy, path.time_s, path.sp, steps=True) for policy, path in paths.items()),
        marks=((FLIP_S, "more shorts"),),
    )
    example = [policy for policy, path in paths.items() if path.next_split == (5, 3)]
    return Exhibit(
        "pools_moving",
        "The pools example: 4:4 -> 5:3",
        Kind.SIMULATED,
        "LAPS talk: P_SP much above P_LP moves one instance, sp = 4, lp = 4 -> sp = 5, lp = 3.",
        Table(columns, rows),
        f"The example as told (5:3 is the first split after the flip): {', '.join(example) or 'none'}. "
        "In the paper a busy instance has less pressure, and pressures are compared as a ratio; the talk "
        "subtracts them. With that sign a pool that works without a queue counts as needy, so how the LAPS "
        "rules move depends on weights that are not published. plaserve adds utilisation instead, and by "
        "itself (mode auto) forms pools only where it predicts a gain.",
        (plot,),
    )


@dataclass(frozen=True, slots=True)
class _PoolPath:
    """Sizes of the two pools over time."""

    time_s: tuple[float, ...]
    sp: tuple[float, ...]
    lp: tuple[float, ...]
    moves: int

    @classmethod
    def of(cls, result: SimResult) -> _PoolPath:
        assert result.samples is not None
        samples = result.samples
        sp, lp = tuple(map(float, samples.sp)), tuple(map(float, samples.lp))
        return cls(tuple(samples.time_s), sp, lp, sum(now_s > 1.0 for now_s, _ in result.role_moves))

    def _split(self, index: int) -> tuple[int, int]:
        return int(self.sp[index]), int(self.lp[index])

    @property
    def _flip(self) -> int:
        return max(n for n, time_s in enumerate(self.time_s) if time_s <= FLIP_S)

    @property
    def _next(self) -> int | None:
        """The first sample after the flip with another split."""
        at_flip = self._split(self._flip)
        later = range(self._flip + 1, len(self.time_s))
        return next((n for n in later if self._split(n) != at_flip), None)

    @property
    def next_split(self) -> tuple[int, int] | None:
        return None if self._next is None else self._split(self._next)

    def row(self) -> tuple[Cell, ...]:
        found = self._next
        return (
            _text(self._split(self._flip)),
            "no change" if found is None else _text(self._split(found)),
            None if found is None else self.time_s[found] - FLIP_S,
            _text(self._split(-1)),
            self.moves,
        )


def _text(split: tuple[int, int]) -> str:
    return f"{split[0]}:{split[1]}" if any(split) else "mixed"


def skewed_burst() -> Exhibit:
    """Shorts at three times their rate for 20 s, against pools that can't, can, and need not move."""
    workload = WorkloadSpec(
        parts=(("lmsys_chat_1m", EVEN[0]), ("rag", EVEN[1])),
        flips=(Flip(FLIP_S, SHORTS), Flip(FLIP_S + 20.0, EVEN)),
        bursts=(Burst(FLIP_S, 20.0, 3.0),),
    )
    scene = _scene(workload, rate_per_s=350.0)
    arms = {
        "static 4:4": play(_with_roles(scene), "laps_slides", static=True),
        "laps_slides, moving": play(scene, "laps_slides"),
        "fcfs, no pools": play(scene, "fcfs"),
        "plaserve": play(scene, "plaserve"),
    }
    rows: list[tuple[Cell, ...]] = []
    for name, result in arms.items():
        short = summary(result, lane=Lane.SHORT, warmup_ratio=0.0)
        long = summary(result, lane=Lane.LONG, warmup_ratio=0.0)
        worst = min(attainment_over_time(list(result.records.values()), Lane.SHORT, 5.0)[1])
        rows.append(
            (
                name,
                100.0 * (1.0 - short.violation_ratio),
                100.0 * (1.0 - long.violation_ratio),
                100.0 * worst,
                short.ttft_s_p99 * 1e3,
                long.ttft_s_p99 * 1e3,
            )
        )
    columns = ("", "short in time %", "long in time %", "short, worst 5 s %", "short p99 ms", "long p99 ms")
    static, ours = rows[0], rows[-1]
    return Exhibit(
        "skewed_burst",
        "Static pools starve under a skewed burst",
        Kind.SIMULATED,
        "A limit that readers of the paper name: two pools of fixed capacity may starve one side.",
        Table(columns, tuple(rows)),
        f"In the worst 5 s static pools serve {static[3]:.0f} % of the shorts in time while four instances "
        f"of the other pool have room; plaserve {ours[3]:.0f} %. An instance's role is a preference there, "
        "not a wall, so a burst needs no move to be served.",
        tuple(_over_time(arms, lane) for lane in Lane),
    )


def _scene(workload: WorkloadSpec, rate_per_s: float) -> Scene:
    setting = engine_setting(load_model(MODEL), "packed")
    return Scene(workload, setting, 8, rate_per_s=rate_per_s, seconds=SECONDS, sample_s=0.5)


def _with_roles(scene: Scene) -> Scene:
    return Scene(
        scene.workload, scene.setting, scene.instances, scene.rate_per_s, seconds=scene.seconds, roles=HALVES
    )


def _over_time(arms: dict[str, SimResult], lane: Lane) -> Plot:
    series = []
    for name, result in arms.items():
        x, y = attainment_over_time(list(result.records.values()), lane, 5.0)
        series.append(Series(name, x, tuple(100.0 * share for share in y)))
    return Plot(
        f"skewed_burst_{lane}",
        f"First token in time, {lane} lane, by time of arrival (simulated)",
        "time, s",
        "in time, %",
        tuple(series),
        marks=((FLIP_S, "burst of shorts"), (FLIP_S + 20.0, "over")),
    )
