"""Every policy on traffic that the state machines of the core rarely meet: long sessions with shared prefixes
on several instances, beyond saturation, on each kind of engine. Everybody is answered, once."""

from __future__ import annotations

import pytest

from engines.models import load_model
from engines.simulated_settings import engine_setting
from service.core.types import Outcome
from service.policies import POLICIES
from service.sim.exhibits.runs import Scene, play
from service.sim.sources import WorkloadSpec

SESSIONS = WorkloadSpec(parts=(("agent", 1.0),), arrivals="sessions", prompt_tokens_max=32_768)
MIX = WorkloadSpec(parts=(("lmsys_chat_1m", 0.9), ("rag", 0.1)), output_tokens=3)


@pytest.mark.parametrize("kind", ["packed", "trtllm_like", "padded_grid"])
@pytest.mark.parametrize("policy", POLICIES)
def test_sessions_on_several_instances_are_all_answered(policy: str, kind: str) -> None:
    setting = engine_setting(load_model("qwen3-32b"), kind, block_tokens=SESSIONS.block_tokens)
    result = play(Scene(SESSIONS, setting, 4, rate_per_s=30.0, requests_max=300), policy)
    assert len(result.records) == 300
    for record in result.records.values():
        assert record.outcome is Outcome.COMPLETED
        assert record.output_tokens == 1
        assert record.new_tokens + record.history_tokens >= record.request.prompt_tokens


@pytest.mark.parametrize("kind", ["packed", "trtllm_like"])
@pytest.mark.parametrize("policy", POLICIES)
def test_decode_on_the_same_instances_ends_every_answer(policy: str, kind: str) -> None:
    setting = engine_setting(load_model("llama-3.1-8b"), kind)
    result = play(Scene(MIX, setting, 2, rate_per_s=60.0, requests_max=150), policy)
    assert [r.outcome for r in result.records.values()] == [Outcome.COMPLETED] * 150
    assert {r.output_tokens for r in result.records.values()} == {3}
