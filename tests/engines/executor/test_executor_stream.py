"""The tokens of an answer: whatever way an executor deals them out, they come out the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.executor.stream import AnswerStream, Habit, Output
from engines.executor.types import Answer, Ending
from engines.types import FinishReason

END = 9
TOKENS = st.lists(st.integers(0, 8), max_size=8)  # never END


def dealt(tokens: list[int], cuts: list[int], ending: Ending | None, apart: bool) -> list[Answer]:
    """`tokens` in several answers. apart: the last one brings none."""
    places = sorted({min(cut, len(tokens)) for cut in cuts})
    pieces = [tokens[a:b] for a, b in zip([0, *places], [*places, len(tokens)], strict=True)]
    answers = [Answer("c", tuple(piece)) for piece in pieces]
    if apart:
        return [*answers, Answer("c", final=True, ending=ending)]
    return [*answers[:-1], Answer("c", tuple(pieces[-1]), True, ending)]


def run(stream: AnswerStream, answers: list[Answer]) -> list[Output]:
    for answer in answers:
        stream.take(answer)
    return list(stream.outputs)


@given(TOKENS, st.lists(st.integers(0, 8)), st.booleans(), st.booleans(), st.integers(0, 3))
def test_an_answer_ended_by_its_end_token_holds_it_once(
    tokens: list[int], cuts: list[int], apart: bool, shown: bool, spare: int
) -> None:
    """Whether the executor shows the end token or not, and with or without room for more."""
    stream = AnswerStream(len(tokens) + 1 + spare, END)
    outputs = run(stream, dealt([*tokens, END] if shown else tokens, cuts, Ending.END_ID, apart))
    assert [output.token for output in outputs] == [*tokens, END]
    assert [output.finish for output in outputs] == [None] * len(tokens) + [FinishReason.STOP]


@given(TOKENS.filter(bool), st.lists(st.integers(0, 8)), st.booleans(), TOKENS)
def test_an_answer_of_full_length_ends_with_it_and_nothing_follows(
    tokens: list[int], cuts: list[int], apart: bool, more: list[int]
) -> None:
    stream = AnswerStream(len(tokens), END)
    outputs = run(stream, [*dealt(tokens, cuts, Ending.LENGTH, apart), Answer("c", tuple(more), True)])
    assert [output.token for output in outputs] == tokens
    assert [o.finish for o in outputs] == [None] * (len(tokens) - 1) + [FinishReason.LENGTH]


@given(TOKENS.filter(bool), st.lists(st.integers(0, 8)), st.booleans())
def test_a_limit_of_the_context_ends_it_with_the_last_token(
    tokens: list[int], cuts: list[int], apart: bool
) -> None:
    outputs = run(AnswerStream(len(tokens) + 3, END), dealt(tokens, cuts, Ending.LENGTH, apart))
    assert outputs[-1] == Output(tokens[-1], FinishReason.LENGTH)


@pytest.mark.parametrize(
    "ending",
    [Ending.LENGTH, Ending.STOP_WORDS, Ending.TIMED_OUT, Ending.CANCELLED, Ending.NOT_FINISHED, None],
)
def test_an_end_without_a_token_to_go_with_it_is_an_error(ending: Ending | None) -> None:
    stream = AnswerStream(5, END)
    stream.take(Answer("c", (1, 2)))
    stream.outputs.clear()  # reported
    stream.take(Answer("c", final=True, ending=ending))
    (output,) = stream.outputs
    assert (output.token, output.finish) == (None, None)
    assert output.error


@pytest.mark.parametrize("ending", [Ending.TIMED_OUT, Ending.CANCELLED, Ending.NOT_FINISHED, None])
def test_an_answer_cut_off_is_an_error_after_its_tokens(ending: Ending | None) -> None:
    outputs = run(AnswerStream(5, END), [Answer("c", (1, 2), True, ending)])
    assert [output.token for output in outputs] == [1, 2, None]
    assert outputs[-1].error


def test_an_end_token_that_is_ignored_is_a_token() -> None:
    outputs = run(AnswerStream(3), [Answer("c", (END, END, 1), True, Ending.LENGTH)])
    assert [output.token for output in outputs] == [END, END, 1]


# --- what the prefill side gave already ---


def of_decode_side(
    habit: Habit, given_: list[int], rest: list[int], cuts: list[int], repeats: bool
) -> AnswerStream:
    stream = AnswerStream(len(given_) + len(rest), None, tuple(given_), habit)
    run(stream, dealt([*given_, *rest] if repeats else rest, cuts, Ending.LENGTH, False))
    return stream


@given(
    TOKENS.filter(bool),
    st.lists(st.tuples(TOKENS.filter(bool), st.lists(st.integers(0, 8))), min_size=1, max_size=5),
    st.booleans(),
)
def test_what_the_prefill_side_gave_is_never_reported_again_and_nothing_is_missed(
    given_: list[int], answers: list[tuple[list[int], list[int]]], repeats: bool
) -> None:
    """One build always does the same. The first answer shows it, and one at most is lost to find out."""
    habit, failed = Habit(), 0
    for rest, cuts in answers:
        stream = of_decode_side(habit, given_, rest, cuts, repeats)
        if stream.failed:
            failed += 1
            continue
        assert [output.token for output in stream.outputs] == rest
        assert stream.outputs[-1].finish is FinishReason.LENGTH
        assert habit.repeats in (repeats, None)
    assert failed <= (not repeats)
    assert habit.repeats is not None


def test_a_second_token_equal_to_the_first_is_kept_once_the_habit_is_known() -> None:
    habit = Habit()
    of_decode_side(habit, [5], [6, 7], [], repeats=False)
    assert habit.repeats is False
    assert [o.token for o in of_decode_side(habit, [5], [5, 7], [1], repeats=False).outputs] == [5, 7]
    habit = Habit()
    of_decode_side(habit, [5], [6, 7], [], repeats=True)
    assert habit.repeats is True
    assert [o.token for o in of_decode_side(habit, [5], [5, 7], [1], repeats=True).outputs] == [5, 7]


def test_an_answer_that_lost_a_token_to_a_wrong_guess_fails_and_teaches() -> None:
    habit = Habit()
    stream = of_decode_side(habit, [5], [5, 7], [], repeats=False)
    assert [output.token for output in stream.outputs] == [7, None]
    assert "transfer" in (stream.outputs[-1].error or "")
    assert habit.repeats is False


def test_a_failed_answer_teaches_nothing() -> None:
    habit = Habit()
    stream = AnswerStream(4, None, (5,), habit)
    stream.take(Answer("c", (5, 6)))
    stream.fail("too late")
    stream.take(Answer("c", (7, 8), True, Ending.CANCELLED))
    assert habit.repeats is None
