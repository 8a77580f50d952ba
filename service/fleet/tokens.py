"""Token streams at the worker: answers as lists with a cursor for each reader, sent coalesced.

The worker keeps the tokens of an answer until its front end has acknowledged them, so there is no queue of
messages: what a front end has not read is the rest of those lists, and a message takes from all of them at
once. The first token after a pause goes without delay, and then there is one message in `flush_s` at most, or
one for each `tokens_max` tokens: an engine may emit 10,000 tokens a second, and a Python process takes about
as many messages.

A slow front end costs the worker memory and nothing else, and that is bounded: with more than
`backlog_tokens_max` tokens not acknowledged, or away for longer than `away_s` while it has tokens coming, it
is cut off. Its answers are dropped and the scheduler is told to end those requests. Waiting for it would hold
KV for somebody who does not read.

A stream begins with how many tokens of each answer the front end has; sending goes on from there. Where it
names none, from what it acknowledged. So nothing is sent twice or left out while the worker lives. An answer
that is aborted keeps what is there already until it is read: the scheduler counted those tokens.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field

from engines.types import FinishReason
from protos.plaserve.v1 import worker_pb2 as pb
from service.fleet.convert import BadMessage, delta_of


@dataclass(frozen=True, slots=True)
class TokenSettings:
    """Seconds and counts; see the module text. credit: messages that may be unacknowledged.
    beat_s: an empty message after so long without another, so that the front end sees a dead stream."""

    flush_s: float = 0.004
    tokens_max: int = 512
    credit: int = 64
    backlog_tokens_max: int = 65_536
    away_s: float = 5.0
    beat_s: float = 1.0


@dataclass(slots=True, eq=False)
class _Answer:
    """Tokens from index `base` on; those before it are acknowledged. sent: the index that goes out next."""

    request_id: str
    base: int = 0
    sent: int = 0
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    over: bool = False  # nothing more will come
    told: bool = True  # whether `finish` is sent, or there is none to send

    @property
    def end(self) -> int:
        return self.base + len(self.tokens)


@dataclass(slots=True, eq=False)
class _Reader:
    """One front end. stream: its number, 0 while it is away."""

    away_since_s: float
    answers: dict[str, _Answer] = field(default_factory=dict)
    due: dict[str, None] = field(default_factory=dict)  # answers with something to send, oldest first
    kept: int = 0  # tokens not acknowledged
    stream: int = 0
    sequence: int = 0
    unread: deque[tuple[int, list[tuple[_Answer, int]]]] = field(default_factory=deque)
    notify: Callable[[], None] = lambda: None


class TokenBook:
    """All answers of one worker. Times are given; no IO."""

    def __init__(self, settings: TokenSettings | None = None) -> None:
        self.settings = settings or TokenSettings()
        self._readers: dict[str, _Reader] = {}
        self._reader_of: dict[str, _Reader] = {}  # request id -> reader, until the answer is over
        self._streams = 0
        self.cuts = 0  # front ends that were cut off

    def kept(self, front_end: str) -> int:
        """Tokens that the front end has not acknowledged."""
        reader = self._readers.get(front_end)
        return reader.kept if reader is not None else 0

    @property
    def kept_total(self) -> int:
        """Of all front ends."""
        return sum(reader.kept for reader in self._readers.values())

    @property
    def idle(self) -> bool:
        """Whether every answer is over and read."""
        return not any(reader.answers for reader in self._readers.values())

    # --- the engine's side ---

    def begin(self, request_id: str, front_end: str, now_s: float) -> None:
        """A request whose tokens go to `front_end`; empty: to nobody. Again: the answer starts over."""
        self.end(request_id)
        if not front_end:
            return
        reader = self._readers.setdefault(front_end, _Reader(now_s))
        old = reader.answers.get(request_id)
        if old is not None:
            self._forget(reader, old)
        reader.answers[request_id] = _Answer(request_id)
        self._reader_of[request_id] = reader

    def add(self, request_id: str, token: int, finish: FinishReason | None) -> None:
        """The next token of an answer; nothing where nobody reads it."""
        reader = self._reader_of.get(request_id)
        if reader is None:
            return
        answer = reader.answers[request_id]
        answer.tokens.append(token)
        reader.kept += 1
        if finish is not None:
            answer.finish, answer.told, answer.over = finish, False, True
            del self._reader_of[request_id]
        reader.due[request_id] = None
        reader.notify()

    def end(self, request_id: str) -> None:
        """No more tokens will come (aborted, or lost)."""
        reader = self._reader_of.pop(request_id, None)
        if reader is not None:
            answer = reader.answers[request_id]
            answer.over = True
            self._release(reader, answer)

    # --- the front end's side ---

    def attach(
        self, front_end: str, positions: Mapping[str, int], notify: Callable[[], None], now_s: float
    ) -> int:
        """A stream of a front end; returns its number. An older one of the same gets nothing more.

        positions: request id -> tokens that are there; more than the worker has are of an earlier run of the
        request. Raises BadMessage for fewer than were acknowledged.
        """
        reader = self._readers.setdefault(front_end, _Reader(now_s))
        for answer in reader.answers.values():
            position = positions.get(answer.request_id, answer.base)
            if position < answer.base:
                raise BadMessage(
                    f"StreamTokensRequest.positions: {position} of {answer.request_id!r}, "
                    f"but {answer.base} tokens were acknowledged and are gone"
                )
        self._streams += 1
        before, reader.notify = reader.notify, notify
        reader.stream, reader.sequence = self._streams, 0
        reader.unread.clear()
        reader.due.clear()
        for answer in list(reader.answers.values()):
            self._read_up_to(reader, answer, positions.get(answer.request_id, answer.base))
            answer.sent, answer.told = answer.base, answer.finish is None
            if answer.request_id in reader.answers and (answer.tokens or not answer.told):
                reader.due[answer.request_id] = None
        before()  # so that an older stream sees that it is over
        return self._streams

    def detach(self, front_end: str, stream: int, now_s: float) -> None:
        """A stream ended; a newer one of the same front end is not meant."""
        reader = self._readers.get(front_end)
        if reader is not None and reader.stream == stream:
            reader.stream, reader.away_since_s = 0, now_s
            reader.notify()
            reader.notify = lambda: None
            if not reader.answers:
                del self._readers[front_end]

    def current(self, front_end: str, stream: int) -> bool:
        reader = self._readers.get(front_end)
        return reader is not None and reader.stream == stream

    def unsent(self, front_end: str) -> int:
        """Tokens to send, counted up to a message full."""
        reader = self._readers.get(front_end)
        count = 0
        for request_id in reader.due if reader is not None else ():
            assert reader is not None
            answer = reader.answers[request_id]
            count += answer.end - answer.sent
            if count >= self.settings.tokens_max:
                break
        return count

    def unread(self, front_end: str) -> int:
        """Messages that are not acknowledged."""
        reader = self._readers.get(front_end)
        return len(reader.unread) if reader is not None else 0

    def take(self, front_end: str) -> pb.StreamTokensResponse | None:
        """The next message, of `tokens_max` tokens at most; None where there is nothing to send."""
        reader = self._readers.get(front_end)
        if reader is None or not reader.due:
            return None
        room, deltas, sent = self.settings.tokens_max, [], []
        while reader.due and room > 0:
            request_id = next(iter(reader.due))
            answer = reader.answers[request_id]
            start, stop = answer.sent, min(answer.end, answer.sent + room)
            room -= stop - start
            finish = answer.finish if stop == answer.end else None
            tokens = answer.tokens[start - answer.base : stop - answer.base]
            deltas.append(delta_of(request_id, start, tokens, finish))
            answer.sent, answer.told = stop, answer.told or finish is not None
            sent.append((answer, stop))
            if stop < answer.end:
                break
            del reader.due[request_id]
        reader.sequence += 1
        reader.unread.append((reader.sequence, sent))
        return pb.StreamTokensResponse(deltas=deltas, sequence=reader.sequence)

    def acknowledge(self, front_end: str, stream: int, through: int) -> None:
        """Messages of this stream up to `through` are read. Raises BadMessage for one that was not sent."""
        reader = self._readers.get(front_end)
        if reader is None or reader.stream != stream:
            return
        if through > reader.sequence:
            raise BadMessage(
                f"StreamTokensRequest.acknowledged: {through}, but {reader.sequence} was the last one sent"
            )
        while reader.unread and reader.unread[0][0] <= through:
            for answer, end in reader.unread.popleft()[1]:
                if reader.answers.get(answer.request_id) is answer:
                    self._read_up_to(reader, answer, end)
        reader.notify()

    # --- limits ---

    def overdue(self, now_s: float) -> list[tuple[str, str]]:
        """Front ends to cut off, each with why."""
        found = []
        for name, reader in self._readers.items():
            if reader.kept > self.settings.backlog_tokens_max:
                found.append((name, f"front end {name} is {reader.kept} tokens behind"))
            elif not reader.stream and reader.answers and now_s - reader.away_since_s > self.settings.away_s:
                found.append((name, f"front end {name} is away for {now_s - reader.away_since_s:.1f} s"))
        return found

    def cut(self, front_end: str) -> tuple[str, ...]:
        """Drop everything for a front end; the requests of it that were still to get tokens."""
        reader = self._readers.pop(front_end)
        self.cuts += 1
        live = tuple(r for r in reader.answers if self._reader_of.get(r) is reader)
        for request_id in live:
            del self._reader_of[request_id]
        reader.stream = 0
        reader.notify()
        return live

    def _read_up_to(self, reader: _Reader, answer: _Answer, position: int) -> None:
        count = min(position, answer.end) - answer.base
        if count > 0:
            del answer.tokens[:count]
            answer.base += count
            reader.kept -= count
        self._release(reader, answer)

    def _release(self, reader: _Reader, answer: _Answer) -> None:
        """Forget an answer that is over and read."""
        if answer.over and not answer.tokens and answer.told:
            self._forget(reader, answer)

    def _forget(self, reader: _Reader, answer: _Answer) -> None:
        reader.kept -= len(answer.tokens)
        reader.answers.pop(answer.request_id, None)
        reader.due.pop(answer.request_id, None)


class CutOff(Exception):  # noqa: N818 - what happened
    """The front end was too far behind, or another stream of it is served now."""


async def messages(
    book: TokenBook, front_end: str, positions: Mapping[str, int], credit: int, opened: Callable[[int], None]
) -> AsyncGenerator[pb.StreamTokensResponse, None]:
    """What one stream sends, coalesced. Its first message, and now and then another, is empty.

    opened: told the number of the stream. Raises CutOff, BadMessage.
    """
    loop, wake, settings = asyncio.get_running_loop(), asyncio.Event(), book.settings
    stream = book.attach(front_end, positions, wake.set, loop.time())
    opened(stream)
    next_s = loop.time()
    try:
        yield pb.StreamTokensResponse()  # the positions are read
        while True:
            if book.unsent(front_end) < settings.tokens_max and next_s > loop.time():
                await asyncio.sleep(next_s - loop.time())
            wake.clear()
            while book.current(front_end, stream) and book.unread(front_end) < credit:
                message = book.take(front_end)
                if message is None:
                    break
                yield message
                next_s = loop.time() + settings.flush_s
                if book.unsent(front_end) < settings.tokens_max:
                    break
            if not book.current(front_end, stream):
                raise CutOff(f"front end {front_end}: this stream is over")
            if book.unread(front_end) >= credit or not book.unsent(front_end):
                try:
                    async with asyncio.timeout(settings.beat_s):
                        await wake.wait()
                except TimeoutError:
                    yield pb.StreamTokensResponse()
    finally:
        book.detach(front_end, stream, loop.time())
