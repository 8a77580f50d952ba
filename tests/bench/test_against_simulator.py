"""The service against the simulator: what is slowed, what is sent, what counts as too far apart."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from engines.simulated import SimulatedModel
from engines.simulated_settings import h200_32b_like
from service.bench.loadgen import Ending, Observation
from service.bench.parity import (
    ParitySettings,
    arrivals_of,
    in_engine_time,
    message,
    planned,
    server_spec,
    simulate,
    slowed,
)
from service.bench.parity_report import CPU_MAX, compared, parity_json, render_parity
from service.cli import app
from service.core.settings import SchedulerSettings
from service.core.types import InstanceSpec
from service.policies import make_scheduler
from service.rpc.text import ByteCodec
from service.settings import load_settings
from service.sim.kernel import run

SCALE = 4.0
SETTINGS = ParitySettings(requests=2000)


@pytest.mark.parametrize("policy", SETTINGS.policies)
def test_a_slowed_system_does_the_same_only_slower(policy: str) -> None:
    """Engine, arrivals, targets and settings four times as slow: every TTFT is exactly four times as long.

    It fails when a time in the core is neither a setting nor derived from one, or `slowed` forgets one.
    """
    arrivals = arrivals_of(SETTINGS)
    capabilities, profiles, cost = h200_32b_like()
    slow = cost.scaled(SCALE)
    requests = [
        replace(
            a.request, arrival_s=a.request.arrival_s * SCALE, ttft_target_s=a.request.ttft_target_s * SCALE
        )
        for a in arrivals
    ]
    scheduler = make_scheduler(policy, slowed(SchedulerSettings(), SCALE))
    instance = (
        InstanceSpec("i0", capabilities, profiles, slow),
        SimulatedModel(capabilities, profiles, slow),
    )
    result = run(scheduler, [instance], [(r.arrival_s, r) for r in requests])
    in_time, _ = simulate(policy, arrivals)
    for record, seen in zip(result.records.values(), in_time, strict=True):
        assert record.ttft_s == pytest.approx(seen.ttft_s * SCALE, rel=1e-6)


def test_every_setting_in_seconds_is_slowed_and_nothing_else() -> None:
    fast = SchedulerSettings(stage_lead_s=0.001, window_s_min=0.001)  # by default 0
    slow = slowed(fast, 8.0)
    numbers = {item.name for item in fields(fast) if type(getattr(fast, item.name)) is float}
    changed = {item.name for item in fields(fast) if getattr(slow, item.name) != getattr(fast, item.name)}
    shares = {"queue_short_share", "decode_share_min", "outlier_share_max", "aged_share"}
    ratios = {"ttft_target_long_factor", "cost_correction_max", "outlier_ratio", "hang_ratio"}
    assert changed == numbers - shares - ratios
    assert all(getattr(slow, name) == 8.0 * getattr(fast, name) for name in changed)


def test_the_service_is_told_all_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the environment of the server says is what `serve` will read."""
    for name, value in server_spec("fcfs", SCALE, tmp_path).environment.items():
        monkeypatch.setenv(name, value)
    settings = load_settings()
    assert settings.scheduler == slowed(SchedulerSettings(), SCALE)
    assert settings.engine.simulated_time_scale == SCALE
    assert settings.engine.simulated_preset == "h200_32b"


def test_prompts_go_out_with_their_lengths_and_share_no_block() -> None:
    arrivals = arrivals_of(SETTINGS)
    plan, codec = planned(arrivals, SCALE), ByteCodec()
    block = h200_32b_like()[0].block_tokens
    blocks: set[str] = set()
    for arrival, request in zip(arrivals, plan, strict=True):
        text = message(request).prompt.text
        assert len(codec.encode(text)) == arrival.request.prompt_tokens == request.prompt.tokens
        assert request.send_s == SCALE * arrival.request.arrival_s
        assert message(request).scheduling.ttft_slo.ToNanoseconds() == pytest.approx(
            SCALE * arrival.request.ttft_target_s * 1e9
        )
        if len(text) >= block:
            assert text[:block] not in blocks
            blocks.add(text[:block])


def seen_by(requests: int, factor: float = 1.0, ending: Ending = Ending.COMPLETED) -> list[Observation]:
    """TTFTs of 10 ms, 20 ms and so on times `factor`; targets that 90 % meet at factor 1."""
    plan = planned(arrivals_of(replace(SETTINGS, requests=requests)), 1.0)
    target_s = 0.0101 * 0.9 * requests
    return [
        Observation(p.request_id, p.prompt.label, p.send_s, target_s, ending, ttft_s=0.01 * n * factor)
        for n, p in enumerate(plan, 1)
    ]


def test_equal_sides_have_no_fault_and_each_bound_is_held() -> None:
    same = seen_by(200)
    assert compared("fcfs", same, same, 0.1, 0.5).faults() == []
    slow = [
        in_engine_time(seen, 4.0)
        for seen in (replace(s, ttft_s=s.ttft_s * 4.0, target_s=s.target_s * 4.0) for s in same)
    ]
    assert compared("fcfs", slow, same, 0.1, 0.5).faults() == []
    late = "\n".join(compared("fcfs", seen_by(200, 1.2), same, 0.1, 0.5).faults())
    assert "all: attainment differs" in late
    assert "all: TTFT p50 differs by +20.0%" in late
    assert "all: TTFT p90 differs by +20.0%" in late
    assert compared("fcfs", seen_by(200, 0.98), same, 0.1, 0.5).faults() == []
    assert compared("fcfs", same, same, 0.6, 0.5).faults() == [
        "fcfs: the service took 0.60 cores; the bound is 0.5"
    ]


def test_a_request_without_an_answer_is_a_fault() -> None:
    same = seen_by(200)
    result = compared(
        "fcfs", [replace(same[0], ending=Ending.FAILED, ttft_s=None), *same[1:]], same, 0.1, 0.5
    )
    assert result.faults() == ["fcfs: 1 requests did not complete"]
    none = compared("fcfs", seen_by(200, ending=Ending.REFUSED), same, 0.1, 0.5)
    assert any("attainment" in fault for fault in none.faults())


def test_the_report_fits_a_terminal_and_the_document_is_json() -> None:
    results = [compared("plaserve", seen_by(200, 1.2), seen_by(200), 0.1, 0.5)]
    console = Console(width=80)
    with console.capture() as shown:
        console.print(render_parity(results))
    assert "…" not in shown.get()
    document = json.loads(json.dumps(parity_json(results), allow_nan=False))
    assert document["plaserve"]["lanes"]["all"]["p50_difference"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("field", "value"),
    [("policies", ("chunked",)), ("policies", ()), ("requests", 1), ("load_ratio", 1.5), ("scale", 0.0)],
)
def test_bad_settings_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field.removesuffix("_ratio")):
        ParitySettings(**{field: value})  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_service_does_what_the_simulator_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two minutes of the real thing; wider bounds than those of the command, for fewer requests."""
    monkeypatch.chdir(tmp_path)
    CliRunner().invoke(app, ["bench", "parity", "--requests", "300", "--json", "parity.json"])
    document = json.loads((tmp_path / "parity.json").read_text())
    assert set(document) == {"plaserve", "fcfs"}
    for policy in document.values():
        every = policy["lanes"]["all"]
        assert policy["endings"] == {"completed": 300}
        assert policy["cpu_cores"] < CPU_MAX
        assert abs(every["attainment_difference"]) < 0.05
        assert abs(every["p50_difference"]) < 0.2
        assert abs(every["p90_difference"]) < 0.2
