"""What goes into a fake executor and what comes out, and the tokens that it makes.

A token depends on the prompt and on its place alone, so every law about company, chunks, reuse and hand-
over shows in the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b

from .pool import DEFAULT_PRIORITY


class Kind(StrEnum):
    GENERATE = "REQUEST_TYPE_CONTEXT_AND_GENERATION"
    CONTEXT_ONLY = "REQUEST_TYPE_CONTEXT_ONLY"
    GENERATION_ONLY = "REQUEST_TYPE_GENERATION_ONLY"


class Finish(StrEnum):
    """Members of FinishReason."""

    NOT_FINISHED = "NOT_FINISHED"
    END_ID = "END_ID"
    STOP_WORDS = "STOP_WORDS"
    LENGTH = "LENGTH"
    TIMED_OUT = "TIMED_OUT"
    CANCELLED = "CANCELLED"


@dataclass(frozen=True, slots=True)
class HandOver:
    """ContextPhaseParams: first_gen_tokens, req_id, opaque_state."""

    first_tokens: tuple[int, ...]
    request_id: int
    opaque_state: bytes


@dataclass(frozen=True, slots=True)
class Retention:
    """Priority of the blocks that begin in tokens [start, end); end None: to the last."""

    start: int
    end: int | None
    priority: int

    def __post_init__(self) -> None:
        if not 0 <= self.priority <= 100:
            raise ValueError(f"retention priority must be 0 to 100, got {self.priority}")


@dataclass(frozen=True, slots=True)
class FakeRequest:
    """end_id None: nothing ends it. with_prompt: what does not stream begins with the prompt."""

    token_ids: tuple[int, ...]
    max_tokens: int
    kind: Kind = Kind.GENERATE
    streaming: bool = True
    end_id: int | None = None
    retention: tuple[Retention, ...] = ()
    decode_priority: int = DEFAULT_PRIORITY
    hand_over: HandOver | None = None
    perf_metrics: bool = True
    with_prompt: bool = False

    def priority_of(self, token: int) -> int:
        """Of the block that begins with this token, where it is new."""
        if token >= len(self.token_ids):
            return self.decode_priority
        asked = self.asked_priority(token)
        return DEFAULT_PRIORITY if asked is None else asked

    def asked_priority(self, token: int) -> int | None:
        """What the request asks for by name: that a block taken from the cache gets too."""
        for part in self.retention:
            if part.start <= token and (part.end is None or token < part.end):
                return part.priority
        return None


@dataclass(frozen=True, slots=True)
class ReuseMetrics:
    """kv_cache_metrics of a request."""

    total_allocated_blocks: int
    new_allocated_blocks: int
    reused_blocks: int
    missed_blocks: int


@dataclass(frozen=True, slots=True)
class FakeResponse:
    """tokens: new output tokens when streaming, else all of them, also those of the context side.

    error: set, there is no result.
    """

    request_id: int
    tokens: tuple[int, ...] = ()
    final: bool = False
    finish: Finish | None = None
    iteration: int = 0
    hand_over: HandOver | None = None
    metrics: ReuseMetrics | None = None
    error: str | None = None


def make_token(prompt: Sequence[int], place: int, vocabulary: int, end_id: int | None = None) -> int:
    """Output token number `place`, 0 is the first; never `end_id`."""
    text = f"{place}|{','.join(map(str, prompt))}"
    token = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") % vocabulary
    return (token + 1) % vocabulary if token == end_id else token
