"""Ablations: each leaves out what it names, is a policy to the lab like any other, and changes decisions."""

from __future__ import annotations

from functools import cache

import pytest

from engines.models import load_model
from engines.simulated_settings import engine_setting
from service.core import invariants
from service.core.settings import Mode, SchedulerSettings
from service.core.types import Role
from service.policies import POLICIES
from service.sim.ablations import ABLATIONS
from service.sim.code_digest import imported, source_digest
from service.sim.exhibits.runs import Scene, play
from service.sim.lab_policies import is_known, is_ours, make_scheduler, parse
from service.sim.sources import WorkloadSpec

PACKED = engine_setting(load_model("qwen3-32b"), "packed")
PADDED = engine_setting(load_model("qwen3-32b"), "padded_grid")
MIX = WorkloadSpec(parts=(("lmsys_chat_1m", 0.8), ("rag", 0.2)))
SHORTS = WorkloadSpec(parts=(("lmsys_chat_1m", 1.0),), prompt_tokens_max=255)
AGENTS = WorkloadSpec(parts=(("agent", 1.0),), arrivals="sessions", prompt_tokens_max=8192)

BUSY = Scene(MIX, PACKED, rate_per_s=18.0, requests_max=250)
FAR_OVER = Scene(MIX, PACKED, rate_per_s=60.0, requests_max=400)
CALM = Scene(SHORTS, PACKED, rate_per_s=60.0, requests_max=100)
SEVERAL = Scene(SHORTS, PACKED, 4, rate_per_s=300.0, requests_max=250)
GRID = Scene(SHORTS, PADDED, rate_per_s=150.0, requests_max=250)
POOLS = Scene(MIX, PACKED, 3, rate_per_s=70.0, requests_max=250, roles=(Role.SP, Role.SP, Role.LP))
SESSIONS = Scene(AGENTS, PACKED, 3, rate_per_s=25.0, requests_max=300)
SCENES = {
    "window": SEVERAL,
    "adaptation": CALM,
    "grouping": GRID,
    "costs": GRID,
    "ageing": FAR_OVER,
    "hopeless": FAR_OVER,
    "placement": SESSIONS,
    "spill": POOLS,
}


@cache
def first_tokens(scene: Scene, policy: str) -> tuple[float | None, ...]:
    if scene.roles:
        policy += ":mode=spatial"
    found = play(scene, policy, static=bool(scene.roles))
    return tuple(record.first_token_s for record in found.records.values())


@pytest.mark.parametrize("off", ABLATIONS)
def test_every_ablation_changes_decisions(off: str) -> None:
    """Where its mechanism has something to say, first tokens come at other times; everybody is served."""
    scene = SCENES.get(off, BUSY)
    without = first_tokens(scene, f"plaserve-{off}")
    assert None not in without
    assert without != first_tokens(scene, "plaserve")


def test_an_ablation_is_the_policy_with_its_knobs_but_for_what_is_off() -> None:
    base = SchedulerSettings()
    kind, settings, own = parse("plaserve-window:long_chunk_s_max=0.3,window_s_max=0.02", base)
    assert (settings.window_s_max, settings.long_chunk_s_max, settings.mode) == (0.0, 0.3, Mode.AUTO)
    assert own == parse("plaserve", base)[2]
    assert not kind.search
    assert parse("fcfs:budget_tokens=512", base)[1].budget_tokens == 512
    with pytest.raises(ValueError, match="tried without window"):
        parse("plaserve-luck", base)
    with pytest.raises(ValueError, match="unknown policy"):
        parse("fcfs-window", base)
    assert not is_known("fcfs-window")
    assert not is_known("plaserve-luck")
    assert is_known("plaserve-due:mode=spatial")
    assert [p for p in POLICIES if is_ours(p)] == ["plaserve"]
    assert is_ours("plaserve-due")
    invariants.check(make_scheduler("plaserve-spill", base))


def test_ablations_have_digests_that_leave_the_peers_alone() -> None:
    """What makes them is code of theirs only: neither the metric nor a peer depends on it."""
    assert "service.core.length_aware" not in imported(["service.sim.tasks"])
    digests = {p: source_digest(["service.sim.tasks"], p) for p in ("plaserve", "plaserve-due", "fcfs")}
    assert len(set(digests.values())) == 3
