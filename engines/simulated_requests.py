"""What the simulated engine keeps of its requests: their blocks, and the tokens that they would say.

Tokens are a hash of prompt and position, so a request repeats itself however it is batched, chunked or
reused; the end-of-sequence token appears only where `Behaviour.stop_after` asks for it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from zlib import crc32

from engines.blocks import BlockPool, BlockTable, OutOfBlocks, chain_hashes
from engines.types import Capabilities, Chunking, DecodeMode, EngineRequest, PassItem

EOS_TOKEN = 2
_TOKEN_FIRST, _TOKEN_COUNT = 256, 32_000  # clear of the special tokens of common vocabularies
_MASK = 2**64 - 1
_SPREAD, _MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9  # constants of the SplitMix64 generator


@dataclass(slots=True, eq=False)
class Live:
    """A request that the engine holds.

    hashes: chain hashes of its full blocks, as far as it has any; they may run on into the answer.
    table: its blocks; None before its first pass, and between two parts that are requests of their own.
    """

    request_id: str
    prompt_tokens: int
    max_new_tokens: int
    hashes: tuple[int, ...]
    retain: bool = False
    ignore_eos: bool = False
    token_ids: tuple[int, ...] | None = None
    table: BlockTable | None = None
    position: int = 0
    generated: list[int] = field(default_factory=list)
    in_parts: bool = False  # its prompt was cut into requests of their own
    layers: Layers | None = None
    seed: int | None = None  # of its tokens, once it has been asked for

    @classmethod
    def of(cls, request: EngineRequest, block_tokens: int) -> Live:
        ids = request.token_ids
        hashes = chain_hashes(ids, block_tokens)
        live = cls(request.request_id, len(ids), request.max_new_tokens, hashes, request.retain)
        live.ignore_eos, live.token_ids = request.sampling.ignore_eos, ids
        return live

    def next_token(self, stop_after: int | None) -> int:
        """The token at the current position. stop_after: how many tokens before it stops by itself."""
        if not self.ignore_eos and stop_after == len(self.generated) + 1:
            return EOS_TOKEN
        if self.seed is None:
            self.seed = crc32(self._text())
        value = self.seed + self.position * _SPREAD & _MASK
        value = (value ^ value >> 30) * _MIX & _MASK
        return _TOKEN_FIRST + (value >> 32) % _TOKEN_COUNT

    def prompt_hashes(self, block_tokens: int) -> tuple[int, ...]:
        """Hashes of all full blocks of the prompt: those that are missing are made up, unlike any other's."""
        known, blocks = len(self.hashes), self.prompt_tokens // block_tokens
        if known < blocks:
            seed = int.from_bytes(blake2b(self._text(), digest_size=8).digest(), "little")
            self.hashes += tuple((seed ^ index * _SPREAD) & _MASK for index in range(known + 1, blocks + 1))
        return self.hashes

    def all_hashes(self, block_tokens: int) -> tuple[int, ...]:
        """Hashes of prompt and answer."""
        if self.token_ids is None:
            return self.hashes
        return chain_hashes((*self.token_ids, *self.generated), block_tokens)

    def _text(self) -> bytes:
        ids = self.token_ids
        return self.request_id.encode() if ids is None else struct.pack(f"<{len(ids)}I", *ids)


@dataclass(slots=True, eq=False)
class Step:
    """One request's part of a pass: `new` tokens after `start`, of which `reused` came from the cache.

    first: the pass gives it its table. new is 0 where what was left in the cache of a part does not allow a
    whole block within the budget.
    """

    live: Live
    start: int
    new: int
    reused: int
    first: bool
    error: str | None = None

    @property
    def is_part(self) -> bool:
        """Whether it ends before its prompt does."""
        return self.start + self.new < self.live.prompt_tokens


@dataclass(frozen=True, slots=True)
class Layers:
    """A request between two groups of layers: the first `done` of `blocks` of the pass that `item` was in."""

    done: int
    blocks: int
    item: PassItem
    step: Step


class RequestBook:
    """The requests that one engine holds, and the blocks that they hold."""

    def __init__(self, capabilities: Capabilities) -> None:
        self.pool = BlockPool(capabilities.kv_blocks_total, capabilities.block_tokens)
        self.live: dict[str, Live] = {}
        self.decoding: dict[str, Live] = {}  # those that ride in prefill passes
        self.parts_are_requests = capabilities.chunking is Chunking.PREFIX_REUSE
        self._limits = capabilities

    def add(self, live: Live) -> None:
        """Raises ValueError for a known id or a request that can never run here."""
        if live.request_id in self.live:
            raise ValueError(f"request_id: {live.request_id} is already known")
        if live.prompt_tokens < 1:
            raise ValueError("token_ids: the prompt is empty")
        if live.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {live.max_new_tokens}")
        limits = self._limits
        if live.max_new_tokens > 1 and limits.decode is DecodeMode.NONE:
            raise ValueError(
                f"max_new_tokens is {live.max_new_tokens}, but this engine does not decode: ask it for 1 and "
                "another engine for the rest"
            )
        tokens = live.prompt_tokens + live.max_new_tokens
        tokens_max = min(limits.context_tokens_max, limits.kv_blocks_total * limits.block_tokens)
        if tokens > tokens_max:
            raise ValueError(
                f"prompt and max_new_tokens need {tokens} tokens; this engine holds {tokens_max}"
            )
        self.live[live.request_id] = live

    def forget(self, request_id: str) -> None:
        live = self.live.pop(request_id, None)
        if live is None:
            return
        self.decoding.pop(request_id, None)
        if live.table is not None:
            if live.generated and self.parts_are_requests:
                self.publish(live, live.hashes, live.prompt_tokens)
            self.pool.release(live.table)
        if live.in_parts:
            self.pool.end_part(live.hashes)

    def answered(self, request_id: str) -> bool | None:
        """Whether a request has its first token; None where it is not known."""
        live = self.live.get(request_id)
        return None if live is None else bool(live.generated)

    def prompt_tokens(self, request_id: str) -> int:
        return self.live[request_id].prompt_tokens

    def cached_tokens(self, live: Live, tokens_max: int) -> int:
        """Leading prompt tokens in the cache now, at most `tokens_max` and never the last: its logits are
        needed."""
        if not live.hashes:
            return 0
        block = self._limits.block_tokens
        usable = min(live.prompt_tokens - 1, tokens_max)
        return self.pool.lookup(live.hashes[: usable // block]) * block

    def claim(self, steps: Sequence[Step]) -> bool:
        """Take the blocks of all steps: cached ones first, so that none is evicted for another step.

        False where some got none: those have failed and are forgotten."""
        pool, complete = self.pool, True
        for step in steps:
            if step.first and step.new:
                step.live.table = pool.acquire(step.live.hashes, step.start, retain=step.live.retain)
        for step in steps:
            if step.new == 0:
                continue
            assert step.live.table is not None
            try:
                pool.extend(step.live.table, step.start + step.new)
            except OutOfBlocks as error:
                step.error, complete = f"out of KV blocks: {error}", False
                self.forget(step.live.request_id)
        return complete

    def publish(self, live: Live, hashes: tuple[int, ...], tokens: int) -> None:
        """Make the full blocks of the first `tokens` tokens reusable."""
        assert live.table is not None
        self.pool.publish(live.table, hashes[: tokens // self._limits.block_tokens])

    def publish_prompt(self, live: Live) -> None:
        """Make the full blocks of a prompt reusable once its first token is there.

        An executor of its own batches (parts that are requests) names the block of the last prompt token
        with the next token, or when the request ends."""
        given = len(live.generated)
        if live.hashes and given <= 1 + self.parts_are_requests:
            late = self.parts_are_requests and given == 1
            self.publish(live, live.hashes, live.prompt_tokens - late)

    def end_chunk(self, live: Live) -> None:
        """The prompt goes on in another pass, or in another request of its own."""
        if live.table is None:
            return
        if self.parts_are_requests:
            live.prompt_hashes(self._limits.block_tokens)
        if live.hashes:
            self.publish(live, live.hashes, live.position)
        if self.parts_are_requests:
            live.in_parts = True
            self.pool.release(live.table, part=True)
            live.table = None

    def undo(self, step: Step) -> None:
        """The pass of `step` failed, and its request is as it was before (the first group of layers)."""
        live = step.live
        live.layers = None
        if step.first and live.table is not None:
            self.pool.release(live.table, part=live.in_parts)
            live.table = None
