"""Hand-overs between two engines over executors: tickets, deadlines, tokens that come twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from executor_rig import BLOCK, EOS, Rig, answer_of, asked, rig, scripted, ticket
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.base import PassError
from engines.executor.types import Answer, CallKind, CancelMode, Ending, ExecutorRole
from engines.types import FinishReason, Pass, PassItem, PassKind
from tests.executor_fakes.vices import NEVER, VIRTUOUS, Vices


def sides(decode_vices: Vices = VIRTUOUS, **settings: Any) -> tuple[Rig, Rig]:
    return rig(role=ExecutorRole.CONTEXT), rig(decode_vices, role=ExecutorRole.GENERATION, **settings)


def prefilled(made: Rig, name: str = "r", tokens: int = 20, wanted: int = 6, family: int = 0) -> None:
    made.engine.submit(asked(name, tokens, wanted, family))
    if tokens > 64:
        made.prefill((name, 64, 0))
    done = tokens // 64 * 64 if tokens > 64 else 0
    made.prefill((name, tokens - done, done))


def decoded(made: Rig, name: str, at: int) -> None:
    made.decode((name, at))
    made.decode_to_the_end(name)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 100), st.integers(2, 9)), min_size=1, max_size=4),
    st.booleans(),
    st.integers(0, 3),
)
def test_the_client_gets_each_token_once(sizes: list[tuple[int, int]], repeats: bool, late: int) -> None:
    """Unless its second token equals its first on a build that does not repeat, when that is not known yet:
    then it fails."""
    context, decode = sides(Vices(dup_first_token=repeats, late_transfer=late))
    for index, (tokens, wanted) in enumerate(sizes):
        name, family = f"r{index}", index
        prefilled(context, name, tokens, wanted, family)
        request = asked(name, tokens, wanted, family)
        decode.engine.adopt(request, context.engine.take_ticket(name))
        decoded(decode, name, tokens)
        context.engine.release(name)
        expected = answer_of(request)
        first, rest = context.tokens(name), decode.tokens(name)
        if decode.got[name][-1].error:
            assert not repeats
            assert expected[0] == expected[1]
            assert rest == expected[2:]
            continue
        assert [*first, *rest] == expected
        assert [item.position for item in decode.got[name]] == list(range(tokens + 1, tokens + wanted))
        assert decode.got[name][-1].finish is FinishReason.LENGTH
    assert decode.incidents.get("duplicate_first_token", 0) == (len(sizes) if repeats else 0) or not repeats
    assert context.held == decode.held == 0
    assert context.executor.pool.held == decode.executor.pool.held == 0


def test_the_prefill_side_finishes_with_its_token_and_holds_its_blocks_until_they_are_pulled() -> None:
    context, _ = sides()
    prefilled(context)
    (call,) = context.link.enqueued[0]
    assert (call.kind, call.max_tokens) == (CallKind.CONTEXT_ONLY, 6)
    (item,) = context.got["r"]
    assert (item.finish, item.position) == (FinishReason.LENGTH, 20)
    assert context.engine.stats().requests_live == 0
    assert context.held == 3
    made = context.engine.take_ticket("r")
    assert (made.first_gen_tokens, made.fingerprint, made.block_tokens) == (
        (item.token,),
        "fake-bundle",
        BLOCK,
    )
    with pytest.raises(ValueError, match="known"):
        context.engine.submit(asked("r", 4))
    context.engine.release("r")
    context.engine.release("r")
    assert context.held == 0
    with pytest.raises(KeyError):
        context.engine.take_ticket("r")


def test_a_ticket_that_nobody_wants_is_cancelled_and_frees_the_executor() -> None:
    context, _ = sides()
    prefilled(context)
    assert context.executor.pool.held == 3
    context.engine.cancel("r")
    context.run_ahead()
    assert context.held == context.executor.pool.held == 0


def test_tickets_count_against_admission() -> None:
    context, _ = sides()
    for index in range(4):
        prefilled(context, f"r{index}", 20, 28, index)  # 6 blocks each in the end
    context.engine.submit(asked("more", 20, 1, 5))
    assert context.prefill(("more", 20, 0)).items[0].error
    context.engine.release("r0")
    context.engine.submit(asked("more", 20, 1, 5))
    assert context.prefill(("more", 16, 0)).items[0].error is None


@pytest.mark.parametrize("shown", [True, False])
def test_an_end_token_at_once_leaves_nothing_to_hand_over(shown: bool) -> None:
    context = rig(Vices(end_id_left_out=not shown), role=ExecutorRole.CONTEXT, executor={"stop_after": 1})
    context.engine.submit(asked("r", 20, 6, ignore_eos=False))
    (item,) = context.prefill(("r", 20, 0)).items
    assert (item.token, item.finish) == (EOS, FinishReason.STOP)
    with pytest.raises(KeyError):
        context.engine.take_ticket("r")
    context.run_ahead()
    assert context.held == context.executor.pool.held == 0


def test_the_token_may_come_in_the_ticket_alone_and_no_ticket_is_an_error() -> None:
    link, engine = scripted(
        [
            [Answer("r", (), True, Ending.NOT_FINISHED, ticket=ticket((5,)))],
            [Answer("s", (4,), True, Ending.NOT_FINISHED)],
        ],
        ExecutorRole.CONTEXT,
    )
    for name in ("r", "s"):
        engine.submit(asked(name, 20, 6))
    items = [engine.execute(Pass(1, PassKind.PREFILL, (PassItem(n, 20, 0),))).items[0] for n in ("r", "s")]
    assert (items[0].token, engine.take_ticket("r").first_gen_tokens) == (5, (5,))
    assert "no ticket" in (items[1].error or "")
    assert link.cancelled == ["s/2"]
    assert engine.stats().requests_live == 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"fingerprint": "other"}, "fingerprint"),
        ({"block_tokens": 64}, "block_tokens"),
        ({"first_gen_tokens": ()}, "first_gen_tokens"),
        ({"first_gen_tokens": (1, 2, 3)}, "max_new_tokens"),
    ],
)
def test_a_ticket_that_does_not_fit_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    _, decode = sides()
    with pytest.raises(ValueError, match=named):
        decode.engine.adopt(asked("r", 20, 3), replace(ticket(), **change))
    assert decode.engine.stats().requests_live == 0


def test_a_prefill_side_adopts_nothing_and_a_known_request_is_refused() -> None:
    context, decode = sides()
    with pytest.raises(ValueError, match="role"):
        context.engine.adopt(asked("r", 20, 3), ticket())
    decode.engine.submit(asked("r", 20, 3))
    with pytest.raises(ValueError, match="known"):
        decode.engine.adopt(asked("r", 20, 3), ticket())


@pytest.mark.parametrize("cancel", list(CancelMode))
def test_kv_that_does_not_come_in_time_fails_the_request_and_nothing_else(cancel: CancelMode) -> None:
    context, decode = sides(Vices(late_transfer=NEVER), handover_timeout_s=5.0, cancel=cancel)
    prefilled(context)
    decode.engine.submit(asked("other", 9, 20, 3))
    decode.prefill(("other", 9, 0))
    decode.engine.adopt(asked("r", 20, 6), context.engine.take_ticket("r"))
    result = decode.decode(("r", 20))
    assert "transfer" in (result.items[0].error or "")
    assert decode.incidents["transfer_timed_out"] == 1
    assert 5.0 <= decode.link.now_s < 6.0
    decode.decode_to_the_end("other")
    assert decode.tokens("other") == answer_of(asked("other", 9, 20, 3))
    if cancel is CancelMode.ENGINE:
        decode.run_ahead()
        assert decode.held == decode.executor.pool.held == 0
    else:
        assert decode.held == 3  # it waits on, and counts


def test_a_hand_over_without_room_fails_with_the_next_pass() -> None:
    context, decode = sides()
    prefilled(context)
    decode.engine.submit(asked("big", 20, 150, 3))
    decode.prefill(("big", 20, 0))
    decode.engine.adopt(asked("r", 20, 6), context.engine.take_ticket("r"))
    assert len(decode.link.enqueued) == 1
    result = decode.decode(("big", decode.got["big"][-1].position))
    assert [i.error for i in result.items if i.request_id == "r"] == [
        "out of KV blocks: 4 needed, 2 to be had"
    ]
    decode.engine.adopt(asked("r", 20, 6), context.engine.take_ticket("r"))
    decode.engine.cancel("r")
    assert decode.engine.stats().requests_live == 1


def test_a_decode_side_may_prefill_again_by_itself() -> None:
    _, decode = sides()
    decode.engine.submit(asked("r", 20, 6))
    decode.prefill(("r", 20, 0))
    decode.decode_to_the_end("r")
    assert decode.tokens("r") == answer_of(asked("r", 20, 6))


def test_kv_that_is_gone_on_the_other_side_is_an_error_of_the_request() -> None:
    context, decode = sides()
    prefilled(context)
    made = context.engine.take_ticket("r")
    context.engine.cancel("r")
    context.run_ahead()
    decode.engine.adopt(asked("r", 20, 6), made)
    assert decode.decode(("r", 20)).items[0].error
    assert decode.held == decode.engine.stats().requests_live == 0


def test_an_executor_that_must_not_be_told_is_not_told_of_a_ticket_that_nobody_wants() -> None:
    done = Answer("r", (5,), True, Ending.NOT_FINISHED, ticket=ticket((5,)))
    link, engine = scripted([[done]], ExecutorRole.CONTEXT, cancel=CancelMode.UNHEARD)
    engine.submit(asked("r", 20, 4))
    engine.execute(Pass(1, PassKind.PREFILL, (PassItem("r", 20, 0),)))
    engine.cancel("r")
    assert link.cancelled == []


def test_a_context_only_call_that_ended_in_a_pass_that_did_not_takes_no_room_any_more() -> None:
    done = Answer("r", (5,), True, Ending.NOT_FINISHED, ticket=ticket((5,)))
    _, engine = scripted([[done]], ExecutorRole.CONTEXT, cancel=CancelMode.UNHEARD, progress_timeout_s=90.0)
    for family, name in enumerate(("r", "never")):
        engine.submit(asked(name, 20, 20, family))  # 5 blocks of 24 each
    with pytest.raises(PassError) as caught:
        engine.execute(Pass(1, PassKind.PREFILL, (PassItem("r", 20, 0), PassItem("never", 20, 0))))
    assert caught.value.request_ids == ("r", "never")
    engine.submit(asked("big", 20, 140, 2))  # 20 blocks: one too many beside the one that runs on
    (item,) = engine.execute(Pass(2, PassKind.PREFILL, (PassItem("big", 20, 0),))).items
    assert item.error is not None
    assert "19 to be had" in item.error


def test_the_deadline_of_a_hand_over_ends_with_its_first_token() -> None:
    link, engine = scripted([[Answer("r", (9,))]], ExecutorRole.GENERATION, handover_timeout_s=5.0)
    engine.adopt(asked("r", 20, 4), ticket())
    for at, token in ((20, 9), (21, 10)):
        (item,) = engine.execute(Pass(at, PassKind.DECODE, (PassItem("r", 1, at),))).items
        assert (item.token, item.error) == (token, None)
        link.now_s += 50.0
        link.script.append([Answer("r", (10,))])
