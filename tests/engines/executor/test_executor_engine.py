"""What an engine makes of passes, and of answers: calls, budgets, reuse, admission, riders, statistics."""

from __future__ import annotations

from typing import Any

import pytest
from executor_rig import BLOCK, BLOCKS, EOS, answer_of, asked, rig, scripted
from hypothesis import given
from hypothesis import strategies as st

from engines.base import Engine, EngineError
from engines.executor.types import (
    Answer,
    CallKind,
    CancelMode,
    Ending,
    ExecutorRole,
    ExecutorSettings,
    Facts,
    Incident,
    Iteration,
    Unread,
)
from engines.types import BlocksStored, FinishReason, ItemResult, Pass, PassItem, PassKind, Ran
from tests.executor_fakes.pool import block_hashes
from tests.executor_fakes.vices import Vices


def prefill_of(*items: tuple[str, int, int]) -> Pass:
    return Pass(1, PassKind.PREFILL, tuple(PassItem(*item) for item in items))


def decode_of(*items: tuple[str, int]) -> Pass:
    return Pass(1, PassKind.DECODE, tuple(PassItem(name, 1, past) for name, past in items))


def test_it_is_an_engine() -> None:
    assert isinstance(rig().engine, Engine)


# --- calls ---


def test_a_pass_is_one_enqueue_of_parts_and_real_calls() -> None:
    made = rig()
    made.engine.submit(asked("long", 50, 3))
    made.engine.submit(asked("short", 5, 4, family=1))
    made.prefill(("long", 24, 0), ("short", 5, 0))
    ((part, real),) = made.link.enqueued
    assert (part.kind, part.token_ids, part.max_tokens) == (CallKind.GENERATE, asked("", 24).token_ids, 1)
    assert (real.kind, real.token_ids, real.max_tokens) == (
        CallKind.GENERATE,
        asked("", 5, family=1).token_ids,
        4,
    )
    assert part.priority == 100
    assert real.priority is None
    made.prefill(("long", 26, 24))
    ((whole,),) = made.link.enqueued[1:]
    assert (len(whole.token_ids), whole.max_tokens, whole.priority) == (50, 3, 35)


def test_who_brings_most_from_the_cache_goes_last_so_that_the_pass_is_not_split() -> None:
    """An executor that counts cached tokens against an iteration fills it in the order that it is given."""
    made = rig(Vices(counts_cached=True), executor={"max_num_tokens": 72})
    made.engine.submit(asked("old", 64, 1))
    made.prefill(("old", 56, 0))
    for family in (1, 2, 3):
        made.engine.submit(asked(f"new{family}", 8, 1, family=family))
    result = made.prefill(("old", 8, 56), *((f"new{family}", 8, 0) for family in (1, 2, 3)))
    assert result.ran == Ran(1, 4, 32)
    assert [item.request_id for item in result.items] == ["old", "new1", "new2", "new3"]
    assert [len(call.token_ids) for call in made.link.enqueued[-1]] == [8, 8, 8, 64]


def test_reports_that_could_not_be_read_are_counted() -> None:
    _, engine = scripted([[Unread(3), Answer("r/1", (1,), True, Ending.LENGTH)]])
    engine.submit(asked("r", 5, 1))
    engine.execute(prefill_of(("r", 5, 0)))
    assert engine.incidents[Incident.BAD_REPORT] == 1


def test_a_session_is_kept_longer_than_others_and_shorter_than_a_part() -> None:
    made = rig()
    made.engine.submit(asked("session", 20, 1, retain=True))
    made.prefill(("session", 16, 0))
    made.prefill(("session", 4, 16))
    assert [call.priority for calls in made.link.enqueued for call in calls] == [100, 80]


@pytest.mark.parametrize(("retain", "rank"), [(False, 35), (True, 80)])
def test_blocks_of_parts_lose_their_rank_with_the_real_call(retain: bool, rank: int) -> None:
    """A rank is kept by whoever takes a block without asking for another: documents that were computed in
    parts would stay above sessions for good."""
    made = rig()
    request = asked("document", 50, 2, retain=retain)
    made.engine.submit(request)
    made.prefill(("document", 24, 0))
    hashes = block_hashes(request.token_ids, BLOCK)
    assert made.executor.pool.priorities(hashes) == [100] * 3
    made.prefill(("document", 26, 24))
    made.decode_to_the_end("document")
    assert made.executor.pool.priorities(hashes) == [rank] * 6
    made.engine.submit(asked("other", 50, 1))
    made.prefill(("other", 50, 0))
    assert made.link.enqueued[-1][0].priority is None  # it takes them as they are
    assert made.executor.pool.priorities(hashes) == [rank] * 6


def test_a_part_is_ranked_for_a_time_as_its_request_may_be_given_up() -> None:
    made = rig()
    made.engine.submit(asked("document", 50, 1))
    made.prefill(("document", 24, 0))
    made.prefill(("document", 26, 24))
    part, real = (call for calls in made.link.enqueued for call in calls)
    assert part.priority_s is not None
    assert part.priority_s >= ExecutorSettings().pass_timeout_s
    assert real.priority_s is None


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_the_end_token_is_asked_for_unless_it_is_ignored(ignore_eos: bool) -> None:
    made = rig()
    made.engine.submit(asked("r", 5, 2, ignore_eos=ignore_eos))
    made.prefill(("r", 5, 0))
    assert made.link.enqueued[0][0].end_id == (None if ignore_eos else EOS)


def test_an_id_that_comes_again_is_another_call() -> None:
    made = rig()
    for _ in range(3):
        made.engine.submit(asked("r", 5, 8))
        made.prefill(("r", 5, 0))
        made.engine.cancel("r")
    assert len({call.call_id for calls in made.link.enqueued for call in calls}) == 3


def test_late_answers_of_a_cancelled_call_reach_nobody() -> None:
    link, engine = scripted([[Answer("r", (1,))], [Answer("r", (5,)), Answer("r/1", (2, 3))]])
    engine.submit(asked("r", 5, 8))
    engine.execute(prefill_of(("r", 5, 0)))
    engine.cancel("r")
    assert link.cancelled == ["r/1"]
    engine.submit(asked("r", 5, 8))
    assert engine.execute(prefill_of(("r", 5, 0))).items == (ItemResult("r", 5, 5, 0, 5),)


# --- budgets and reuse ---


@given(st.lists(st.integers(1, 8), min_size=1, max_size=10), st.integers(1, 100))
def test_parts_compute_the_prompt_once_whatever_its_cuts(blocks: list[int], tokens: int) -> None:
    made, position, results = rig(), 0, []
    made.engine.submit(asked("r", tokens, 2))
    cuts = [*blocks, *[8] * 20]
    while not made.tokens("r"):
        end = min(position + cuts.pop(0) * BLOCK, tokens)
        results.append(made.prefill(("r", end - position, position)))
        position = results[-1].items[0].position
    assert sum(result.items[0].computed for result in results) == tokens
    assert sum(result.items[0].reused for result in results) == 0
    assert made.executor.pool.reused * BLOCK == sum(
        r.items[0].position - r.items[0].computed for r in results
    )
    assert all(result.ran == Ran(1, 1, result.items[0].computed) for result in results)
    assert made.incidents == {}


def test_a_budget_without_a_whole_block_computes_nothing_and_asks_for_nothing() -> None:
    made = rig()
    made.engine.submit(asked("first", 20))
    made.prefill(("first", 20, 0))
    made.engine.submit(asked("second", 50))
    made.prefill(("second", BLOCK, 0))
    made.executor.pool.evict_idle()
    result = made.prefill(("second", 2, 48))
    assert result.items == (ItemResult("second", 0, 0),)
    assert len(made.link.enqueued) == 2
    assert made.incidents == {"evicted": 1}


def test_the_last_token_of_a_prompt_that_is_all_cached_is_computed() -> None:
    made = rig()
    for name, computed in (("first", 24), ("second", BLOCK)):
        made.engine.submit(asked(name, 24))
        item = made.prefill((name, 24, 0)).items[0]
        assert (item.computed, item.token) == (computed, answer_of(asked("", 24))[0])


@pytest.mark.parametrize("left_out", [False, True])
@pytest.mark.parametrize("events", [False, True])
@pytest.mark.parametrize("tokens", range(9, 18))
def test_what_an_answer_leaves_in_the_cache_is_known_to_the_block(
    tokens: int, events: bool, left_out: bool
) -> None:
    """An end token that is left out of the output: the token before it is then the last, and has no KV."""
    link = {"cache_events": events}
    made = rig(Vices(end_id_left_out=left_out), link=link, executor={"stop_after": 8})
    made.engine.submit(asked("r", tokens, 20, ignore_eos=False))
    made.prefill(("r", tokens, 0))
    made.decode_to_the_end("r")
    made.run_ahead()
    stats = made.engine.stats()
    assert stats.kv_blocks_cached == made.executor.pool.idle == (tokens + 7 - left_out) // BLOCK
    assert stats.kv_blocks_free == BLOCKS - stats.kv_blocks_cached


def test_requests_of_one_pass_do_not_get_the_same_room() -> None:
    link, engine = scripted([[Answer("r", (1,))]])
    for family, name in enumerate("rs"):
        engine.submit(asked(name, 20, 90, family))  # 14 blocks of 24
    first, second = engine.execute(prefill_of(("r", 20, 0), ("s", 20, 0))).items
    assert first.error is None
    assert second.error is not None
    assert "14 needed, 10 to be had" in second.error
    assert [len(calls) for calls in link.calls] == [1]


def test_a_block_that_is_computed_again_is_held_twice() -> None:
    made = rig()
    for name in ("first", "second", "third"):
        made.engine.submit(asked(name, 24, 8))
        made.prefill((name, 24, 0))
    assert made.held == made.executor.pool.held == 3 + 1 + 1 + 2  # two have begun a block of their own


@pytest.mark.parametrize("late", [False, True])
def test_blocks_evicted_between_parts_are_seen_before_the_next(late: bool) -> None:
    made = rig(Vices(late_perf_metrics=late))
    made.engine.submit(asked("r", 60, 3))
    made.prefill(("r", 32, 0))
    made.executor.pool.evict_idle()
    item = made.prefill(("r", 16, 32)).items[0]
    assert (item.position, item.computed, item.reused) == (16, 16, 0)
    assert made.incidents == {"evicted": 1}


def test_what_a_call_did_not_find_is_reported_as_it_was() -> None:
    """The answer says less than the ledger: the result follows the answer, and so does the ledger."""
    done = Answer("r", (1,), True, Ending.LENGTH, reused_tokens=0)
    second = Answer("r", (1,), True, Ending.LENGTH, reused_tokens=BLOCK)
    _, engine = scripted([[done], [second]])
    engine.submit(asked("r", 60, 1))
    assert engine.execute(prefill_of(("r", 32, 0))).items[0].position == 32
    assert engine.execute(prefill_of(("r", 28, 32))).items == (
        ItemResult("r", 60, 60 - BLOCK, 0, 1, FinishReason.LENGTH),
    )
    assert dict(engine.stats().incidents) == {"evicted": 1}


def test_more_than_was_thought_is_reused_and_reported() -> None:
    answer = Answer("r", (1,), True, Ending.LENGTH, reused_tokens=2 * BLOCK)
    _, engine = scripted([[answer]])
    engine.submit(asked("r", 20))
    item = engine.execute(prefill_of(("r", 20, 0))).items[0]
    assert (item.computed, item.reused) == (4, 16)


@pytest.mark.parametrize("reused", [-8, 5, 24])
def test_a_reuse_that_cannot_be_is_left_out(reused: int) -> None:
    _, engine = scripted([[Answer("r", (1,), True, Ending.LENGTH, reused_tokens=reused)]])
    engine.submit(asked("r", 20))
    item = engine.execute(prefill_of(("r", 20, 0))).items[0]
    assert (item.computed, item.reused) == (20, 0)
    assert dict(engine.stats().incidents) == {"bad_report": 1}


def test_without_events_what_calls_left_is_known_all_the_same() -> None:
    made = rig(link={"cache_events": False, "reports_reuse": False})
    for name, reused in (("first", 0), ("second", 16)):
        made.engine.submit(asked(name, 20, 4))
        assert made.prefill((name, 20, 0)).items[0].reused == reused
        made.decode_to_the_end(name)
        made.run_ahead()
    events = [event for event in made.engine.kv_events() if isinstance(event, BlocksStored)]
    assert len({value for event in events for value in event.block_hashes}) == 2


# --- admission ---


def test_what_does_not_fit_beside_live_calls_fails_alone_and_is_never_sent() -> None:
    made = rig()
    made.engine.submit(asked("big", 20, 150))  # 22 blocks in the end, 3 now
    made.prefill(("big", 20, 0))
    made.engine.submit(asked("two", 10, 6, family=1))
    made.engine.submit(asked("three", 10, 9, family=2))
    three, two = made.prefill(("three", 10, 0), ("two", 10, 0)).items[:2]
    assert "out of KV blocks: 3 needed, 2 to be had" in (three.error or "")
    assert (two.error, two.position) == (None, 10)
    assert [call.call_id.split("/")[0] for call in made.link.enqueued[1]] == ["two"]
    with pytest.raises(KeyError):
        made.prefill(("three", 10, 0))
    made.decode_to_the_end("two")
    made.engine.submit(asked("three", 10, 9, family=2))
    made.engine.cancel("big")
    assert made.prefill(("three", 10, 0)).items[0].error is None


def test_the_executor_never_lets_a_call_wait_that_was_let_through() -> None:
    """The sums here are the executor's: what is sent starts in the next iteration."""
    made = rig()
    for index in range(4):
        made.engine.submit(asked(f"r{index}", 20, 25, family=index))  # 6 blocks each: the pool
    result = made.prefill(*((f"r{index}", 16, 0) for index in range(4)))
    result = made.prefill(*((f"r{index}", 4, 16) for index in range(4)))
    assert [item.error for item in result.items[:4]] == [None] * 4
    assert result.ran == Ran(1, 4, 16)
    made.engine.submit(asked("more", 1, 1))
    assert made.prefill(("more", 1, 0)).items[0].error


def test_a_finished_request_makes_room_though_its_end_was_not_told_yet() -> None:
    _, engine = scripted([[Answer("big", (1, 2))], [Answer("next", (3,), True, Ending.LENGTH)]])
    engine.submit(asked("big", 60, 2))
    assert engine.execute(prefill_of(("big", 60, 0))).items[-1].finish is not None
    assert engine.stats().requests_live == 0
    engine.submit(asked("next", 64, 120, family=1))
    assert engine.execute(prefill_of(("next", 64, 0))).items[0].error is None


def test_a_call_that_nobody_hears_keeps_its_room_until_it_ends() -> None:
    made = rig(cancel=CancelMode.UNHEARD)
    made.engine.submit(asked("left", 20, 150))
    made.prefill(("left", 20, 0))
    made.engine.cancel("left")
    assert made.incidents == {"unheard": 1}
    assert made.engine.stats().requests_live == 0
    made.engine.submit(asked("r", 20, 8, family=1))
    assert made.prefill(("r", 20, 0)).items[0].error
    made.run_ahead(200)
    made.engine.submit(asked("r", 20, 8, family=1))
    assert made.prefill(("r", 20, 0)).items[0].error is None
    made.engine.cancel("r")
    made.run_ahead()
    made.engine.submit(asked("s", 1))
    made.prefill(("s", 1, 0))
    assert made.held == 0


# --- tokens ---


def test_tokens_made_between_passes_come_with_the_next_pass_of_either_kind() -> None:
    made = rig()
    for index in range(3):
        made.engine.submit(asked(f"r{index}", 9, 12, family=index))
        made.prefill((f"r{index}", 9, 0))
    made.run_ahead(4)
    result = made.decode(("r1", made.got["r1"][-1].position))
    assert result.items[0].request_id == "r1"
    named = [item.request_id for item in result.items[1:]]
    assert named == sorted(named, key=["r0", "r1", "r2"].index)
    assert named.count("r1") == 3
    made.run_ahead(4)
    made.engine.submit(asked("new", 9, 1, family=3))
    result = made.prefill(("new", 9, 0))
    assert result.items[0].request_id == "new"
    assert {item.request_id for item in result.items[1:]} == {"r0", "r1", "r2"}
    for index in range(3):
        made.decode_to_the_end(f"r{index}")
        assert made.tokens(f"r{index}") == answer_of(asked("", 9, 12, family=index))
        positions = [item.position for item in made.got[f"r{index}"]]
        assert positions == list(range(9, 21))
    assert sum(len(calls) for calls in made.link.enqueued) == 4


def test_a_decode_pass_sends_nothing_and_waits_for_all_its_items() -> None:
    _, engine = scripted([[Answer("a", (1,)), Answer("b", (2,))], [Answer("b", (3, 4))], [Answer("a", (5,))]])
    for name in ("a", "b"):
        engine.submit(asked(name, 5, 8))
    engine.execute(prefill_of(("a", 5, 0), ("b", 5, 0)))
    items = engine.execute(decode_of(("a", 5), ("b", 5))).items
    assert [(item.request_id, item.token) for item in items] == [("a", 5), ("b", 3), ("b", 4)]


def test_a_rider_that_fails_says_so_once() -> None:
    _, engine = scripted(
        [[Answer("a", (1,))], [Answer("a", (2,), error="boom"), Answer("b", (3,), True, Ending.LENGTH)]]
    )
    engine.submit(asked("a", 5, 8))
    engine.execute(prefill_of(("a", 5, 0)))
    engine.submit(asked("b", 5))
    items = engine.execute(prefill_of(("b", 5, 0))).items
    assert [(i.request_id, i.token, i.error) for i in items] == [
        ("b", 3, None),
        ("a", 2, None),
        ("a", None, "boom"),
    ]
    assert engine.stats().requests_live == 0


@pytest.mark.parametrize("new", [16, 20])
def test_a_call_that_the_executor_refuses_fails_alone(new: int) -> None:
    _, engine = scripted([[Answer("bad", error="no"), Answer("good", (3,), True, Ending.LENGTH)]])
    for name in ("bad", "good"):
        engine.submit(asked(name, 20))
    bad, good = engine.execute(prefill_of(("bad", new, 0), ("good", 20, 0))).items
    assert (bad.error, good.error) == ("no", None)
    assert engine.stats().requests_live == 0


# --- statistics of iterations ---


def iteration(number: int, requests: int, tokens: int) -> Iteration:
    return Iteration(number, requests, tokens, 0)


DONE = Answer("r", (1,), True, Ending.LENGTH)


@pytest.mark.parametrize(
    ("reports", "ran", "split"),
    [
        ([iteration(1, 1, 20), DONE], Ran(1, 1, 20), 0),
        ([iteration(1, 1, 12), iteration(2, 0, 0), iteration(3, 1, 8), DONE], Ran(2, 2, 20), 1),
        ([iteration(1, 3, 90), DONE], Ran(1, 3, 90), 0),  # merged with others: harmless
        ([iteration(1, 1, 20), iteration(2, 1, 30), DONE], Ran(1, 1, 20), 0),  # of another's prompt
        ([iteration(1, 1, 12), DONE], None, 0),  # one is missing
        ([DONE], None, 0),
    ],
)
def test_how_a_pass_ran_is_told_where_it_is_known(reports: list[Any], ran: Ran | None, split: int) -> None:
    _, engine = scripted([reports])
    engine.submit(asked("r", 20))
    assert engine.execute(prefill_of(("r", 20, 0))).ran == ran
    assert dict(engine.stats().incidents).get("split", 0) == split


def test_a_pass_that_the_executor_splits_is_counted_once() -> None:
    made = rig(Vices(split=1))
    for index in range(4):
        made.engine.submit(asked(f"r{index}", 9, 1, family=index))
    assert made.prefill(*((f"r{index}", 9, 0) for index in range(4))).ran == Ran(4, 4, 36)
    assert made.incidents == {"split": 1}


# --- the end ---


def test_nothing_works_before_the_start_and_after_the_end() -> None:
    made = rig()
    made.engine.submit(asked("r", 20, 4))
    made.prefill(("r", 20, 0))
    made.engine.close()
    made.engine.close()
    made.engine.cancel("r")
    assert made.held == made.engine.stats().kv_blocks_cached == 0
    with pytest.raises(EngineError, match="closed"):
        made.prefill(("r", 20, 0))


def test_the_pool_is_as_large_as_the_executor_says() -> None:
    made = rig(executor={"kv_blocks": 13})
    assert made.engine.capabilities.kv_blocks_total == made.engine.stats().kv_blocks_total == 13
    with pytest.raises(ValueError, match="holds 104"):
        made.engine.submit(asked("r", 104, 1))


def test_another_block_size_is_refused_by_name() -> None:
    link, engine = scripted()
    link.facts = Facts("1.2.1", BLOCKS, 2 * BLOCK)
    with pytest.raises(ValueError, match="block_tokens"):
        engine.start()
    with pytest.raises(EngineError, match="block_tokens"):
        engine.submit(asked("r", 4))


# --- measuring ---


@pytest.mark.parametrize(("tokens", "history"), [(1, 0), (64, 0), (5, 16), (24, 150), (64, 100)])
def test_measuring_runs_what_it_is_asked_to_and_leaves_nothing_behind(tokens: int, history: int) -> None:
    made = rig(executor={"vocabulary": 32_000})
    for _ in range(2):  # nothing of the first is found by the second
        before = made.executor.pool.reused
        assert made.engine.measure(tokens, history) == pytest.approx(0.001)
        last = made.link.enqueued[-1]
        assert len(last) == 1
        assert len(last[0].token_ids) == tokens + history // BLOCK * BLOCK
        parts = -(-(history // BLOCK) // 8)
        assert made.executor.pool.reused - before == sum(8 * part for part in range(parts)) + history // BLOCK
        assert made.engine.stats().requests_live == made.held == 0


def test_measuring_a_prefill_side_leaves_no_hand_over_behind() -> None:
    made = rig(role=ExecutorRole.CONTEXT, executor={"vocabulary": 32_000})
    assert made.engine.measure(24, 40) == pytest.approx(0.001)
    made.run_ahead()
    assert made.held == made.executor.pool.held == 0


def test_measuring_needs_an_idle_engine_and_block_reuse() -> None:
    made = rig(executor={"enable_block_reuse": False})
    with pytest.raises(EngineError, match="block reuse"):
        made.engine.measure(8, 16)
    made.engine.submit(asked("r", 4))
    with pytest.raises(ValueError, match="idle"):
        made.engine.measure(8, 0)
    with pytest.raises(ValueError, match="tokens"):
        made.engine.measure(0, 0)
