"""Token streams without gRPC: each token once, whatever breaks; coalescing and limits by numbers."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.types import FinishReason
from protos.plaserve.v1 import worker_pb2 as pb
from service.fleet.convert import BadMessage
from service.fleet.token_link import Broken, TokenLink
from service.fleet.tokens import CutOff, TokenBook, TokenSettings, messages
from tests.parity.virtual_loop import run_virtually

FRONT = "front-1"
NAMES = ("a", "b", "c")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("token"), st.sampled_from(NAMES), st.booleans()),
        st.tuples(st.just("abort"), st.sampled_from(NAMES)),
        st.just(("send",)),
        st.tuples(st.just("arrive"), st.integers(1, 3)),
        st.just(("acknowledge",)),
        st.just(("break",)),
    ),
    max_size=80,
)


class FrontEnd:
    """The positions of a `TokenLink` and what it handed on."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.link = TokenLink("nowhere:1", FRONT, self._take, lambda address: None)  # type: ignore[arg-type, return-value]

    def positions(self) -> dict[str, int]:
        first = self.link.first()
        return {position.request_id: position.token_count for position in first.positions}

    def _take(self, request_id: str, first: int, token_ids: object) -> bool:
        answer = self.tokens.setdefault(request_id, [])
        assert first == len(answer), "a token twice, or one left out"
        answer.extend(token_ids)  # type: ignore[arg-type]
        return True


@given(STEPS, st.integers(1, 4))
def test_a_front_end_sees_each_token_once_whatever_breaks(steps: list[tuple[object, ...]], size: int) -> None:
    book, front = TokenBook(TokenSettings(tokens_max=size)), FrontEnd()
    emitted: dict[str, list[int]] = {name: [] for name in NAMES}
    over: set[str] = set()
    wire: list[pb.StreamTokensResponse] = []
    for name in NAMES:
        book.begin(name, FRONT, 0.0)
    stream, last = book.attach(FRONT, {}, lambda: None, 0.0), 0
    front.link.begun("one")
    for step in [*steps, ("break",), *[("send",)] * 100, ("arrive", 1000), ("acknowledge",)]:
        match step:
            case ("token", str(name), bool(final)):
                if name not in over:
                    emitted[name].append(len(emitted[name]))
                    book.add(name, emitted[name][-1], FinishReason.LENGTH if final else None)
                    over |= {name} if final else set()
                else:
                    book.add(name, 99, None)  # of an aborted one: unheard
            case ("abort", str(name)):
                book.end(name)
                over.add(name)
            case ("send",):
                message = book.take(FRONT)
                wire += [message] if message is not None else []
            case ("arrive", int(count)):
                for message in wire[:count]:
                    assert 0 < sum(len(delta.token_ids) for delta in message.deltas) <= size
                    front.link.take(message)
                    last = message.sequence
                del wire[:count]
            case ("acknowledge",):
                book.acknowledge(FRONT, stream, last)
            case _:
                wire.clear()
                stream, last = book.attach(FRONT, front.positions(), lambda: None, 0.0), 0
                front.link.begun("one")
    assert front.tokens == {name: tokens for name, tokens in emitted.items() if tokens}
    assert book.kept(FRONT) == 0


def test_repeated_tokens_are_left_out_and_a_gap_ends_the_stream() -> None:
    front = FrontEnd()

    def delta(first: int, *tokens: int) -> pb.StreamTokensResponse:
        made = pb.TokenDelta(request_id="a", first_index=first, token_ids=tokens)
        return pb.StreamTokensResponse(deltas=[made])

    front.link.take(delta(0, 5, 6))
    front.link.take(delta(0, 5, 6))
    front.link.take(delta(1, 6, 7))
    assert front.tokens["a"] == [5, 6, 7]
    with pytest.raises(Broken, match="token 3 of a is missing; 4 came"):
        front.link.take(delta(4, 9))
    assert front.positions() == {"a": 3}


def test_a_request_that_runs_again_starts_over_and_its_old_tokens_are_nobodys() -> None:
    book, front = TokenBook(), FrontEnd()
    book.begin("a", FRONT, 0.0)
    stream = book.attach(FRONT, {}, lambda: None, 0.0)
    book.add("a", 7, None)
    front.link.take(book.take(FRONT))  # type: ignore[arg-type]
    book.begin("a", FRONT, 0.0)
    for token in (7, 8):
        book.add("a", token, FinishReason.STOP if token == 8 else None)
    front.link.take(book.take(FRONT))  # type: ignore[arg-type]
    book.acknowledge(FRONT, stream, 2)
    assert front.tokens["a"] == [7, 8]
    assert book.kept(FRONT) == 0


def test_a_position_before_what_was_acknowledged_is_refused() -> None:
    book = TokenBook()
    book.begin("a", FRONT, 0.0)
    stream = book.attach(FRONT, {}, lambda: None, 0.0)
    book.add("a", 1, None)
    book.take(FRONT)
    book.acknowledge(FRONT, stream, 1)
    with pytest.raises(BadMessage, match="positions: 0 of 'a'"):
        book.attach(FRONT, {"a": 0}, lambda: None, 0.0)
    with pytest.raises(BadMessage, match="acknowledged: 2, but 1"):
        book.acknowledge(FRONT, stream, 2)


def test_a_front_end_that_falls_behind_is_named_and_cut_off_and_others_are_not() -> None:
    book = TokenBook(TokenSettings(backlog_tokens_max=10))
    for name, front in (("slow", FRONT), ("slow too", FRONT), ("quick", "front-2")):
        book.begin(name, front, 0.0)
        book.attach(front, {}, lambda: None, 0.0)
    for token in range(10):
        book.add("slow", token, None)
    assert book.overdue(0.0) == []
    book.add("slow too", 1, FinishReason.STOP)
    ((front, why),) = book.overdue(0.0)
    assert (front, why) == (FRONT, "front end front-1 is 11 tokens behind")
    assert book.cut(FRONT) == ("slow",)  # the other has ended anyway
    assert book.overdue(0.0) == []
    book.add("slow", 1, None)  # unheard
    assert book.kept(FRONT) == 0


def test_a_front_end_that_stays_away_is_cut_off() -> None:
    book = TokenBook(TokenSettings(away_s=5.0))
    book.begin("a", FRONT, 1.0)
    assert book.overdue(5.9) == []
    stream = book.attach(FRONT, {}, lambda: None, 5.9)
    assert book.overdue(100.0) == []
    book.detach(FRONT, stream, 100.0)
    assert book.overdue(104.9) == []
    assert [name for name, _ in book.overdue(105.1)] == [FRONT]
    book.begin("nobody reads it", "", 0.0)
    book.add("nobody reads it", 1, None)
    assert book.kept("") == 0


# --- coalescing, on a virtual clock ---


async def _count(tokens_per_s: int, seconds: float, answers: int, settings: TokenSettings) -> tuple[int, int]:
    """(messages, tokens) that a front end gets which reads and acknowledges at once."""
    book, loop = TokenBook(settings), asyncio.get_running_loop()
    for index in range(answers):
        book.begin(f"r{index}", FRONT, 0.0)
    steps = round(tokens_per_s * seconds / answers)
    numbers: list[int] = []
    counts = [0, 0]

    async def emit() -> None:
        for step in range(steps):
            for index in range(answers):
                book.add(f"r{index}", step, FinishReason.LENGTH if step + 1 == steps else None)
            await asyncio.sleep(answers / tokens_per_s)

    async def read() -> None:
        sent = messages(book, FRONT, {}, settings.credit, numbers.append)
        async with aclosing(sent):
            async for message in sent:
                counts[0] += message.sequence > 0
                counts[1] += sum(len(delta.token_ids) for delta in message.deltas)
                book.acknowledge(FRONT, numbers[0], message.sequence)
                if counts[1] == steps * answers:
                    return

    await asyncio.gather(emit(), read())
    assert loop.time() < seconds + 1.0
    return counts[0], counts[1]


@pytest.mark.parametrize("answers", [1, 50, 200])
def test_ten_thousand_tokens_a_second_are_few_messages(answers: int) -> None:
    settings = TokenSettings(flush_s=0.004)
    sent, tokens = run_virtually(_count(10_000, 2.0, answers, settings))
    assert tokens == 20_000
    assert sent <= 2.0 / settings.flush_s + 1


def test_without_coalescing_it_would_be_a_message_a_step() -> None:
    sent, _ = run_virtually(_count(10_000, 1.0, 10, TokenSettings(flush_s=0.0)))
    assert sent >= 990


def test_a_token_after_a_pause_does_not_wait() -> None:
    async def run() -> list[float]:
        book, loop = TokenBook(TokenSettings(flush_s=1.0, beat_s=100.0)), asyncio.get_running_loop()
        book.begin("a", FRONT, 0.0)
        times: list[float] = []

        async def read() -> None:
            sent = messages(book, FRONT, {}, 64, lambda stream: None)
            async with aclosing(sent):
                await anext(sent)
                async for _ in sent:
                    times.append(loop.time())
                    if len(times) == 3:
                        return

        task = asyncio.create_task(read())
        for at_s in (5.0, 5.1, 5.2, 9.0):
            await asyncio.sleep(at_s - loop.time())
            book.add("a", 1, None)
        await task
        return times

    assert run_virtually(run()) == [5.0, 6.0, 9.0]


def test_a_reader_without_credit_gets_no_more_and_an_older_stream_ends() -> None:
    async def run() -> tuple[int, int]:
        book = TokenBook(TokenSettings(flush_s=0.001, beat_s=1000.0))
        book.begin("a", FRONT, 0.0)
        got: list[pb.StreamTokensResponse] = []

        async def read() -> None:
            nonlocal got
            async for message in messages(book, FRONT, {}, 3, lambda stream: None):
                got += [message] if message.sequence else []

        task = asyncio.create_task(read())
        for token in range(100):
            book.add("a", token, None)
            await asyncio.sleep(0.01)
        before = len(got)
        book.attach(FRONT, {}, lambda: None, 0.0)
        with pytest.raises(CutOff):
            await task
        return before, book.kept(FRONT)

    assert run_virtually(run()) == (3, 100)


def test_a_quiet_stream_says_so_now_and_then() -> None:
    async def run() -> float:
        book = TokenBook(TokenSettings(beat_s=1.5))
        sent = messages(book, FRONT, {}, 64, lambda stream: None)
        async with aclosing(sent):
            for _ in range(5):
                assert not (await anext(sent)).sequence
        return asyncio.get_running_loop().time()

    assert run_virtually(run()) == 6.0
