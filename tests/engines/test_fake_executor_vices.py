"""Each vice of the fake executor shows, and the link to it tells what the executor does."""

from __future__ import annotations

import pytest

from engines.executor.types import (
    Answer,
    CacheGap,
    CacheRemoved,
    CacheStored,
    Call,
    CallKind,
    Ending,
    LinkLost,
)
from tests.executor_fakes.driving import BLOCK, alone, drain, prompt, run, tokens_of
from tests.executor_fakes.link import InProcessLink, small_executor
from tests.executor_fakes.model import NEVER, ExecutorCrash, FakeRequest, Finish, Kind, Vices

# --- vices ---


def test_drained_statistics_go_missing() -> None:
    executor = small_executor(Vices(drained_stats=True))
    kept = []
    for family in range(4):
        run(executor, FakeRequest(prompt(9, family), 1))
        kept.append(len(executor.get_latest_iteration_stats()))
    assert kept == [1, 0, 1, 0]


def test_the_first_token_comes_twice() -> None:
    context, decode = small_executor(), small_executor(Vices(dup_first_token=True))
    [offer] = run(context, FakeRequest(prompt(9), 1, Kind.CONTEXT_ONLY))
    said = run(decode, FakeRequest(prompt(9), 4, Kind.GENERATION_ONLY, hand_over=offer.hand_over))
    assert tokens_of(said, 1) == alone(prompt(9), 4)


@pytest.mark.parametrize("late", [3, NEVER])
def test_the_kv_of_a_hand_over_is_late(late: int) -> None:
    context, decode = small_executor(), small_executor(Vices(late_transfer=late))
    [offer] = run(context, FakeRequest(prompt(9), 1, Kind.CONTEXT_ONLY))
    decode.enqueue_requests([FakeRequest(prompt(9), 4, Kind.GENERATION_ONLY, hand_over=offer.hand_over)])
    steps = 0
    while not (said := decode.await_responses(0.0, only_ready=True)) and decode.step():
        steps += 1
    assert bool(said) == (late != NEVER)
    assert context.pool.held == (2 if late == NEVER else 0)
    assert steps >= late


def test_a_cancelled_request_leaks() -> None:
    executor = small_executor(Vices(leak_on_cancel=True))
    [request_id] = executor.enqueue_requests([FakeRequest(prompt(20), 5)])
    executor.step()
    executor.cancel_request(request_id)
    assert drain(executor)[-1].finish is Finish.CANCELLED
    assert (executor.live, executor.pool.held) == (0, 3)


def test_it_crashes_on_abort() -> None:
    executor = small_executor(Vices(crash_on_abort=True))
    quiet, streaming = executor.enqueue_requests(
        [FakeRequest(prompt(5), 9, streaming=False), FakeRequest(prompt(6), 9)]
    )
    executor.step()
    executor.cancel_request(quiet)
    executor.step()
    executor.cancel_request(streaming)
    with pytest.raises(ExecutorCrash):
        executor.step()
    with pytest.raises(ExecutorCrash):
        executor.enqueue_requests([FakeRequest(prompt(5), 1)])


def test_it_hangs_and_still_takes_requests() -> None:
    executor = small_executor(Vices(hang=2))
    run(executor, FakeRequest(prompt(5), 9))
    executor.enqueue_requests([FakeRequest(prompt(5, 1), 1)])
    assert (executor.iterations, executor.live, drain(executor)) == (2, 2, [])


def test_events_get_lost_and_their_ids_with_them() -> None:
    executor = small_executor(Vices(lost_events=3))
    for family in range(4):
        run(executor, FakeRequest(prompt(8, family), 1))
    assert [event["event_id"] for event in executor.get_latest_events()] == [0, 1, 3, 4]


@pytest.mark.parametrize(
    ("vices", "iterations"), [(Vices(), [4]), (Vices(split=3), [3, 1]), (Vices(split=1), [1, 1, 1, 1])]
)
def test_a_list_is_split(vices: Vices, iterations: list[int]) -> None:
    executor = small_executor(vices)
    run(executor, *(FakeRequest(prompt(5, family), 1) for family in range(4)))
    stats = executor.get_latest_iteration_stats()
    assert [each["inflightBatchingStats"]["numContextRequests"] for each in stats] == iterations


def test_two_lists_are_merged() -> None:
    executor = small_executor(Vices(merge=True))
    executor.enqueue_requests([FakeRequest(prompt(5), 1)])
    executor.step()
    executor.enqueue_requests([FakeRequest(prompt(5, 1), 1)])
    drain(executor)
    [stats] = executor.get_latest_iteration_stats()
    assert stats["inflightBatchingStats"]["numContextRequests"] == 2


def test_a_prompt_waits_for_the_one_that_it_shares_with() -> None:
    executor = small_executor(Vices(delay_shared_prefix=True))
    said = run(
        executor, FakeRequest(prompt(20), 1), FakeRequest(prompt(20), 1), FakeRequest(prompt(20, 1), 1)
    )
    assert [(each.request_id, each.metrics.reused_blocks) for each in said if each.metrics] == [
        (1, 0),
        (3, 0),
        (2, 2),
    ]


def test_what_is_idle_is_evicted_between_parts() -> None:
    executor = small_executor(Vices(evict_between_parts=True))
    run(executor, FakeRequest(prompt(16), 1))
    assert run(executor, FakeRequest(prompt(24), 1))[-1].metrics.reused_blocks == 0  # type: ignore[union-attr]


def test_cached_tokens_count() -> None:
    executor = small_executor(Vices(counts_cached=True), max_num_tokens=32, enable_chunked_context=False)
    assert run(executor, FakeRequest(prompt(32), 1))[-1].error is None
    assert "exceeds the limit" in (run(executor, FakeRequest(prompt(40), 1))[-1].error or "")


def test_the_ways_in_which_answers_differ() -> None:
    errors = run(small_executor(Vices(error_response=2)), *(FakeRequest(prompt(5, i), 1) for i in range(4)))
    assert sorted(each.request_id for each in errors if each.error) == [2, 4]
    without = run(
        small_executor(Vices(end_id_left_out=True), stop_after=3), FakeRequest(prompt(5), 6, end_id=90)
    )
    assert tokens_of(without, 1) == alone(prompt(5), 2)
    early, late = (
        run(small_executor(Vices(late_perf_metrics=x)), FakeRequest(prompt(5), 3)) for x in (False, True)
    )
    assert [each.metrics is not None for each in early] == [True, False, True]
    assert [each.metrics is not None for each in late] == [False, False, True]
    twice = run(small_executor(Vices(duplicate_final=True)), FakeRequest(prompt(5), 2))
    assert [(each.final, len(each.tokens)) for each in twice] == [(False, 1), (True, 1), (True, 0)]


def test_vices_cross_a_process() -> None:
    vices = Vices(late_transfer=NEVER, split=2, hang=7)
    assert Vices.from_json(vices.to_json()) == vices
    with pytest.raises(ValueError, match="spliced"):
        Vices.from_json('{"spliced": 1}')


# --- the link in this process ---


def call(call_id: str, tokens: int = 9, max_tokens: int = 3, **other: object) -> Call:
    return Call(call_id, CallKind.GENERATE, prompt(tokens), max_tokens, **other)  # type: ignore[arg-type]


def test_a_link_waits_without_sleeping() -> None:
    link = InProcessLink()
    facts = link.start()
    assert (facts.kv_blocks_total, facts.block_tokens) == (24, BLOCK)
    assert link.receive(60.0) == ()
    assert link.clock() == 60.0
    link.enqueue([call("a")])
    answers = [each for each in link.receive(60.0) if isinstance(each, Answer)]
    assert link.clock() < 61.0
    assert [(each.call_id, len(each.tokens), each.final) for each in answers] == [("a", 1, False)]


def test_a_link_tells_of_the_cache_with_the_tokens_of_its_blocks() -> None:
    link = InProcessLink()
    link.start()
    link.enqueue([call("a", 20, 1)])
    [stored] = [each for each in link.receive(1.0) if isinstance(each, CacheStored)]
    assert stored.parent is None
    assert tuple(token for _, tokens in stored.blocks for token in tokens) == prompt(16)
    link.enqueue([call("b", 20, 1, priority=80)])
    assert not [each for each in link.receive(1.0) if isinstance(each, CacheStored | CacheRemoved)]


def test_a_link_tells_of_lost_events() -> None:
    link = InProcessLink(lambda: small_executor(Vices(lost_events=2)))
    link.start()
    gaps = []
    for index in range(4):
        link.enqueue([Call(str(index), CallKind.GENERATE, prompt(8, index), 1)])
        gaps += [each.missing for each in link.receive(1.0) if isinstance(each, CacheGap)]
    assert sum(gaps) == 2


def test_a_link_to_a_crashed_executor_is_lost_and_starts_again() -> None:
    link = InProcessLink(lambda: small_executor(Vices(crash_on_abort=True)))
    link.start()
    link.enqueue([call("a", max_tokens=9)])
    link.receive(1.0)
    link.cancel("a")
    link.receive(0.0)  # what it said before
    with pytest.raises(LinkLost, match="crashed"):
        link.receive(1.0)
    with pytest.raises(LinkLost):
        link.enqueue([call("b")])
    link.start()
    link.enqueue([call("a", max_tokens=1)])
    [answer] = [each for each in link.receive(1.0) if isinstance(each, Answer)]
    assert (answer.ending, answer.reused_tokens) == (Ending.LENGTH, 0)
    link.close()
    link.close()
    with pytest.raises(LinkLost):
        link.receive(0.0)
