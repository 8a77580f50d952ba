"""Faults by seed, in virtual time: whatever breaks, the laws hold; and where they do not, it is noticed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest

from service.core.kv_budget import KvBudget
from service.core.lifecycle import InstanceState, RequestState
from service.core.outlier import Outliers
from service.core.policy import Instance
from service.core.scheduler import PrefillScheduler
from service.core.timeouts import Timeouts
from service.sim import chaos
from service.sim.chaos import Report, run_schedule, run_seed, settings_of
from service.sim.chaos_schedule import (
    ENGINES,
    KINDS,
    MODES,
    POLICIES,
    REQUESTS_MAX,
    Ask,
    ChaosFault,
    Schedule,
    from_json,
    make_schedule,
    to_json,
)

ROOT = Path(__file__).parents[2]
CHUNKS, CHUNK = 20, 25  # `make chaos-sim` runs ten times as many


@lru_cache(maxsize=CHUNKS)
def reports(chunk: int) -> tuple[Report, ...]:
    return tuple(run_seed(seed) for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK))


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_the_laws_hold_under_faults(chunk: int) -> None:
    """See `chaos_laws`. A seed that fails: python -m service.sim.chaos --seeds SEED."""
    broken = {report.seed: report.error for report in reports(chunk) if report.error}
    assert not broken


def test_the_schedules_cover_what_they_are_for() -> None:
    """All kinds of faults, policies, modes and engines; and the rules that answer faults have acted."""
    runs = [report for chunk in range(8) for report in reports(chunk)]
    schedules = [make_schedule(report.seed) for report in runs]
    faults: Counter[str] = sum((report.faults for report in runs), Counter())
    assert set(faults) == set(KINDS)
    assert min(faults.values()) > 10
    assert {s.policy for s in schedules} == set(POLICIES)
    assert {s.mode for s in schedules} == set(MODES)
    assert {s.engine for s in schedules} == set(ENGINES)
    assert {s.instances for s in schedules} == set(range(2, 9))
    assert all(len(s.asks) <= REQUESTS_MAX for s in schedules)
    assert any(len(s.asks) > 150 for s in schedules)
    assert sum(report.declared_down for report in runs) > 5
    assert sum(report.stale for report in runs) > 5
    assert sum(report.closed for report in runs) > 2
    ended: Counter[str] = sum((report.outcomes for report in runs), Counter())
    assert {"COMPLETED", "CANCELLED", "UNAVAILABLE", "REJECTED_CAPACITY", "DEADLINE_EXCEEDED"} <= set(ended)
    assert ended["COMPLETED"] > 0.6 * sum(ended.values())


def test_faults_cost_something_and_calm_costs_nothing() -> None:
    """Without faults nobody fails, and more requests meet their targets."""
    seeds = range(30)
    calm = [run_seed(seed, calm=True) for seed in seeds]
    assert not any(report.error for report in calm)
    assert not any(
        report.outcomes["ENGINE_FAILED"] + report.outcomes["UNAVAILABLE"] + report.declared_down
        for report in calm
    )
    rough = [report for report in reports(0) if report.seed in seeds]
    assert sum(r.met for r in rough) < sum(r.met for r in calm if r.seed < CHUNK)


@pytest.mark.parametrize("seed", range(0, 60, 6))
def test_a_schedule_is_data(seed: int) -> None:
    """Through JSON and back it is the same, and gives the same run, byte for byte."""
    schedule = make_schedule(seed)
    again = from_json(to_json(schedule))
    assert again == schedule
    first, second = (run_schedule(s, want_digest=True) for s in (schedule, again))
    assert first.digest
    assert first == second


def test_nothing_hangs_on_hash_seeds() -> None:
    code = (
        "from service.sim.chaos import run_seed\n"
        "print(*(run_seed(s, want_digest=True).digest for s in range(20, 32)))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def test_a_kind_of_fault_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="earthquake"):
        ChaosFault("earthquake", 0.0)


# --- one fault at a time ---


def small(*faults: ChaosFault, instances: int = 2, count: int = 30, answer: int = 2) -> Schedule:
    asks = tuple(Ask(0.02 * n, 40 + 7 * n, answer) for n in range(count))
    return Schedule(0, "plaserve", "temporal", "packed", instances, 500, 0.0, 0.0, 200, asks, faults)


def outcomes(*faults: ChaosFault, instances: int = 2, answer: int = 2) -> tuple[Counter[str], Report]:
    report = run_schedule(small(*faults, instances=instances, answer=answer))
    assert not report.error
    return report.outcomes, report


def test_a_worker_that_dies_loses_only_those_who_had_begun_to_hear() -> None:
    """Answers of one token: whoever was in its pass has emitted nothing, so all complete elsewhere."""
    ended, _ = outcomes(ChaosFault("die", 0.3, 0), answer=1)
    assert ended == {"COMPLETED": 30}


def test_a_worker_that_hangs_for_ever_is_declared_down() -> None:
    ended, report = outcomes(ChaosFault("hang", 0.1, 0), answer=1)
    assert report.declared_down == 1
    assert ended == {"COMPLETED": 30}


def test_a_worker_that_hangs_for_a_moment_is_not() -> None:
    allowed_s = settings_of(small()).hang_s_min
    ended, report = outcomes(ChaosFault("hang", 0.1, 0, for_s=0.8 * allowed_s))
    assert report.declared_down == 0
    assert ended == {"COMPLETED": 30}


def test_a_stall_of_everything_blames_nobody() -> None:
    ended, report = outcomes(ChaosFault("stall", 0.3, for_s=60.0))
    assert report.declared_down == 0
    assert ended["ENGINE_FAILED"] == ended["UNAVAILABLE"] == 0


def test_a_silent_link_that_heals_soon_loses_nothing() -> None:
    ended, report = outcomes(ChaosFault("cut", 0.2, 0, for_s=0.5, how="silent"))
    assert ended == {"COMPLETED": 30}
    assert report.stale == 0


def test_results_of_a_link_that_was_given_up_are_stale() -> None:
    _, report = outcomes(ChaosFault("cut", 0.2, 0, for_s=8.0, how="silent"))
    assert report.declared_down == 1
    assert report.stale >= 1


def test_repeated_results_are_heard_once() -> None:
    ended, report = outcomes(ChaosFault("repeat", 0.0, 0, for_s=9.0))
    assert ended == {"COMPLETED": 30}
    assert report.stale > 10


@pytest.mark.parametrize("how", ["leaves", "stays"])
def test_a_drain_costs_nobody_anything(how: str) -> None:
    """Also where the link is slow: what was sent before the scheduler knew is ended first."""
    for link_s in (0.0, 0.004):
        schedule = replace(small(ChaosFault("drain", 0.2, 0, for_s=0.5, how=how)), link_s=link_s)
        report = run_schedule(schedule)
        assert not report.error
        assert report.outcomes == {"COMPLETED": 30}


def test_a_drain_that_is_not_heeded_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = small(ChaosFault("drain", 0.2, 0, for_s=0.5, how="stays"))
    monkeypatch.setattr(Instance, "drain", lambda one: setattr(one, "state", InstanceState.DRAINING))
    assert "drains and is sent" in run_schedule(schedule).error


def test_a_scheduler_that_restarts_is_sent_again_what_had_emitted_nothing() -> None:
    """With one token an answer all who were live are sent again; who comes meanwhile is turned away."""
    ended, _ = outcomes(ChaosFault("restart", 0.3, for_s=0.05), answer=1)
    assert ended["COMPLETED"] >= 25
    assert ended["COMPLETED"] + ended["UNAVAILABLE"] == 30


def test_without_any_instance_all_are_told_so() -> None:
    ended, _ = outcomes(ChaosFault("die", 0.3, 0), ChaosFault("die", 0.3, 1))
    assert ended["UNAVAILABLE"] + ended["REJECTED_CAPACITY"] > 10
    assert ended["COMPLETED"] > 0


# --- a law that is broken is noticed ---


def forget_nothing(self: PrefillScheduler, instance: object, request_id: str) -> None:
    self._unheard.pop(request_id, None)


def take_any_pass(self: PrefillScheduler, instance_id: str, pass_id: int) -> object:
    """The pass that ended is not looked at."""
    instance = self.instances.get(instance_id)
    if instance is None or instance.running is None:
        return None
    instance.running, instance.staged = instance.staged, None
    self.turns.touch(instance)
    for item in instance.running.pass_.items if instance.running is not None else ():
        if item.request_id in self.live:
            self.live[item.request_id].move(RequestState.PREFILLING)
    return instance


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (PrefillScheduler, "_forget_unheard", forget_nothing),
        (PrefillScheduler, "_over", take_any_pass),
        (PrefillScheduler, "_lose", lambda *_: None),
        (KvBudget, "fits", lambda *_: True),
        (KvBudget, "release", lambda *_: None),
        (Outliers, "_allowed", lambda *_: 99),
        (Timeouts, "due", lambda *_: iter(())),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_of_the_core_is_found(
    owner: type, name: str, broken: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, broken)
    assert any(run_seed(seed).error for seed in range(150)), f"{name} is broken and nobody notices"


def test_a_scheduler_that_never_gives_up_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """All instances are gone for good while requests wait; nothing wakes anybody but the looks."""
    schedule = small(ChaosFault("die", 0.1, 0), ChaosFault("die", 0.1, 1), answer=1)
    assert not run_schedule(schedule).error
    monkeypatch.setattr(PrefillScheduler, "_give_up", lambda *_: float("inf"))
    assert "nobody gives up" in run_schedule(schedule).error


def test_two_restarts_on_end_lose_nobody_and_answer_nobody_twice() -> None:
    """The second comes before the requests were sent again: they wait for the third scheduler."""
    faults = ChaosFault("restart", 0.305, for_s=0.02), ChaosFault("restart", 0.345, for_s=0.3)
    ended, _ = outcomes(*faults, answer=1)
    turned_away = sum(f.at_s <= ask.at_s < f.at_s + (f.for_s or 0.0) for f in faults for ask in small().asks)
    assert ended == {"COMPLETED": 30 - turned_away, "UNAVAILABLE": turned_away}


def test_a_failure_says_how_to_run_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KvBudget, "release", lambda *_: None)
    assert chaos.main(["--seeds", "3:5", "--workers", "1", "--out", str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert "--schedule" in told
    path = tmp_path / "3.json"
    assert from_json(path.read_text(encoding="utf-8")) == make_schedule(3)
    assert "Traceback" in path.with_suffix(".log").read_text(encoding="utf-8")
    assert chaos.main(["--schedule", str(path), "--out", str(tmp_path)]) == 1


def test_a_sweep_in_processes_is_the_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos.main(["--seeds", "0:6", "--calm"]) == 0
    assert "met it without faults" in capsys.readouterr().out
    assert list(chaos.sweep(range(6), 2)) == list(reports(0)[:6])
