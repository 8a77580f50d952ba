"""Exhibits: laws of what they compute, small runs of what they simulate, their plain data and pictures."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from engines.cost_model import PassShape
from engines.models import load_model
from engines.simulated_settings import engine_setting
from service.core.types import Lane, Role
from service.sim.exhibits import ablation, queueing, window
from service.sim.exhibits.boundary import boundary
from service.sim.exhibits.catalog import EXHIBITS
from service.sim.exhibits.exhibit import Exhibit, Plot, Series, Table, from_json, to_json
from service.sim.exhibits.interference import MIXED, interference, padded
from service.sim.exhibits.markdown import cell_text, exhibit_markdown, table_markdown
from service.sim.exhibits.runs import Scene, attainment_over_time, play, summary
from service.sim.plots import draw
from service.sim.sources import WorkloadSpec

CHAT = WorkloadSpec(parts=(("lmsys_chat_1m", 1.0),))
PACKED = engine_setting(load_model("qwen3-32b"), "packed")


@pytest.mark.parametrize("make", [interference, boundary])
def test_what_is_computed_survives_its_own_json(make: object) -> None:
    exhibit = make()  # type: ignore[operator]
    assert from_json(to_json(exhibit)) == exhibit
    assert exhibit.name in EXHIBITS
    page = exhibit_markdown(exhibit, "lab")
    assert page.count("\n| ") == len(exhibit.table.rows) + 2
    assert all(f"lab/{plot.name}.png" in page for plot in exhibit.plots)


def test_padding_costs_what_the_rectangle_holds() -> None:
    cost = load_model("qwen2.5-32b").cost
    rectangle = PassShape.of(padded(MIXED))
    assert rectangle.tokens == 8 * 2048
    assert cost.pass_s(rectangle) > 5.0 * cost.pass_s(PassShape.of(MIXED))


def test_the_wait_of_one_class_has_no_head_of_line_term() -> None:
    """W of a mix = W of one class of the same load and mean + the head-of-line term."""
    short_s, long_s, p, rate = 0.02, 0.3, 0.1, 10.0
    mean_s = (1 - p) * short_s + p * long_s
    mixed = queueing.pollaczek_khinchine_s(rate, ((1 - p, short_s), (p, long_s)))
    alone = queueing.pollaczek_khinchine_s(rate, ((1.0, mean_s),))
    assert math.isclose(mixed, alone + queueing.head_of_line_s(rate, p, short_s, long_s))
    with pytest.raises(ValueError, match="no steady state"):
        queueing.pollaczek_khinchine_s(1.0 / mean_s, ((1.0, mean_s),))


@pytest.mark.parametrize("load", [0.4, 0.7])
def test_the_simulator_is_an_mg1_queue_where_it_should_be(
    load: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request a pass, first come first served: theory within three half-widths of the interval."""
    monkeypatch.setattr(queueing, "REQUESTS", 8_000)
    short_s, long_s = queueing.services()
    rate = load / (0.9 * short_s + 0.1 * long_s)
    lengths = (queueing.SHORT_TOKENS, queueing.LONG_TOKENS)
    wait = queueing.simulated_wait(rate, lengths, (0.9, 0.1), seed=3)
    theory_s = queueing.pollaczek_khinchine_s(rate, ((0.9, short_s), (0.1, long_s)))
    assert abs(wait.mean_s - theory_s) < 3.0 * wait.half_width_s
    assert wait.half_width_s < 0.5 * theory_s


def test_a_launch_cost_is_saved_by_graphs_and_by_nothing_else() -> None:
    known = load_model("qwen2.5-7b")
    capabilities, profiles, cost = ablation.with_launch(known, "captured")
    plain = ablation.with_launch(known, "packed")
    assert cost.launch_s == plain[2].launch_s == pytest.approx(0.0003 * 28)
    shape, long = profiles.executed([(30, 0)] * 3), profiles.executed([(30, 0), (900, 0)])
    assert shape is not None
    assert long is not None
    assert (shape.captured, long.captured) == (True, False)
    assert capabilities.layer_blocks_max == 1
    with pytest.raises(ValueError, match="layers"):
        ablation.with_launch(replace(known, shape=None), "packed")


def test_a_scene_is_the_same_twice_and_ends() -> None:
    scene = Scene(CHAT, PACKED, 2, rate_per_s=80.0, requests_max=200)
    first, second = play(scene, "plaserve"), play(scene, "plaserve")
    assert list(first.records.values()) == list(second.records.values())
    found = summary(first)
    assert 0.0 <= found.violation_ratio <= 1.0
    assert found.ttft_s_p90 <= found.ttft_s_p99
    with pytest.raises(ValueError, match="warm-up"):
        summary(first, warmup_ratio=1.1)


def test_clients_that_think_come_back_later() -> None:
    """The closed loop keeps its number of clients, so more thinking can only lower the rate."""
    workload = WorkloadSpec(parts=CHAT.parts, arrivals="closed", concurrency=4)
    scene = Scene(workload, PACKED, requests_max=120)
    slow = summary(play(replace(scene, client_s_mean=0.05), "fcfs"))
    assert slow.requests_per_s < summary(play(scene, "fcfs")).requests_per_s


def test_static_roles_stay_and_a_controller_moves_them() -> None:
    workload = WorkloadSpec(parts=(("lmsys_chat_1m", 0.9), ("rag", 0.1)))
    roles = (Role.SP, Role.LP)
    scene = Scene(workload, PACKED, 2, rate_per_s=10.0, seconds=5.0, roles=roles, sample_s=0.5)
    result = play(scene, "laps_slides", static=True)
    assert not result.role_moves
    assert result.samples is not None
    assert set(result.samples.sp) == {1}
    times, shares = attainment_over_time(list(result.records.values()), Lane.SHORT, 1.0)
    assert list(times) == sorted(times)
    assert all(0.0 <= share <= 1.0 for share in shares)


def test_the_window_exhibit_compares_windows_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row a scene. No window by sweep is that of the policy without one: its passes are the same."""
    kinds = [window.PLACES[0], window.PLACES[2], window.PLACES[8], window.PLACES[-1]]
    monkeypatch.setattr(window, "WINDOWS_MS", (0.0, 6.0))
    monkeypatch.setattr(window, "REQUESTS", 300)
    monkeypatch.setattr(window, "PLACES", tuple(kinds))
    exhibit = window.window()
    assert len(exhibit.table.rows) == len(kinds)
    assert all(len(row) == len(exhibit.table.columns) for row in exhibit.table.rows)
    assert "of 4 scenes" in exhibit.reading
    assert [len(plot.series) for plot in exhibit.plots] == [2, 2]
    assert len({plot.name for plot in exhibit.plots}) == 2
    scene = kinds[2].scene()
    none, without = (summary(play(scene, p)) for p in (kinds[2].fixed(0.0), "plaserve-window"))
    assert none == without
    assert none.ttft_s_mean < summary(play(scene, kinds[2].fixed(0.006))).ttft_s_mean


def test_cells_and_tables_read_well() -> None:
    assert [cell_text(c) for c in (None, "x", 3, 12_345, 0.12345, 1234.5)] == [
        "",
        "x",
        "3",
        "12,345",
        "0.123",
        "1,234",
    ]
    assert table_markdown(Table(("a", "b"), (("x", 1.0), ("y", None)))).splitlines()[1] == "| --- | ---: |"


def test_equal_plots_are_equal_files(tmp_path: Path) -> None:
    plot = Plot(
        "p", "t", "x", "y", (Series("a", (1.0, 2.0), (1.0, 3.0)), Series("b", (1.0,), (2.0,), dashed=True))
    )
    for suffix in (".png", ".svg"):
        one, two = tmp_path / f"1{suffix}", tmp_path / f"2{suffix}"
        draw(plot, one)
        draw(plot, two)
        assert one.read_bytes() == two.read_bytes()
    with pytest.raises(ValueError, match="no points"):
        draw(Plot("p", "t", "x", "y", ()), tmp_path / "3.png")


def test_an_exhibit_with_a_wrong_field_is_refused() -> None:
    plain = to_json(interference())
    plain["kind"] = "guessed"
    with pytest.raises(ValueError, match="kind"):
        from_json(plain)
    assert isinstance(from_json(to_json(interference())), Exhibit)
