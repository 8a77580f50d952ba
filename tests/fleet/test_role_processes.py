"""A worker process with two engines, over etcd: it moves, is killed while it loads, and comes back with the
engine of the role that it is wanted in."""

from __future__ import annotations

import asyncio
from pathlib import Path
from time import monotonic_ns

import pytest
from etcd_server import EtcdServer
from test_fleet_metrics import scrape
from test_processes import until

from engines.catalog import LoadedEngine
from service import wiring_fleet
from service.bench.arms import free_ports
from service.bench.fleet_rig import Kind, Part
from service.core.reconcile import MoveReason
from service.core.types import Role
from service.fleet.backends import make_membership
from service.fleet.membership import Membership
from service.fleet.role_facts import MovePhase, engines_of, move_of, moves_of
from service.fleet.settings import FleetSettings
from service.settings import EngineSettings, FleetOptions, Settings
from service.wiring import load

START_S = 60.0  # an interpreter on a busy machine


async def order(membership: Membership, role: Role) -> int:
    now = membership.snapshot().assignments.get("w0")
    number = now.number if now is not None else 0
    made = await membership.assign("w0", role, expected=number, reason=MoveReason.PINNED, by="me", force=True)
    return made.number


def has(membership: Membership, role: Role, engine: str, number: int) -> bool:
    member = membership.snapshot().members.get("w0")
    if member is None or member.report is None or (told := engines_of(member.facts)) is None:
        return False
    report = member.report
    return (report.role, told.loaded, report.number) == (role, engine, number)


async def test_a_worker_that_is_killed_while_it_loads_comes_back_in_its_wanted_role(
    shared_etcd: EtcdServer, tmp_path: Path
) -> None:
    name, (port,) = f"roles-{monotonic_ns()}", free_ports(1)
    options = FleetSettings(membership="etcd", name=name, endpoints=(shared_etcd.endpoint,))
    environment = {
        "PLASERVE_FLEET__MEMBERSHIP": "etcd",
        "PLASERVE_FLEET__NAME": name,
        "PLASERVE_FLEET__ENDPOINTS": f'["{shared_etcd.endpoint}"]',
        "PLASERVE_FLEET__LEASE_TTL_S": "2",
        "PLASERVE_FLEET__CALL_TIMEOUT_S": "1",
        "PLASERVE_ENGINE__BACKEND": "simulated",
        "PLASERVE_ENGINE__SIMULATED_PRESET": "h200_32b_sp",
        "PLASERVE_ENGINE__SIMULATED_LP_PRESET": "h200_32b",
        "PLASERVE_ENGINE__SIMULATED_LOAD_S": "0.5",
        "PLASERVE_TELEMETRY__METRICS_PORT": str(port),
    }
    membership = make_membership(options)
    await membership.open()
    part = Part("w0", Kind.WORKER, (), tmp_path / "w0.log")
    try:
        await part.start(environment)
        await until(lambda: has(membership, Role.MIXED, "sp", 0), START_S)
        number = await order(membership, Role.LP)
        await until(lambda: has(membership, Role.LP, "lp", number), START_S)
        await until(lambda: bool(moves_of(membership.snapshot().members["w0"].facts)))
        (move,) = moves_of(membership.snapshot().members["w0"].facts)
        assert move.seconds[MovePhase.LOADING] >= 0.5
        seen = await scrape(port)
        assert seen["plaserve_role_moves_total"][("done",)] == 1.0
        assert seen["plaserve_role_move_seconds_total"][("loading",)] >= 0.5
        assert sum(seen["plaserve_role_move_phase"].values()) == 0.0

        number = await order(membership, Role.SP)
        await until(lambda: move_of(membership.snapshot().members["w0"].facts) is not None)
        await part.kill()
        number = await order(membership, Role.LP)  # the controller turns round while nobody is there
        await part.start(environment)
        await until(lambda: has(membership, Role.LP, "lp", number), START_S)
        facts = membership.snapshot().members["w0"].facts
        assert moves_of(facts) == ()  # it began with that engine
        assert facts["model"] == "simulated-h200_32b_sp"
    finally:
        await part.stop()
        await membership.close()
    assert not part.hard


async def test_a_worker_whose_engine_fails_at_the_start_begins_with_the_other(
    shared_etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And tries the role again once it serves, which tells the fleet why it can't be had."""
    options = {
        "membership": "etcd",
        "name": f"roles-{monotonic_ns()}",
        "endpoints": [shared_etcd.endpoint],
        "member_id": "w0",
    }
    engine = {
        "backend": "simulated",
        "simulated_preset": "h200_32b_sp",
        "simulated_lp_preset": "h200_32b",
    }
    settings = Settings(fleet=FleetOptions(**options), engine=EngineSettings(**engine))
    membership = make_membership(settings.fleet)
    await membership.open()
    try:
        await order(membership, Role.LP)
        first = await asyncio.to_thread(wiring_fleet.load_first, settings)
        assert (first.name, first.role) == ("lp", Role.LP)

        def failing(settings: Settings, name: str = "sp") -> LoadedEngine:
            if name == "lp":
                raise RuntimeError("no device memory")
            return load(settings, name=name)

        monkeypatch.setattr(wiring_fleet, "load", failing)
        first = await asyncio.to_thread(wiring_fleet.load_first, settings)
        assert (first.name, first.role) == ("sp", Role.MIXED)
    finally:
        await membership.close()
