"""Asking a fake executor: prompts, and everything that it says until nothing moves."""

from __future__ import annotations

from collections.abc import Sequence

from tests.executor_fakes.model import VOCABULARY, FakeExecutor, FakeRequest, FakeResponse, make_token

BLOCK = 8  # tokens, of the small executor


def prompt(tokens: int, family: int = 0) -> tuple[int, ...]:
    return tuple((family * 31 + place * 7 + place // 5) % VOCABULARY for place in range(tokens))


def drain(executor: FakeExecutor) -> list[FakeResponse]:
    """Step to the end: everything that it says."""
    said = executor.await_responses(0.0, only_ready=True)
    while executor.step():
        said += executor.await_responses(0.0, only_ready=True)
    return said


def tokens_of(said: Sequence[FakeResponse], request_id: int) -> list[int]:
    return [token for each in said if each.request_id == request_id for token in each.tokens]


def alone(tokens: tuple[int, ...], count: int) -> list[int]:
    return [make_token(tokens, place, VOCABULARY) for place in range(count)]


def run(executor: FakeExecutor, *requests: FakeRequest) -> list[FakeResponse]:
    executor.enqueue_requests(requests)
    return drain(executor)
