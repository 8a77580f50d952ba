"""Both drivers against the recorded surface of each stratum that 1.2.1 may have, and what they must say.

The fakes take exactly the recorded parameters, so a keyword that a stratum lacks fails here.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from executor_fakes.vices import Vices
from fake_trtllm import BLOCK, Open, answers, both, call, hear, strata, tokens

from engines.executor.types import (
    Answer,
    CacheStored,
    CallKind,
    Ending,
    ExecutorRole,
    Iteration,
)
from engines.trtllm_child.config import Driver
from engines.trtllm_child.executor_driver import retention
from engines.types import Sampling


@both
@strata
def test_a_pass_is_answered_to_its_end(open_driver: Open, stratum: str, driver: Driver) -> None:
    """Greedy, sampled, ranked, with and without an end token: each keyword of a request, in each stratum."""
    open_ = open_driver(stratum, driver)
    calls = [
        call("greedy", end_id=96),
        call("ranked", 70, 1, priority=80, priority_s=30.0),
        call("warm", 40, 3, sampling=Sampling(temperature=0.7, top_p=0.9, top_k=40, seed=-3)),
    ]
    assert not open_.enqueue(calls)
    heard = hear(open_, 3)
    for each in calls:
        assert len(tokens(heard, each.call_id)) == each.max_tokens
        assert [a.ending for a in answers(heard, each.call_id) if a.final] == [Ending.LENGTH]
        assert all(a.error is None for a in answers(heard, each.call_id))
    ran = [report for report in heard if isinstance(report, Iteration)]
    assert sum(iteration.context_requests for iteration in ran) == 3
    assert all(iteration.kv_blocks_total == 128 for iteration in ran)


@pytest.mark.parametrize(
    ("priority_s", "lasts"),
    [(None, None), (0.25, timedelta(milliseconds=250)), (120.0, timedelta(minutes=2))],
)
def test_a_rank_lasts_as_long_as_it_is_told_to(priority_s: float | None, lasts: timedelta | None) -> None:
    made = retention(
        SimpleNamespace(KvCacheRetentionConfig=SimpleNamespace), SimpleNamespace, 100, priority_s
    )
    (whole,) = made.token_range_retention_configs
    assert (whole.token_start, whole.token_end, whole.priority, whole.duration_ms) == (0, None, 100, lasts)
    assert (made.decode_retention_priority, made.decode_duration_ms) == (100, lasts)


@both
@strata
def test_reuse_is_told_in_whole_blocks(open_driver: Open, stratum: str, driver: Driver) -> None:
    open_ = open_driver(stratum, driver)
    open_.enqueue([call("first", 100, 1)])
    first = hear(open_, 1)
    open_.enqueue([call("second", 100, 1)])
    second = hear(open_, 1)
    assert answers(first, "first")[-1].reused_tokens == 0
    assert answers(second, "second")[-1].reused_tokens == 96
    stored = [r for r in first if isinstance(r, CacheStored)]
    blocks = [block for report in stored for _, block in report.blocks]
    assert blocks[:3] == [tuple(range(n, n + BLOCK)) for n in (0, 32, 64)]


@both
@strata
def test_an_end_token_ends_it(open_driver: Open, stratum: str, driver: Driver) -> None:
    open_ = open_driver(stratum, driver, stop_after=2)
    open_.enqueue([call("a", 40, 9, end_id=96), call("b", 41, 9)])
    heard = hear(open_, 2)
    assert answers(heard, "a")[-1].ending is Ending.END_ID
    assert answers(heard, "b")[-1].ending is Ending.LENGTH
    assert len(tokens(heard, "b")) == 9


@both
@strata
def test_a_hand_over_goes_on_where_it_was(
    open_driver: Open, stratum: str, driver: Driver, tmp_path: Path
) -> None:
    """The two sides together say what one executor says alone; the ticket is opaque and goes both ways."""
    options = {"exchange": str(tmp_path), "transceiver": "UCX"}
    prefill = open_driver(stratum, driver, role=ExecutorRole.CONTEXT, **options)
    decode = open_driver(stratum, driver, role=ExecutorRole.GENERATION, **options)
    prefill.enqueue([call("p", 100, 5, kind=CallKind.CONTEXT_ONLY)])
    final = answers(hear(prefill, 1), "p")[-1]
    assert final.ending is Ending.NOT_FINISHED
    ticket = final.ticket
    assert ticket is not None
    assert len(ticket.first_gen_tokens) == 1
    assert ticket.block_tokens == BLOCK
    decode.enqueue([call("d", 100, 5, kind=CallKind.GENERATION_ONLY, ticket=ticket)])
    late = tokens(hear(decode, 1), "d")
    decode.enqueue([call("alone", 100, 5)])
    alone = tokens(hear(decode, 1), "alone")
    assert [*ticket.first_gen_tokens, *late] == alone


@both
def test_a_generation_only_call_without_a_ticket_is_refused(open_driver: Open, driver: Driver) -> None:
    open_ = open_driver("S2", driver, transceiver="UCX", role=ExecutorRole.GENERATION)
    refused = list(open_.enqueue([call("d", kind=CallKind.GENERATION_ONLY)]))
    [answer] = refused or [r for r in hear(open_, 1) if isinstance(r, Answer)]
    assert answer.final
    assert "needs a ticket" in (answer.error or "")


@both
def test_an_error_ends_one_call(open_driver: Open, driver: Driver) -> None:
    open_ = open_driver("S3", driver, Vices(error_response=3))
    open_.enqueue([call("a", 40), call("b", 41)])  # requests 2 and 3: the first one was the warm-up
    heard = hear(open_, 2)
    failed = {name: answers(heard, name)[-1].error for name in ("a", "b")}
    assert failed["a"] is None
    assert failed["b"]


@both
def test_a_cancelled_call_is_over_and_unknown_ids_are_ignored(open_driver: Open, driver: Driver) -> None:
    open_ = open_driver("S2", driver)
    open_.cancel("never heard of")
    open_.enqueue([call("a", 40, 1_900)])  # it may be done before it is cancelled
    open_.cancel("a")
    heard = hear(open_, 1)
    assert [answer.final for answer in answers(heard, "a")].count(True) == 1
    assert answers(heard, "a")[-1].ending in (Ending.CANCELLED, Ending.LENGTH)
    open_.cancel("a")


def test_a_last_response_that_comes_twice_is_told_once(open_driver: Open) -> None:
    open_ = open_driver("S1", Driver.ENGINE, Vices(duplicate_final=True))
    open_.enqueue([call("a")])
    heard = hear(open_, 1) + list(open_.poll(0.1).reports)
    assert sum(answer.final for answer in answers(heard, "a")) == 1
