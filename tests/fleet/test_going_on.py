"""The rest of an answer as a request of its own: nothing is asked for twice or left out."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from engines.blocks import chain_hashes
from engines.types import EngineRequest, Sampling
from protos.plaserve.v1 import scheduler_pb2 as pb
from service.core.types import Outcome, Reason, Request
from service.fleet.going_on import TIMES_MAX, Prefilled, goes_on, rest_of
from service.fleet.remote_worker import MOVED
from service.runtime.contract import RequestRecord

IDS = st.lists(st.integers(3, 40_000), min_size=1, max_size=80)
BLOCK = 32


@settings(max_examples=40)
@given(IDS, IDS, st.integers(1, 50), st.sampled_from([0.0, 0.7]))
def test_prompt_and_answer_stay_the_same_together(
    prompt: list[int], answer: list[int], left: int, temperature: float
) -> None:
    asked = len(answer) + left
    hashes = chain_hashes(tuple(prompt), BLOCK)
    request = Request("r", len(prompt), asked, 1.0, hashes or (7,), deadline_s=9.0, session="s")
    engine = EngineRequest("r", tuple(prompt), asked, Sampling(temperature, seed=5))
    rest, rest_engine = rest_of(request, engine, answer, BLOCK, 4.0)
    assert rest_engine.token_ids == (*prompt, *answer)
    assert rest.prompt_tokens == len(rest_engine.token_ids)
    assert rest.max_new_tokens == rest_engine.max_new_tokens == left
    assert rest.block_hashes == chain_hashes(rest_engine.token_ids, BLOCK)
    assert rest.block_hashes[: len(hashes)] == hashes  # so the cache of another worker is found
    assert rest.arrival_s == 4.0
    kept = {"prompt_tokens": 0, "max_new_tokens": 0, "block_hashes": (), "arrival_s": 0.0}
    assert replace(rest, **kept) == replace(request, **kept)
    assert (rest_engine.sampling == engine.sampling) == (temperature == 0.0)


def ended(**changes: object) -> pb.RequestEnded:
    said: dict[str, object] = {
        "outcome": Outcome.UNAVAILABLE.value,
        "reason": Reason.INSTANCE_LOST.value,
        "detail": f"{MOVED}it loads engine lp",
        "output_token_count": 3,
    }
    return pb.RequestEnded(**{**said, **changes})  # type: ignore[arg-type]


def test_only_an_answer_that_had_begun_and_lost_its_engine_to_a_move_goes_on() -> None:
    record = RequestRecord(Request("r", 8, 10, 0.0))
    assert goes_on(ended(), record, 0, 0)
    assert goes_on(ended(), record, TIMES_MAX - 1, 6)
    assert not goes_on(ended(), record, TIMES_MAX, 0)
    assert not goes_on(ended(output_token_count=0), record, 0, 0)
    assert not goes_on(ended(output_token_count=10), record, 0, 0)  # it is whole
    assert not goes_on(ended(detail="gone: nobody listens"), record, 0, 0)
    assert not goes_on(ended(outcome=Outcome.COMPLETED.value, reason=""), record, 0, 0)
    assert not goes_on(ended(outcome=Outcome.ENGINE_FAILED.value), record, 0, 0)


def test_what_a_record_says_of_its_prompt_is_of_the_first_part() -> None:
    record = RequestRecord(Request("r", 8, 10, 0.0))
    record.new_tokens, record.history_tokens, record.pass_ids = 6, 2, [1, 2]
    record.first_pass_start_s, record.first_dispatch_reason = 0.5, Reason.NO_GAIN
    first = Prefilled.of(record)
    record.new_tokens, record.history_tokens, record.pass_ids = 12, 0, [9]
    record.first_pass_start_s, record.first_dispatch_reason = 7.5, Reason.AGED
    first.put(record)
    assert (record.new_tokens, record.history_tokens, record.pass_ids) == (6, 2, [1, 2, 9])
    assert (record.first_pass_start_s, record.first_dispatch_reason) == (0.5, Reason.NO_GAIN)
