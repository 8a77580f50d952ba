"""Fleet against simulator: both are given one scenario, and what differs is found. No processes here."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from math import fmod
from pathlib import Path

import pytest
from rich.console import Console

from service import wiring
from service.bench.fleet_parity import from_json, main, parity_of, to_json
from service.bench.fleet_parity_plan import (
    CASES,
    PROBE_TOKENS,
    Conditions,
    Scenario,
    Side,
    SimulatorInput,
    delays,
    probes_of,
    scenario_of,
    simulate,
    simulator_input,
)
from service.bench.fleet_parity_report import Parity, compare, view
from service.bench.fleet_parity_run import FleetRun, prefer
from service.bench.fleet_plan import DemoSettings
from service.bench.fleet_watch import Sample
from service.bench.loadgen import Ending
from service.bench.parity import message
from service.core.types import Role
from service.policies import make_controller
from service.rpc.convert import wishes_of
from service.rpc.intake import Intake
from service.rpc.text import ByteCodec
from service.settings import LimitSettings, load_settings

SETTINGS = DemoSettings(seconds=30.0, load_ratio=0.7, scale=5.0, seed=3)
CONDITIONS = Conditions(look_s=1.7, way_s=0.006, link_s=0.002)
CORES = {"worker": 0.1, "scheduler": 0.1, "frontend": 0.1, "controller": 0.01, "etcd": 0.02, "driver": 0.05}


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return scenario_of(SETTINGS)


@pytest.fixture(scope="module")
def given(scenario: Scenario) -> SimulatorInput:
    return simulator_input(scenario)


@pytest.fixture(scope="module")
def side(scenario: Scenario, given: SimulatorInput) -> Side:
    return simulate(given, scenario.plan, CONDITIONS)


def run_of(side: Side, cores: dict[str, float] | None = None) -> FleetRun:
    """A fleet that did this."""
    roles, pressures = {f"w{n}": "mixed" for n in range(6)}, {"sp": 0.1, "lp": 0.2}
    samples = tuple(Sample(at_s, roles, pressures, {}, "c0", "s0", CORES, 0.5, 1.0) for at_s in (0.0, 20.0))
    return FleetRun(side, CONDITIONS, samples, cores or CORES, 0.5, (1.0, 1.0), ())


# --- one scenario ---


def test_the_simulator_reads_what_every_process_reads(
    scenario: Scenario, given: SimulatorInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in scenario.rig.environment.items():
        monkeypatch.setenv(name, value)
    settings = load_settings()
    loaded = wiring.load(settings)
    assert given.scheduler == settings.scheduler
    assert given.policy == scenario.rig.policy
    assert (given.spec.cost, given.spec.profiles) == (loaded.cost, loaded.engine.profiles)
    assert given.spec.capabilities == loaded.engine.capabilities
    controller = make_controller(scenario.rig.policy, settings.scheduler)
    assert controller is not None
    assert given.make_controller().period_s == controller.period_s == SETTINGS.scale
    assert [i.spec.instance_id for i in given.instances()] == [f"w{n}" for n in range(scenario.rig.workers)]


def test_the_simulator_gets_what_a_front_end_makes_of_the_messages(
    scenario: Scenario, given: SimulatorInput
) -> None:
    async def through_a_front_end() -> None:
        intake = Intake(ByteCodec(), given.spec.capabilities, LimitSettings())
        for planned, ours in zip(scenario.plan, given.requests, strict=True):
            wishes = wishes_of(message(planned), "any", LimitSettings())
            request, engine_request = await intake.prepare(wishes, planned.send_s, None)
            assert request.ttft_target_s == pytest.approx(ours.ttft_target_s, abs=1e-8)
            named = replace(request, request_id=ours.request_id, ttft_target_s=ours.ttft_target_s)
            assert named == ours
            assert given.token_ids[planned.request_id] == engine_request.token_ids
        intake.close()

    asyncio.run(through_a_front_end())


def test_a_digest_is_of_all_that_is_sent_and_told(scenario: Scenario) -> None:
    assert scenario_of(SETTINGS).digest == scenario.digest
    others = [
        scenario_of(replace(SETTINGS, seed=4)),
        scenario_of(replace(SETTINGS, scale=5.5)),
        scenario_of(replace(SETTINGS, phases=CASES["steady"])),
        replace(scenario, rig=replace(scenario.rig, policy="plaserve:period_s=4")),
        replace(scenario, plan=scenario.plan[1:]),
    ]
    assert len({other.digest for other in [scenario, *others]}) == 1 + len(others)


def test_a_scale_at_which_the_fleet_sees_only_first_looks_is_refused() -> None:
    with pytest.raises(ValueError, match="scale must be below 10, got 12"):
        scenario_of(replace(SETTINGS, scale=12.0))


# --- conditions ---


def test_moves_are_made_when_the_controller_looks(side: Side, given: SimulatorInput) -> None:
    period_s = given.make_controller().period_s
    assert len(side.moves) > 6
    for step in side.moves:
        assert fmod(step.at_s - CONDITIONS.look_s + 1e-9, period_s) == pytest.approx(0.0, abs=1e-6)
    assert [step.at_s for step in side.moves] == sorted(step.at_s for step in side.moves)
    for before, after in pairwise([s for s in side.moves if s.instance == side.moves[0].instance]):
        assert before.to_role == after.from_role
    assert side.pool_at(-1.0, Role.SP) == 0
    assert side.pool_at(SETTINGS.seconds, Role.SP) + side.pool_at(SETTINGS.seconds, Role.LP) == 6


@pytest.mark.parametrize(("way_s", "link_s"), [(0.0, 0.0), (0.012, 0.004), (0.001, 0.02)])
def test_delays_are_found_by_the_probes(scenario: Scenario, way_s: float, link_s: float) -> None:
    """A fleet that is the simulator with these delays is measured to have them."""
    probes = probes_of(scenario)
    probing = simulator_input(replace(scenario, plan=probes))
    seen = simulate(probing, probes, Conditions(0.0, way_s, link_s)).seen
    with_gaps = []
    for each in seen:
        assert each.ttft_s is not None
        gap_s = (each.end_s - each.send_s - each.ttft_s) / (PROBE_TOKENS - 1)
        with_gaps.append(replace(each, itl_s=(gap_s,) * (PROBE_TOKENS - 1)))
    assert delays(scenario, probes, with_gaps) == (
        pytest.approx(way_s, abs=1e-6),
        pytest.approx(link_s, abs=1e-6),
    )
    assert all(b.send_s > a.end_s for a, b in pairwise(seen)), "each probe is alone"


# --- what is found ---


def test_a_fleet_that_is_the_simulator_is_within(scenario: Scenario, side: Side) -> None:
    same = parity_of(scenario, run_of(side))
    assert same.faults == ()
    assert all(check.difference == 0.0 for check in same.checks)
    assert (same.close_ratio, same.pool_gap) == (1.0, 0.0)
    names = [check.name for check in same.checks]
    assert len(names) == len(set(names)) == 3 * 2 + 2 * 2 + 2


def with_cost(scenario: Scenario, given: SimulatorInput, factor: float) -> Side:
    slow = replace(given, spec=replace(given.spec, cost=given.spec.cost.scaled(factor)))
    return simulate(slow, scenario.plan, CONDITIONS)


def test_an_engine_that_is_slower_on_one_side_is_found(
    scenario: Scenario, given: SimulatorInput, side: Side
) -> None:
    for fleet, simulator in (
        (with_cost(scenario, given, 1.3), side),
        (side, with_cost(scenario, given, 1.3)),
    ):
        found = compare(scenario, run_of(fleet), simulator)
        outside = {check.name for check in found.checks if not check.holds}
        assert {"TTFT p50, short", "TTFT p50, long"} <= outside
        assert len(found.faults) == len(outside)
        assert found.close_ratio < 0.2
    assert compare(scenario, run_of(with_cost(scenario, given, 1.02)), side).checks[6].holds


def faults_of(parity: Parity) -> str:
    return "\n".join(parity.faults)


def test_each_tolerance_is_held(scenario: Scenario, side: Side) -> None:
    longs = [n for n, each in enumerate(side.seen) if each.label == "long" and each.send_s < 9.0]
    late = [replace(e, ttft_s=e.target_s * 1.01) if n in longs[:2] else e for n, e in enumerate(side.seen)]
    found = faults_of(compare(scenario, run_of(replace(side, seen=tuple(late))), side))
    assert "in time, mostly chats, long: fleet" in found

    still = replace(side, moves=side.moves[:6])
    assert len(side.moves) >= 6 + 2
    found = faults_of(compare(scenario, run_of(still), side))
    assert found.startswith("moves after that: fleet 0")
    one_less = replace(side, moves=side.moves[:-1])
    assert compare(scenario, run_of(one_less), side).faults == ()

    busy = compare(scenario, run_of(side, {**CORES, "scheduler": 0.4}), side)
    assert busy.faults == ("the control plane took 0.53 cores; the bound is 0.5",)
    workers = compare(scenario, run_of(side, {**CORES, "worker": 1.5, "driver": 1.0}), side)
    assert workers.faults == ()


def test_a_request_that_did_not_complete_or_is_not_there(scenario: Scenario, side: Side) -> None:
    refused = replace(side.seen[0], ending=Ending.REFUSED, ttft_s=None)
    found = faults_of(compare(scenario, run_of(replace(side, seen=(refused, *side.seen[1:]))), side))
    assert "fleet: 1 requests did not complete" in found
    with pytest.raises(ValueError, match="fleet: its requests are not those of the scenario"):
        compare(scenario, run_of(replace(side, seen=side.seen[1:])), side)
    nobody = replace(side, seen=tuple(replace(each, ttft_s=None) for each in side.seen))
    assert "TTFT p90, long: fleet -" in faults_of(compare(scenario, run_of(nobody), side))


# --- files and the command ---


def test_a_run_from_its_file_is_compared_anew(
    scenario: Scenario, side: Side, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "same.json"
    kept.write_text(json.dumps(to_json(parity_of(scenario, run_of(side))), allow_nan=False))
    again, run = from_json(json.loads(kept.read_text()))
    assert again == scenario
    assert run == run_of(side)
    assert main(["--again", str(kept), "--out", str(tmp_path)]) == 0
    assert "All within what is allowed" in capsys.readouterr().out
    assert (tmp_path / "same-again.png").stat().st_size > 20_000

    told = json.loads(kept.read_text())
    ttft = told["fleet"]["columns"].index("ttft_s")
    for row in told["fleet"]["requests"]:
        row[ttft] *= 1.3
    kept.write_text(json.dumps(told))
    assert main(["--again", str(kept), "--out", str(tmp_path)]) == 1
    assert "OUTSIDE" in capsys.readouterr().out

    told["scenario"]["settings"]["seed"] = 5
    kept.write_text(json.dumps(told))
    assert main(["--again", str(kept), "--out", str(tmp_path)]) == 2
    assert "run the fleet again" in capsys.readouterr().err


def test_a_machine_that_stood_still_is_told(scenario: Scenario, side: Side) -> None:
    """Clients that send late are no fault of the fleet; a run with such a moment says so."""
    late = replace(side, seen=(replace(side.seen[0], lag_s=0.9), *side.seen[1:]))
    console = Console(width=200, record=True, file=StringIO())
    console.print(view(compare(scenario, run_of(late), side)))
    assert "stood still" in console.export_text()
    console.print(view(compare(scenario, run_of(side), side)))
    assert "stood still" not in console.export_text()


def test_preference_is_of_the_whole_process_and_its_session() -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        try:
            prefer([process.pid], 5)
            assert os.getpriority(os.PRIO_PROCESS, process.pid) == 5
            group = Path(f"/proc/{process.pid}/autogroup")
            assert not group.exists() or group.read_text().split()[-1] == "5"
        finally:
            process.kill()
