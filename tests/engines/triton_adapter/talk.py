"""Calls to a server and waiting for what comes of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from engines.executor.types import Answer, Call, CallKind, LinkLost
from engines.triton_link import TritonLink
from tests.executor_fakes.messages import make_token
from tests.executor_fakes.model import VOCABULARY

Connect = Callable[..., TritonLink]
WAIT_S = 10.0  # bound of every wait here; none takes so long unless something is wrong


def call(name: str = "a", tokens: int = 20, max_tokens: int = 4, **other: Any) -> Call:
    prompt = tuple((7 * place + 3) % VOCABULARY for place in range(tokens))
    return Call(name, other.pop("kind", CallKind.GENERATE), prompt, max_tokens, **other)


def answers(link: TritonLink, name: str = "a", *, until: Callable[[list[Answer]], bool]) -> list[Answer]:
    """Answers of one call until enough was heard."""
    heard: list[Answer] = []
    deadline_s = time.monotonic() + WAIT_S
    while not until(heard):
        assert time.monotonic() < deadline_s, heard
        heard += [r for r in link.receive(0.5) if isinstance(r, Answer) and r.call_id == name]
    return heard


def ended(heard: list[Answer]) -> bool:
    return bool(heard) and heard[-1].final


def said(heard: list[Answer]) -> list[int]:
    return [token for answer in heard for token in answer.tokens]


def expected(made: Call) -> list[int]:
    return [make_token(made.token_ids, place, VOCABULARY, made.end_id) for place in range(made.max_tokens)]


def lost(link: TritonLink) -> str:
    """What the link says when it is lost, in time, and before that nothing of any call."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        try:
            assert not link.receive(0.2)
        except LinkLost as error:
            return str(error)
    raise AssertionError("the link was not lost")


def eventually(true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
