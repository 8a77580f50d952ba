"""The same scenario from a fleet of real processes and from the simulator: are they the same system?

    python -m service.bench.fleet_parity [--case flips|steady] [--seeds 1 2 3] [--out var/fleet-parity]
    python -m service.bench.fleet_parity --again var/fleet-parity/flips-1.json

A scenario is made from a seed (`fleet_parity_plan`), run on etcd and 12 processes (`fleet_parity_run`), then
by the simulator, and both are compared with fixed tolerances (`fleet_parity_report`). Exits with 1 where a
figure is outside. `--again` takes the fleet's account from a file and runs only the simulator.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from service.bench.etcd import EtcdError
from service.bench.fleet_parity_plan import (
    CASES,
    Conditions,
    RoleStep,
    Scenario,
    Side,
    scenario_of,
    simulate,
    simulator_input,
)
from service.bench.fleet_parity_report import Parity, compare, view
from service.bench.fleet_parity_run import FleetRun, run_fleet
from service.bench.fleet_plan import DemoSettings
from service.bench.fleet_rig import RigError
from service.bench.fleet_watch import Sample
from service.bench.loadgen import Ending, Observation
from service.bench.report import without_nan
from service.bench.workload import Label

FOLDER = Path("var/fleet-parity")
SECONDS = {"flips": 270.0, "steady": 150.0}
LOAD_RATIO, SCALE = 0.7, 6.0
LINE_EVERY_S = 15.0


class Lines:
    """What a run says: events as they come, its state every few seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begin_s = time.monotonic()
        self._next_s = 0.0

    def __call__(self, text: str) -> None:
        now_s = time.monotonic() - self._begin_s
        regular = " of " in text and "pressure" in text
        if not regular or now_s >= self._next_s:
            self._next_s = now_s + LINE_EVERY_S if regular else self._next_s
            self._console.print(Text(f" {text}", style="dim"))


def parity_of(scenario: Scenario, run: FleetRun) -> Parity:
    """The simulator's run under the fleet's conditions, and the comparison."""
    given = simulator_input(scenario)
    return compare(scenario, run, simulate(given, scenario.plan, run.conditions))


# --- files ---


def to_json(parity: Parity) -> dict[str, Any]:
    """Plain data; NaN becomes None."""
    run = parity.run
    made: dict[str, Any] = {
        "scenario": {
            "digest": parity.scenario.digest,
            "settings": asdict(parity.scenario.settings),
            "phases": [asdict(phase) for phase in parity.scenario.phases],
            "environment": dict(parity.scenario.rig.environment),
            "policy": parity.scenario.rig.policy,
        },
        "checks": [{**asdict(check), "holds": check.holds} for check in parity.checks],
        "close_ratio": parity.close_ratio,
        "pool_gap": parity.pool_gap,
        "faults": list(parity.faults),
        "conditions": asdict(run.conditions),
        "cores": run.cores,
        "control_cores": parity.control_cores,
        "machine_cores": run.machine_cores,
        "load_average": list(run.loads),
        "run_faults": list(run.faults),
        "samples": [asdict(sample) for sample in run.samples],
        "fleet": _side(run.side),
        "simulator": _side(parity.simulator),
    }
    plain: dict[str, Any] = without_nan(made)
    return plain


# Of an observation, in the file.
ROW = (
    "request_id",
    "label",
    "send_s",
    "target_s",
    "ending",
    "lag_s",
    "ttft_s",
    "end_s",
    "output_tokens",
    "error",
)


def _side(side: Side) -> dict[str, Any]:
    return {
        "moves": [asdict(move) for move in side.moves],
        "columns": ROW,
        "requests": [[getattr(each, name) for name in ROW] for each in side.seen],
    }


def from_json(told: dict[str, Any]) -> tuple[Scenario, FleetRun]:
    """The scenario, made anew, and the fleet's account of it. Raises ValueError where a seed does not make
    the scenario any more that was run."""
    given = told["scenario"]["settings"]
    settings = DemoSettings(**{**given, "phases": tuple(tuple(phase) for phase in given["phases"])})
    scenario = scenario_of(settings)
    if scenario.digest != told["scenario"]["digest"]:
        raise ValueError(
            f"scenario: seed {settings.seed} makes {scenario.digest} now, the file is of "
            f"{told['scenario']['digest']}; run the fleet again"
        )
    fleet = told["fleet"]
    rows = [dict(zip(fleet["columns"], row, strict=True)) for row in fleet["requests"]]
    seen = tuple(
        Observation(**{**row, "label": Label(row["label"]), "ending": Ending(row["ending"])}) for row in rows
    )
    run = FleetRun(
        Side(seen, tuple(RoleStep(**move) for move in fleet["moves"])),
        Conditions(**told["conditions"]),
        tuple(Sample(**sample) for sample in told["samples"]),
        told["cores"],
        told["machine_cores"],
        tuple(told["load_average"]),
        tuple(told["run_faults"]),
    )
    return scenario, run


def _write(parity: Parity, stem: Path) -> None:
    from service.bench.fleet_parity_plot import draw

    text = json.dumps(to_json(parity), allow_nan=False)
    stem.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    with contextlib.suppress(ImportError):  # no matplotlib: figures without a picture
        draw(parity, stem.with_suffix(".png"))


# --- the command ---


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    asked.out.mkdir(parents=True, exist_ok=True)
    outside = 0
    for seed in asked.seeds if asked.again is None else (None,):
        try:
            if seed is None:
                scenario, run = from_json(json.loads(asked.again.read_text(encoding="utf-8")))
                stem = asked.out / f"{asked.again.stem}-again"
            else:
                scenario = scenario_of(_settings(asked, seed))
                stem = asked.out / f"{asked.case}-{seed}"
                run = asyncio.run(_fleet(scenario, asked.out / stem.name, Lines(console), asked.nice))
        except (EtcdError, RigError, OSError, ValueError) as error:
            sys.stderr.write(f"{error}\n")
            return 2
        except (KeyboardInterrupt, asyncio.CancelledError):
            sys.stderr.write("stopped; every process of the fleet has ended\n")
            return 130
        parity = parity_of(scenario, run)
        console.print(view(parity))
        _write(parity, stem)
        console.print(Text(f" {stem}.json, {stem}.png", style="dim"))
        outside += bool(parity.faults)
    return 1 if outside else 0


async def _fleet(scenario: Scenario, folder: Path, say: Lines, nice: int | None) -> FleetRun:
    """SIGTERM ends it as Ctrl-C does: processes are stopped."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await run_fleet(scenario, folder, say, nice)


def _settings(asked: argparse.Namespace, seed: int) -> DemoSettings:
    """Raises ValueError."""
    return DemoSettings(
        seconds=asked.seconds or SECONDS[asked.case],
        workers=asked.workers,
        load_ratio=asked.load,
        scale=asked.scale,
        seed=seed,
        phases=CASES[asked.case],
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m service.bench.fleet_parity", description=(__doc__ or "").split("\n", maxsplit=1)[0]
    )
    parser.add_argument(
        "--case", choices=list(CASES), default="flips", help="load that flips, or a steady mix"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="one run each")
    parser.add_argument("--seconds", type=float, help="of load (default: 270, steady 150)")
    parser.add_argument(
        "--load", type=float, default=LOAD_RATIO, help="predicted work over what workers can do"
    )
    parser.add_argument("--scale", type=float, default=SCALE, help="wall seconds per modelled second")
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--nice", type=int, help="of all processes, on a busy machine; root for less than 0")
    parser.add_argument("--again", type=Path, metavar="JSON", help="compare a run that is over once more")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for figures, pictures and logs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
