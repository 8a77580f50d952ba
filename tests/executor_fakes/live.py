"""What a fake executor holds of one request, and its limits."""

from __future__ import annotations

from dataclasses import dataclass, field

from .messages import FakeRequest
from .pool import Block


class ExecutorCrash(Exception):  # noqa: N818 - what happened
    """The process that held the executor is gone."""


@dataclass(frozen=True, slots=True)
class Limits:
    """max_seq_len: prompt and answer of one request. stop_after: the end token is output token number
    `stop_after` of each request that names one; None: it never comes. chunked: enable_chunked_context.
    """

    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    chunked: bool
    reuse: bool
    vocabulary: int
    stop_after: int | None
    max_input_len: int | None = None  # longest prompt, cached tokens and all


@dataclass(slots=True, eq=False)
class Live:
    request_id: int
    request: FakeRequest
    hashes: list[int]
    need: int  # blocks of prompt and answer
    table: list[Block] = field(default_factory=list)
    position: int = 0  # tokens with KV
    outputs: list[int] = field(default_factory=list)
    sent: int = 0
    ended: bool = False  # by its end token
    reused_blocks: int = 0
    transfer_left: int | None = None  # iterations until the KV of the other side is here; None: is here

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.token_ids)

    @property
    def in_context(self) -> bool:
        return self.position < self.prompt_tokens and self.transfer_left is None
