"""Chaos on real processes: schedules by seed, laws that notice what they are for, and one run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from protos.plaserve.v1 import inference_pb2 as pb
from service.bench import chaos
from service.bench.chaos_clients import Heard, prompt_of
from service.bench.chaos_laws import calm_laws, client_laws, right_tokens, wait_laws
from service.bench.chaos_plan import HOW, KINDS, VARIANTS, RealFault, from_json, make_schedule, to_json
from service.bench.chaos_run import Report
from service.bench.etcd import MISSING, find_etcd
from service.sim.chaos_schedule import Ask

SEEDS = range(20)  # of `make chaos`
ROOT = Path(__file__).parents[2]


# --- schedules ---


def test_a_seed_is_one_schedule_whatever_process_makes_it_and_json_keeps_it() -> None:
    command = [sys.executable, "-m", chaos.MODULE, "--seeds", "3:6", "--show"]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    shown = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=True)
    assert shown.stdout.splitlines() == [to_json(make_schedule(seed)) for seed in range(3, 6)]
    assert [from_json(line) for line in shown.stdout.splitlines()] == [make_schedule(n) for n in range(3, 6)]


def test_the_twenty_of_make_chaos_have_every_variant() -> None:
    schedules = [make_schedule(seed) for seed in SEEDS]
    faults = [fault for schedule in schedules for fault in schedule.faults]
    assert {fault.kind for fault in faults} == set(KINDS)
    found = {(fault.kind, fault.target.rstrip("0123456789"), fault.how) for fault in faults}
    names = {"worker": "w", "frontend": "f"}
    for kind, target, how in VARIANTS:
        wanted = ("s" if kind == "clock" and target == "scheduler" else names.get(target, target)), how
        assert any((kind, *wanted) == (k, t, h if k != "role" else how) for k, t, h in found), (kind, target)
    assert all(schedule.asks and schedule.faults for schedule in schedules)
    assert any(ask.cancel_s is not None for schedule in schedules for ask in schedule.asks)
    assert any(ask.deadline_s is not None for schedule in schedules for ask in schedule.asks)


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_faults_are_for_processes_that_there_are_and_do_not_overlap_on_one(first: int) -> None:
    for seed in range(first, first + 20):
        schedule = make_schedule(seed)
        there = {f"w{n}" for n in range(schedule.workers)} | {"f0", "f1", "s0", "s1", "etcd", "all"}
        there |= {"scheduler", "controller"}
        last_end_s: Counter[str] = Counter()
        for fault in schedule.faults:
            assert fault.target in there
            assert fault.how in HOW.get(fault.kind, ("",))
            assert fault.at_s >= last_end_s[fault.target]
            last_end_s[fault.target] = max(last_end_s[fault.target], fault.end_s)  # type: ignore[assignment]
        assert len({prompt_of(n, ask) for n, ask in enumerate(schedule.asks)}) == len(schedule.asks)
        assert all(
            len(prompt_of(n, ask)) == ask.prompt_tokens for n, ask in enumerate(schedule.asks)
        )  # a byte is a token


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"kind": "explode"}, "kind 'explode'"),
        ({"kind": "cut", "how": "half"}, "how to be network or etcd"),
        ({"kind": "slow", "factor": 1.0}, "factor"),
        ({"kind": "hang", "for_s": -1.0}, "for_s"),
    ],
)
def test_a_bad_fault_is_named(values: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        RealFault(**{"at_s": 1.0, "target": "w0", **values})  # type: ignore[arg-type]


def test_a_file_that_is_no_schedule_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text('{"seed": 1}')
    with pytest.raises(SystemExit) as ended:
        chaos.main(["--schedule", str(bad)])
    assert ended.value.code == 2
    assert "--schedule" in capsys.readouterr().err


# --- laws ---


def good() -> Heard:
    ask = Ask(0.0, 40, 3)
    text = prompt_of(7, ask)
    tokens = right_tokens(text, 3)
    summary = pb.Summary(output_token_count=3, prompt_token_count=40)
    return Heard("r0", ask, text, "a", 0.0, 0.1, 1.0, "OK", "", tokens, 0, [summary], False, 1)


def refused() -> Heard:
    return replace(good(), status="UNAVAILABLE", tokens=good().tokens[:1], summaries=[])


def test_what_is_right_breaks_no_law() -> None:
    left = replace(good(), status="CANCELLED", went=True, summaries=[])
    late = replace(refused(), status="DEADLINE_EXCEEDED", ask=Ask(0.0, 40, 3, deadline_s=0.5))
    for heard in (good(), refused(), left, late):
        assert client_laws([heard], [heard.ask]) == []


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (replace(good(), tokens=good().tokens[:2]), "2 tokens of 3"),
        (replace(good(), tokens=[*good().tokens[:2], good().tokens[1]]), "right are"),
        (replace(good(), tokens=[good().tokens[1], good().tokens[0], good().tokens[2]]), "right are"),
        (replace(refused(), tokens=[5]), "right are"),
        (replace(good(), tokens_late=1), "after the summary"),
        (replace(good(), summaries=good().summaries * 2), "2 summaries"),
        (replace(good(), ends=2), "2 ends"),
        (replace(good(), ends=0, status="", summaries=[]), "ended as nothing"),
        (replace(refused(), status="INTERNAL"), "ended as INTERNAL"),
        (replace(refused(), status="CANCELLED"), "its client did not go"),
        (replace(refused(), status="DEADLINE_EXCEEDED"), "not answered within"),
        (replace(refused(), summaries=good().summaries), "had its summary"),
    ],
)
def test_a_bad_answer_is_noticed(bad: Heard, told: str) -> None:
    broken = client_laws([bad], [bad.ask])
    assert any(told in each for each in broken), broken


def test_who_is_lost_or_ends_twice_is_noticed() -> None:
    heard = good()
    assert any("r1 never ended" in each for each in client_laws([heard], [heard.ask] * 2))
    assert any("ended 2 times" in each for each in client_laws([heard, heard], [heard.ask]))


def test_a_long_wait_is_noticed_unless_the_front_end_stood_still() -> None:
    slow = replace(good(), end_s=14.0)
    hung = RealFault("hang", 1.0, "scheduler", 30.0)
    schedule = replace(make_schedule(0), faults=(hung,))
    assert "waited 14.0 s" in wait_laws([slow], schedule, {"a": "f0"})[0]
    own = replace(schedule, faults=(hung, RealFault("hang", 1.0, "f0", 5.0)))
    assert wait_laws([slow], own, {"a": "f0"}) == []
    assert wait_laws([slow], own, {"a": "f1"}) != []
    assert wait_laws([replace(slow, went=True)], schedule, {"a": "f0"}) == []


def test_without_faults_a_failure_is_one() -> None:
    assert calm_laws([good()]) == []
    assert "without any fault" in calm_laws([refused()])[0]


def test_a_failure_says_how_to_run_it_again(tmp_path: Path) -> None:
    report = Report(7, broken=["x"])
    assert chaos.again(report, tmp_path, by_seed=True) == "python -m service.bench.chaos --seeds 7"
    path = chaos.again(report, tmp_path, by_seed=False).split()[-1]
    assert path == str(tmp_path / "seed-7" / "schedule.json")


# --- a run ---


@pytest.mark.slow
@pytest.mark.skipif(find_etcd() is None, reason=MISSING)
def test_a_schedule_on_real_processes_keeps_the_laws(tmp_path: Path) -> None:
    faults = (
        RealFault("die", 1.0, "w0", 0.5),
        RealFault("hang", 2.0, "f1", 1.0),
        RealFault("die", 3.0, "scheduler", 1.0),
    )
    schedule = make_schedule(3)
    asks = tuple(ask for ask in schedule.asks if ask.at_s < 5.0)
    path = tmp_path / "schedule.json"
    path.write_text(to_json(replace(schedule, faults=faults, asks=asks)))
    out = tmp_path / "out"
    assert chaos.main(["--schedule", str(path), "--out", str(out)]) == 0
    (run,) = json.loads((out / "report.json").read_text())["runs"]
    assert len(run["happened"]) == 3
    assert run["endings"]["OK"] > 0.5 * len(asks)
    assert not (out / "seed-3").exists()  # logs are kept of failures
