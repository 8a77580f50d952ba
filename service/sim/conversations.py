"""Sessions of several turns: each prompt is the one before it, its answer, and something new.

The history is in the block hashes: the chain of a session only grows, so a turn shares all full blocks of the
turn before, the answer included as far as it was generated here. With one output token (prefill only) the
answer was decoded elsewhere and its KV is there too, so it counts as part of what the next turn brings.

Drawn sessions take the new tokens of the first and the later turns from two length sets, a geometric number
of turns and exponential think times. Recorded ones replay the turns of a trace; what a turn shares with
earlier ones comes from its hashes, or where there are none from `reused_tokens`.

A session ends before the first turn that would be longer than `prompt_tokens_max`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple, Protocol

import numpy as np

from service.sim.contents import Drawn, cached_blocks, draw_salt, reusable_blocks
from service.sim.lengths import LengthSet
from service.sim.workload import TraceRow

_BLOCKS_MAX = 1 << 24  # blocks of one session that have names of their own


class Turn(NamedTuple):
    """think_s: from the end of the turn before."""

    drawn: Drawn
    think_s: float


Conversation = Iterator[Turn]


class ConversationContent(Protocol):
    def start(self) -> Conversation:
        """The turns of the next session; at least one."""


@dataclass(frozen=True, slots=True)
class TurnSettings:
    """Drawn sessions, and the bounds of recorded ones. Times in seconds."""

    turns_mean: float
    think_s_mean: float
    think_s_max: float
    block_tokens: int
    prompt_tokens_max: int
    output_tokens: int | None  # None: as recorded


class DrawnConversations:
    def __init__(
        self, first: LengthSet, later: LengthSet, settings: TurnSettings, rng: np.random.Generator
    ) -> None:
        self._first, self._later, self._settings, self._rng = first, later, settings, rng
        self._salt = draw_salt(rng)
        self._sessions = 0

    def start(self) -> Conversation:
        """All draws of a session are made here, so that it is the same whenever its turns are sent."""
        settings, rng = self._settings, self._rng
        base = self._salt + self._sessions * _BLOCKS_MAX
        self._sessions += 1
        turns = int(rng.geometric(1.0 / settings.turns_mean))
        new = [
            *self._first.sample(rng, 1, settings.prompt_tokens_max).tolist(),
            *self._later.sample(rng, turns - 1, settings.prompt_tokens_max).tolist(),
        ]
        thinks_s = np.minimum(rng.exponential(settings.think_s_mean, turns), settings.think_s_max).tolist()
        return self._turns(base, new, thinks_s)

    def _turns(self, base: int, new_tokens: list[int], thinks_s: list[float]) -> Conversation:
        size, output = self._settings.block_tokens, self._settings.output_tokens or 1
        history = known_blocks = 0
        for new, think_s in zip(new_tokens, thinks_s, strict=True):
            prompt = history + new
            if prompt > self._settings.prompt_tokens_max:
                return
            blocks = reusable_blocks(prompt, output, size)
            hashes = tuple(range(base, base + blocks))
            cached = min(known_blocks, (prompt - 1) // size) * size
            yield Turn(Drawn(prompt, output, hashes, cached), think_s if history else 0.0)
            history, known_blocks = prompt + output, blocks


class RecordedConversations:
    """The sessions of a trace in the order of their first rows from number `start` on, round and round."""

    def __init__(
        self,
        rows: Sequence[TraceRow],
        trace_block_tokens: int,
        settings: TurnSettings,
        rng: np.random.Generator,
        start: int = 0,
    ) -> None:
        self._settings, self._rng = settings, rng
        self._block_tokens = trace_block_tokens or settings.block_tokens
        self._sessions = sessions_of(rows, settings.prompt_tokens_max)
        self._next = start % len(self._sessions)

    def start(self) -> Conversation:
        rows = self._sessions[self._next]
        self._next = (self._next + 1) % len(self._sessions)
        return self._turns(rows, draw_salt(self._rng))

    def _turns(self, rows: Sequence[TraceRow], salt: int) -> Conversation:
        size, seen, fresh = self._block_tokens, set[int](), salt
        chain: tuple[int, ...] = ()
        for number, row in enumerate(rows):
            output = self._settings.output_tokens or row.output_tokens
            blocks = reusable_blocks(row.prompt_tokens, output, size)
            if row.block_hashes:
                chain = tuple(value ^ salt for value in row.block_hashes[:blocks])
                known = cached_blocks(chain, seen, row.prompt_tokens, size)
                seen.update(chain[known:])
            else:
                shared = chain[: min(row.reused_tokens, row.prompt_tokens - 1) // size]
                known, grown = len(shared), blocks - len(shared)
                chain = (*shared, *range(fresh, fresh + grown))
                fresh += grown
            think_s = min(row.think_s, self._settings.think_s_max) if number else 0.0
            yield Turn(Drawn(row.prompt_tokens, output, chain, known * size), think_s)


def sessions_of(rows: Sequence[TraceRow], prompt_tokens_max: int) -> list[list[TraceRow]]:
    """Rows by session, each up to its first row that is too long. Raises ValueError if none is left."""
    sessions: dict[str, list[TraceRow]] = {}
    for row in rows:
        sessions.setdefault(row.session, []).append(row)
    if "" in sessions:
        raise ValueError("arrivals sessions: the trace has rows without a session; use other arrivals")
    short = [
        list(takewhile(lambda row: row.prompt_tokens <= prompt_tokens_max, s)) for s in sessions.values()
    ]
    usable = [turns for turns in short if turns]
    if not usable:
        raise ValueError(f"prompt_tokens_max: no session begins with at most {prompt_tokens_max} tokens")
    return usable
