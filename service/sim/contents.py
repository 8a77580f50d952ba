"""What requests hold, apart from when they arrive: draws from length sets, rows of a trace.

A trace is a ring that is walked in order, because a prefix is only reused after it was brought. Each time
round, and in each part of a workload, its hashes are changed by another random salt, so that neither a
repetition nor another trace ever looks like a cached prefix.

`cached_tokens` is what an unlimited prefix cache, filled by the earlier requests of the same content, would
hold of a prompt. The reported lane and the target follow from it, the same for every policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np

from service.sim.lengths import LengthSet
from service.sim.workload import TraceRow

_BLOCK = 4096  # lengths drawn at a time


class Drawn(NamedTuple):
    """One request without a time. block_hashes: of the blocks that prompt and answer fill."""

    prompt_tokens: int
    output_tokens: int
    block_hashes: tuple[int, ...] = ()
    cached_tokens: int = 0
    session: str = ""


class Content(Protocol):
    def draw(self) -> Drawn: ...


def draw_salt(rng: np.random.Generator) -> int:
    """62 random bits. Salted by exclusive or, hashes stay as distinct as they were.

    Two salts make small ids collide only where the salts agree in all higher bits.
    """
    return int(rng.integers(1, 1 << 62))


def reusable_blocks(prompt_tokens: int, output_tokens: int, block_tokens: int) -> int:
    """Blocks that a request fills: the KV of the last token of an answer is never computed."""
    return (prompt_tokens + output_tokens - 1) // block_tokens


class LengthContent:
    """Prompts with lengths from a set and nothing in common."""

    def __init__(
        self, lengths: LengthSet, rng: np.random.Generator, tokens_max: int, output_tokens: int
    ) -> None:
        self._output_tokens = output_tokens
        self._prompts = self._stream(lengths, rng, tokens_max)

    def draw(self) -> Drawn:
        return Drawn(next(self._prompts), self._output_tokens)

    @staticmethod
    def _stream(lengths: LengthSet, rng: np.random.Generator, tokens_max: int) -> Iterator[int]:
        while True:
            yield from lengths.sample(rng, _BLOCK, tokens_max).tolist()


class TraceContent:
    """The rows of a trace from row `start` on, round and round."""

    def __init__(
        self,
        rows: Sequence[TraceRow],
        block_tokens: int,
        rng: np.random.Generator,
        *,
        start: int = 0,
        output_tokens: int | None = None,
    ) -> None:
        self._rows = rows
        self._block_tokens = block_tokens
        self._rng = rng
        self._output_tokens = output_tokens
        self._next = start
        self._salt = draw_salt(rng)
        self._seen: set[int] = set()

    def draw(self) -> Drawn:
        if self._next == len(self._rows):
            self._next, self._salt = 0, draw_salt(self._rng)
            self._seen.clear()  # nothing of it can come again
        row = self._rows[self._next]
        self._next += 1
        output_tokens = self._output_tokens or row.output_tokens
        session = f"{row.session}@{self._salt:x}" if row.session else ""
        if not row.block_hashes:
            return Drawn(row.prompt_tokens, output_tokens, session=session)
        blocks = reusable_blocks(row.prompt_tokens, output_tokens, self._block_tokens)
        hashes = tuple(value ^ self._salt for value in row.block_hashes[:blocks])
        cached = cached_blocks(hashes, self._seen, row.prompt_tokens, self._block_tokens)
        self._seen.update(hashes[cached:])
        return Drawn(row.prompt_tokens, output_tokens, hashes, cached * self._block_tokens, session)


def cached_blocks(hashes: Sequence[int], seen: set[int], prompt_tokens: int, block_tokens: int) -> int:
    """Leading blocks of a prompt that were seen; its last token is always computed."""
    count = 0
    for value in islice(hashes, (prompt_tokens - 1) // block_tokens):
        if value not in seen:
            break
        count += 1
    return count
