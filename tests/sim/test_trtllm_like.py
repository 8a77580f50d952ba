"""Every policy on simulated engines of every kind: what is predicted is what runs, whatever rides in a pass
or was cut into requests, and a part whose blocks were evicted is computed again, not failed."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from engines.models import load_model
from engines.simulated import SimulatedModel
from engines.simulated_settings import engine_setting
from engines.types import Pass, PassKind
from service.core.settings import SchedulerSettings
from service.core.types import Dispatch, InstanceSpec, Outcome, PassFinished, Request, Submit
from service.policies import make_scheduler
from service.policies.registry import POLICIES
from service.sim.kernel import SimResult, run

MODEL = load_model("llama-3.1-8b")
ANSWER = 6


class Forgetful(SimulatedModel):
    """Everything that nobody holds is evicted before each seventh pass, as if another tenant needed it."""

    def begin(self, pass_: Pass) -> float:
        stats, pool = self.stats(), self._book.pool
        if stats.passes_done % 7 == 6:
            tenant = pool.acquire((), 0)
            pool.extend(tenant, (stats.kv_blocks_free + stats.kv_blocks_cached) * pool.block_tokens)
            pool.release(tenant)
        return super().begin(pass_)


def simulate(
    policy: str,
    kind: str,
    model_of: type[SimulatedModel] = SimulatedModel,
    instances: int = 2,
    w_s_max: float = 0.008,
) -> SimResult:
    setting = engine_setting(MODEL, kind)
    rng = random.Random(1)
    now_s, arrivals = 0.0, []
    for index in range(60):
        now_s += rng.expovariate(60.0)
        tokens = rng.choice([30, 100, 400, 1500, 9000])
        arrivals.append((now_s, Request(f"r{index}", tokens, ANSWER, now_s)))
    fleet = [(InstanceSpec(f"i{k}", *setting), model_of(*setting)) for k in range(instances)]
    settings = SchedulerSettings(stage_lead_s=0.0, window_s_max=w_s_max)
    result = run(make_scheduler(policy, settings), fleet, arrivals)
    for _, model in fleet:
        model.check()
        assert model.stats().requests_live == 0
    return result


def check_all_served(result: SimResult, *, exactly: bool = True) -> None:
    for record in result.records.values():
        assert record.outcome is Outcome.COMPLETED
        assert record.output_tokens == ANSWER
        computed = record.new_tokens + record.history_tokens
        assert computed == record.request.prompt_tokens or (
            not exactly and computed > record.request.prompt_tokens
        )


@pytest.mark.parametrize("kind", ["packed", "trtllm_like", "padded_grid"])
@pytest.mark.parametrize("policy", list(POLICIES))
def test_what_is_predicted_is_what_runs(policy: str, kind: str) -> None:
    """Without staging, so that a plan sees what decodes when its pass starts."""
    result = simulate(policy, kind)
    check_all_served(result)
    predicted_s = {}
    for _, entry in result.log:
        if isinstance(entry, Dispatch):
            predicted_s[entry.pass_.pass_id] = entry.numbers.predicted_s
        elif isinstance(entry, PassFinished):
            assert entry.result.elapsed_s == pytest.approx(predicted_s[entry.result.pass_id])


@pytest.mark.parametrize("policy", ["plaserve", "fcfs", "chunked"])
def test_parts_that_were_evicted_are_computed_again(policy: str) -> None:
    result = simulate(policy, "trtllm_like", Forgetful)
    check_all_served(result, exactly=False)
    positions: dict[str, list[int]] = {}
    for _, entry in result.log:
        if isinstance(entry, PassFinished):
            for item in entry.result.items:
                positions.setdefault(item.request_id, []).append(item.position)
    assert any(after < before for row in positions.values() for before, after in pairwise(row))


@pytest.mark.parametrize("policy", ["plaserve", "fcfs"])
def test_decode_that_rides_takes_no_turn_while_a_prompt_could_run(policy: str) -> None:
    """With one instance and no window: then a pass of decode alone means that nobody waits."""
    waiting: set[str] = set()
    passes = {PassKind.PREFILL: 0, PassKind.DECODE: 0}
    for _, entry in simulate(policy, "trtllm_like", instances=1, w_s_max=0.0).log:
        if isinstance(entry, Submit):
            waiting.add(entry.request.request_id)
        elif isinstance(entry, Dispatch):
            passes[entry.pass_.kind] += 1
            if entry.pass_.kind is PassKind.DECODE:
                assert not waiting
            else:
                waiting -= {item.request_id for item in entry.pass_.items}
        elif isinstance(entry, PassFinished):
            parts = (i for i in entry.result.items if i.token is None)
            waiting |= {item.request_id for item in parts}
    assert min(passes.values()) > 0
