"""The fake executor keeps the laws of the real one, so that what is tested against it means something."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.executor_fakes.driving import BLOCK, alone, drain, prompt, run, tokens_of
from tests.executor_fakes.link import small_executor
from tests.executor_fakes.messages import Retention
from tests.executor_fakes.model import (
    FakeRequest,
    FakeResponse,
    Finish,
    Kind,
    Vices,
)
from tests.executor_fakes.pool import block_hashes

# --- laws ---


class ExecutorMachine(RuleBasedStateMachine):
    """Two executors that hand over; whatever is asked of them in whatever order."""

    def __init__(self, chunked: bool, vices: Vices) -> None:
        super().__init__()
        limits = {"max_batch_size": 4, "max_num_tokens": 64, "enable_chunked_context": chunked}
        self.sides = [small_executor(vices, **limits) for _ in range(2)]
        self.asked: dict[tuple[int, int], FakeRequest] = {}
        self.said: list[tuple[int, FakeResponse]] = []
        self.cached: tuple[set[int], set[int]] = (set(), set())

    @rule(
        side=st.integers(0, 1),
        sizes=st.lists(st.tuples(st.integers(1, 64), st.integers(1, 6)), min_size=1, max_size=4),
        family=st.integers(0, 2),
        priority=st.sampled_from([0, 35, 100]),
        kind=st.sampled_from([Kind.GENERATE, Kind.CONTEXT_ONLY]),
        streaming=st.booleans(),
    )
    def enqueue(self, side: int, sizes: list[tuple[int, int]], family: int, priority: int, kind: Kind,
                streaming: bool) -> None:  # fmt: skip
        rank = (Retention(0, None, priority),)
        requests = [
            FakeRequest(prompt(tokens, family), answer, kind, streaming, retention=rank)
            for tokens, answer in sizes
        ]
        self._enqueue(side, requests)

    def _enqueue(self, side: int, requests: list[FakeRequest]) -> None:
        for request_id, request in zip(self.sides[side].enqueue_requests(requests), requests, strict=True):
            self.asked[side, request_id] = request

    @rule(side=st.integers(0, 1), steps=st.integers(1, 8))
    def step(self, side: int, steps: int) -> None:
        for _ in range(steps):
            self.sides[side].step()
        self._listen()

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.asked:
            side, request_id = data.draw(st.sampled_from(list(self.asked)))
            self.sides[side].cancel_request(request_id)

    @rule(data=st.data())
    def hand_over(self, data: st.DataObject) -> None:
        offers = [(side, each) for side, each in self.said if each.hand_over is not None]
        if offers:
            side, offer = data.draw(st.sampled_from(offers))
            request = self.asked[side, offer.request_id]
            call = FakeRequest(request.token_ids, 6, Kind.GENERATION_ONLY, hand_over=offer.hand_over)
            self._enqueue(1 - side, [call])

    def _listen(self) -> None:
        for side, executor in enumerate(self.sides):
            said = executor.await_responses(0.0, only_ready=True)
            self.said += [(side, each) for each in said]
            for event in executor.get_latest_events():
                self._follow(self.cached[side], event["data"])
            for stats in executor.get_latest_iteration_stats():
                batch, pool = stats["inflightBatchingStats"], stats["kvCacheStats"]
                assert 1 <= batch["numScheduledRequests"] <= 4
                assert batch["numCtxTokens"] + batch["numGenRequests"] <= 64
                assert pool["freeNumBlocks"] + pool["usedNumBlocks"] == pool["maxNumBlocks"]

    @staticmethod
    def _follow(cached: set[int], data: dict) -> None:
        if data["type"] == "stored":
            new = [block["block_hash"] for block in data["blocks"]]
            assert not cached & set(new)
            cached |= set(new)
        elif data["type"] == "removed":
            assert cached >= set(data["block_hashes"])
            cached -= set(data["block_hashes"])

    @invariant()
    def pools_add_up(self) -> None:
        for executor in self.sides:
            executor.pool.check()

    def teardown(self) -> None:
        for _ in range(2):
            for side, executor in enumerate(self.sides):
                while executor.step():
                    pass
                for request_id in [i for s, i in self.asked if s == side]:
                    executor.cancel_request(request_id)  # what is kept for a pull that never came
        self._listen()
        for side, executor in enumerate(self.sides):
            assert executor.live == 0
            assert executor.pool.held == 0
            assert executor.pool.idle == len(self.cached[side])
        for (side, request_id), request in self.asked.items():
            self._check_answers(request, [x for s, x in self.said if (s, x.request_id) == (side, request_id)])

    def _check_answers(self, request: FakeRequest, said: list[FakeResponse]) -> None:
        done = [each.finish for each in said if each.final]
        assert (done[:1] and said[0].error is None) or said[-1].error is not None
        assert done[1:] in ([], [Finish.CANCELLED])  # a context-only request that nobody pulled
        tokens = [token for each in said for token in each.tokens]
        first = 1 if request.kind is Kind.GENERATION_ONLY else 0
        assert tokens == alone(request.token_ids, 6)[first : first + len(tokens)]
        if done[0] is Finish.LENGTH:
            assert len(tokens) == request.max_tokens - first


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("vices", [Vices(), Vices(split=1, merge=True), Vices(delay_shared_prefix=True)])
def test_blocks_answers_and_events_add_up(chunked: bool, vices: Vices) -> None:
    run_state_machine_as_test(
        lambda: ExecutorMachine(chunked, vices),
        settings=settings(
            max_examples=30, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 6), st.integers(0, 3)), min_size=1, max_size=8
    )
)
def test_tokens_do_not_depend_on_company(sizes: list[tuple[int, int, int]]) -> None:
    executor = small_executor()
    requests = [FakeRequest(prompt(tokens, family), answer) for tokens, answer, family in sizes]
    ids = executor.enqueue_requests(requests)
    said = drain(executor)
    for request_id, request in zip(ids, requests, strict=True):
        assert tokens_of(said, request_id) == alone(request.token_ids, request.max_tokens)


@given(tokens=st.integers(1, 64), again=st.integers(1, 64))
def test_reuse_is_by_whole_blocks_and_never_of_the_last_token(tokens: int, again: int) -> None:
    executor = small_executor()
    run(executor, FakeRequest(prompt(tokens), 1))
    executor.get_latest_iteration_stats()
    said = run(executor, FakeRequest(prompt(again), 1))
    reused = min(tokens // BLOCK, (again - 1) // BLOCK)
    assert said[-1].metrics is not None
    assert said[-1].metrics.reused_blocks == reused
    [stats] = executor.get_latest_iteration_stats()
    assert stats["inflightBatchingStats"]["numCtxTokens"] == again - reused * BLOCK


@given(tokens=st.integers(1, 60), answer=st.integers(1, 20))
def test_the_last_token_of_an_answer_has_no_kv(tokens: int, answer: int) -> None:
    executor = small_executor()
    run(executor, FakeRequest(prompt(tokens), answer))
    assert executor.pool.idle == (tokens + answer - 1) // BLOCK


@given(tokens=st.integers(1, 60), answer=st.integers(2, 8))
def test_a_hand_over_gives_the_tokens_of_one_executor(tokens: int, answer: int) -> None:
    context, decode = small_executor(), small_executor()
    [offer] = run(context, FakeRequest(prompt(tokens), answer, Kind.CONTEXT_ONLY))
    assert offer.hand_over is not None
    assert (offer.finish, context.live) == (Finish.NOT_FINISHED, 1)
    assert context.pool.held == -(-tokens // BLOCK)
    call = FakeRequest(prompt(tokens), answer, Kind.GENERATION_ONLY, hand_over=offer.hand_over)
    said = run(decode, call)
    assert [*offer.tokens, *tokens_of(said, 1)] == alone(prompt(tokens), answer)
    assert (context.pool.held, context.live, decode.pool.held) == (0, 0, 0)
    assert run(decode, call)[-1].error is not None  # it can be pulled once


@given(first=st.integers(0, 100), second=st.integers(0, 100))
def test_the_lowest_priority_is_evicted_first(first: int, second: int) -> None:
    executor = small_executor()
    for family, priority in enumerate((first, second)):
        run(executor, FakeRequest(prompt(64, family), 1, retention=(Retention(0, None, priority),)))
    run(executor, FakeRequest(prompt(80, 2), 1))
    gone = {
        value
        for event in executor.get_latest_events()
        if event["data"]["type"] == "removed"
        for value in event["data"]["block_hashes"]
    }
    low = 0 if first <= second else 1  # of equals the older
    left = executor.pool.match(block_hashes(prompt(64, 1 - low), BLOCK))
    assert len(gone) == 2
    assert len(left) == 8


# --- iterations ---


def test_a_list_is_fetched_as_a_whole() -> None:
    executor = small_executor()
    executor.enqueue_requests([FakeRequest(prompt(16, family), 1) for family in range(4)])
    executor.step()
    [stats] = executor.get_latest_iteration_stats()
    assert stats["inflightBatchingStats"]["numContextRequests"] == 4
    assert stats["inflightBatchingStats"]["numCtxTokens"] == 64


def test_who_waits_for_blocks_holds_back_those_behind() -> None:
    executor = small_executor()
    executor.enqueue_requests([FakeRequest(prompt(90), 30), FakeRequest(prompt(90, 1), 30)])
    executor.enqueue_requests([FakeRequest(prompt(1, 2), 1)])
    executor.step()
    assert [each.request_id for each in executor.await_responses(0.0, only_ready=True)] == [1]
    assert [each.request_id for each in drain(executor) if each.final] == [1, 3, 2]


def test_statistics_drain() -> None:
    executor = small_executor()
    run(executor, FakeRequest(prompt(9), 3))
    assert [stats["iter"] for stats in executor.get_latest_iteration_stats()] == [1, 2, 3]
    assert executor.get_latest_iteration_stats() == []


def test_the_end_token_ends_a_request_that_names_one() -> None:
    executor = small_executor(stop_after=2)
    executor.enqueue_requests([FakeRequest(prompt(5), 6, end_id=90), FakeRequest(prompt(5, 1), 6)])
    said = drain(executor)
    assert [each.finish for each in said if each.final] == [Finish.END_ID, Finish.LENGTH]
    assert tokens_of(said, 1)[1:] == [90]


def test_a_request_that_can_never_run_gets_an_error_and_no_more() -> None:
    executor = small_executor()
    for bad in (
        FakeRequest((), 1),
        FakeRequest(prompt(190), 9),
        FakeRequest(prompt(9), 1, Kind.GENERATION_ONLY),
    ):
        [said] = run(executor, bad)
        assert said.error is not None
        assert said.final
    unchunked = small_executor(enable_chunked_context=False)
    [said] = run(unchunked, FakeRequest(prompt(100), 1))
    assert "exceeds the limit" in (said.error or "")


# --- waiting ---


def test_awaiting_an_exhausted_id_would_hang() -> None:
    executor = small_executor()
    [request_id] = executor.enqueue_requests([FakeRequest(prompt(5), 1)])
    assert executor.await_responses(None, request_id)[-1].final
    with pytest.raises(AssertionError, match="would hang"):
        executor.await_responses(None, request_id)
    assert executor.await_responses(0.01, request_id) == []


def test_a_thread_says_what_steps_say() -> None:
    executor = small_executor()
    executor.start_thread()
    ids = executor.enqueue_requests([FakeRequest(prompt(9, family), 5) for family in range(3)])
    said: list[FakeResponse] = []
    while sum(each.final for each in said) < 3:
        said += executor.await_responses(5.0)
    with pytest.raises(AssertionError, match="would hang"):
        executor.await_responses()
    executor.shutdown()
    for family, request_id in enumerate(ids):
        assert tokens_of(said, request_id) == alone(prompt(9, family), 5)
