"""The end of a call, told from responses that never say why it ended."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("tritonclient.grpc")

import numpy as np

from engines.executor.types import Answer, Call, CallKind, ContextTicket, Ending
from engines.triton_messages import CallReader

END = 96
KINDS = st.sampled_from([CallKind.GENERATE, CallKind.CONTEXT_ONLY, CallKind.GENERATION_ONLY])


def response(tokens: list[int], opaque: bytes | None = None) -> dict[str, np.ndarray]:
    arrays = {
        "output_ids": np.array(tokens, np.int32).reshape(1, 1, -1),
        "sequence_length": np.array([[len(tokens)]], np.int32),
    }
    if opaque is not None:
        arrays["context_phase_params"] = np.frombuffer(opaque, np.uint8).reshape(1, -1)
    return arrays


def made(kind: CallKind, max_tokens: int, end_id: int | None) -> Call:
    ticket = ContextTicket((1,), 0, b"state", "f", 8) if kind is CallKind.GENERATION_ONLY else None
    return Call("c", kind, (1, 2, 3), max_tokens, end_id=end_id, ticket=ticket)


@given(
    kind=KINDS,
    max_tokens=st.integers(1, 12),
    end_id=st.none() | st.just(END),
    parts=st.lists(st.lists(st.integers(0, END), max_size=3), max_size=8),
    flagged=st.booleans(),
    cancelled=st.booleans(),
    opaque=st.none() | st.binary(min_size=1, max_size=9),
)
def test_a_call_ends_exactly_once_and_no_token_is_lost_or_told_twice(
    kind: CallKind,
    max_tokens: int,
    end_id: int | None,
    parts: list[list[int]],
    flagged: bool,
    cancelled: bool,
    opaque: bytes | None,
) -> None:
    """Whatever a server sends, and whether or not it flags its last response."""
    reader = CallReader(made(kind, max_tokens, end_id), "f", 8, cancelled=cancelled)
    heard: list[Answer | None] = []
    for index, part in enumerate(parts):
        last = index + 1 == len(parts)
        heard.append(reader.read(response(part, opaque if last else None), last and flagged))
    heard += [reader.end(), reader.end(), reader.fail("too late")]
    answers = [answer for answer in heard if answer is not None]
    assert [answer.final for answer in answers] == [False] * (len(answers) - 1) + [True]
    end = answers[-1]
    assert (end.error is None) is (end.ending is not None)
    said = [token for answer in answers for token in answer.tokens]
    sent = [token for part in parts for token in part]
    assert said == sent[: len(said)]
    if end.error is None:
        assert said == sent
    assert (end.ticket is not None) is (end.ending is Ending.NOT_FINISHED)
    if end.ticket is not None:
        assert (end.ticket.opaque_state, end.ticket.first_gen_tokens) == (opaque, tuple(sent))
    if end.ending is Ending.CANCELLED:
        assert cancelled


@given(data=st.data(), tokens=st.lists(st.integers(0, END - 1), min_size=1, max_size=12))
def test_the_ending_does_not_depend_on_how_the_tokens_were_parted(
    data: st.DataObject, tokens: list[int]
) -> None:
    call = made(
        CallKind.GENERATE, len(tokens) + data.draw(st.integers(0, 3)), data.draw(st.sampled_from([None, END]))
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=4)))
    edges = [0, *cuts, len(tokens)]
    parts = [tokens[start:end] for start, end in pairwise(edges)]
    ends = []
    for pieces in ([tokens], parts):
        reader = CallReader(call, "f", 8)
        for index, piece in enumerate(pieces):
            answer = reader.read(response(piece), index + 1 == len(pieces))
        assert answer is not None
        ends.append((answer.ending, answer.error))
    assert ends[0] == ends[1]
    whole = len(tokens) == call.max_tokens
    assert ends[0][0] is (Ending.LENGTH if whole else Ending.END_ID if call.end_id is not None else None)
