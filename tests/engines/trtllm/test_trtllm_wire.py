"""Laws of the wire: what is sent is what is read, and nothing else is read."""

from __future__ import annotations

import dataclasses
import json
import pickle
import typing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.executor.types import (
    Answer,
    CacheGap,
    CacheRemoved,
    CacheStored,
    Call,
    CallKind,
    ContextTicket,
    Ending,
    ExecutorRole,
    Facts,
    Iteration,
    Report,
    Unread,
)
from engines.trtllm_child import wire
from engines.trtllm_child.config import ChildConfig, Driver
from engines.types import Sampling

TOKENS = st.lists(st.integers(0, 2**31), max_size=6).map(tuple)
HASH = st.integers(-(2**63), 2**64)
FINITE = st.floats(allow_nan=False, allow_infinity=False)

COUNT = st.none() | st.integers(0)
TICKETS = st.builds(
    ContextTicket, TOKENS, HASH, st.binary(max_size=40), st.text(), st.integers(1), draft_tokens=TOKENS
)
CALLS = st.builds(
    Call,
    st.text(),
    st.sampled_from(CallKind),
    TOKENS,
    st.integers(1),
    sampling=st.builds(Sampling, FINITE, FINITE, st.integers(0), st.integers(), st.booleans()),
    end_id=st.none() | st.integers(),
    priority=st.none() | st.integers(0, 100),
    priority_s=st.none() | st.floats(0.0, 1e6),
    ticket=st.none() | TICKETS,
)
CONFIGS = st.builds(
    ChildConfig,
    driver=st.sampled_from(Driver),
    role=st.sampled_from(ExecutorRole),
    capture_tokens=TOKENS,
    transceiver=st.none() | st.text(),
)
REPORTS = st.one_of(
    st.builds(
        Answer,
        st.text(),
        TOKENS,
        st.booleans(),
        st.none() | st.sampled_from(Ending),
        COUNT,
        st.none() | TICKETS,
        st.none() | st.text(),
    ),
    st.builds(
        Iteration,
        st.integers(0),
        st.integers(0),
        st.integers(0),
        st.integers(0),
        COUNT,
        COUNT,
        st.none() | FINITE,
        COUNT,
        COUNT,
        COUNT,
    ),
    st.builds(CacheStored, st.none() | HASH, st.lists(st.tuples(HASH, TOKENS), max_size=3).map(tuple)),
    st.builds(CacheRemoved, st.lists(HASH, max_size=4).map(tuple)),
    st.builds(CacheGap, st.integers(1)),
    st.builds(Unread, st.integers(1)),
)
MESSAGES = st.one_of(
    st.builds(wire.Configure, CONFIGS),
    st.builds(wire.Enqueue, st.lists(CALLS, max_size=3).map(tuple)),
    st.builds(wire.Cancel, st.text()),
    st.builds(wire.Close, FINITE),
    st.builds(wire.Started, st.from_type(Facts)),
    st.builds(wire.Failed, st.text(), st.text()),
    st.builds(wire.Reports, st.lists(REPORTS, max_size=5).map(tuple), st.integers(0)),
)


@settings(max_examples=100, deadline=None)
@given(MESSAGES)
def test_what_is_sent_is_what_is_read(message: wire.Message) -> None:
    again = wire.decode(wire.encode(message))
    assert again == message
    assert type(again) is type(message)


def test_every_kind_of_report_and_message_is_covered() -> None:
    """A new kind of report needs no line in the codec; this test says when the strategies lack it."""
    assert set(typing.get_args(Report)) == {*(Answer, Iteration, CacheStored, CacheRemoved, CacheGap, Unread)}
    for kind in (*typing.get_args(wire.Message), *typing.get_args(Report), Call, ChildConfig, ContextTicket):
        assert wire._KIND not in {field.name for field in dataclasses.fields(kind)}


@settings(max_examples=200, deadline=None)
@given(MESSAGES, st.data())
def test_a_message_with_a_field_too_many_or_too_few_is_refused(message: wire.Message, data: Any) -> None:
    raw = json.loads(wire.encode(message))
    if data.draw(st.booleans()):
        raw["surplus"] = 1
    else:
        del raw[data.draw(st.sampled_from(sorted(raw)))]
    with pytest.raises(wire.WireError):
        wire.decode(json.dumps(raw).encode())


@settings(max_examples=100, deadline=None)
@given(
    st.binary(max_size=80)
    | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(
        lambda value: json.dumps(value).encode()
    )
)
def test_garbage_is_a_wire_error_and_nothing_else(data: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.decode(data)


@given(st.integers() | st.text() | st.none() | st.booleans() | st.lists(st.integers()))
def test_a_value_of_another_type_is_refused(value: Any) -> None:
    raw = json.loads(wire.encode(wire.Cancel("a")))
    raw["call_id"] = value
    if isinstance(value, str):
        assert wire.decode(json.dumps(raw).encode()) == wire.Cancel(value)
    else:
        with pytest.raises(wire.WireError, match="call_id"):
            wire.decode(json.dumps(raw).encode())


def test_an_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(wire.WireError, match="unknown kind 'Reboot'; known are Configure"):
        wire.decode(b'{"is": "Reboot"}')
    with pytest.raises(wire.WireError, match="unknown kind 'Rumour'"):
        wire.decode(b'{"is": "Reports", "reports": [{"is": "Rumour"}], "skipped": 0}')


def test_a_number_that_json_has_not_is_never_sent() -> None:
    with pytest.raises(ValueError, match="JSON"):
        wire.encode(wire.Close(float("nan")))


def test_a_pickle_is_not_opened() -> None:
    with pytest.raises(wire.WireError):
        wire.decode(pickle.dumps(wire.Cancel("a")))
