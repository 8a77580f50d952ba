"""KV blocks: chain hashes, allocation, prefix reuse, eviction. Accounting only, no tensors.

A block holds `block_tokens` consecutive tokens of one request. A full block is named by a chain hash: the
hash of its tokens and of the block before it, so equal hashes mean equal prefixes. Full blocks whose last
holder is gone stay reusable in least-recently-used order until their memory is needed; a block that any
retained request (a session) ever held goes after all others.

Adapters that own tensors index them by the block numbers given out here; the simulated engine uses the same
accounting with no tensors behind it.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from engines.types import BlocksRemoved, BlocksStored, KvEvent


def chain_hashes(token_ids: Sequence[int], block_tokens: int) -> tuple[int, ...]:
    """64-bit chain hash of every full block of `token_ids`, first to last."""
    hashes: list[int] = []
    parent = 0
    pack = struct.Struct(f"<Q{block_tokens}I").pack
    for start in range(0, len(token_ids) - block_tokens + 1, block_tokens):
        digest = blake2b(pack(parent, *token_ids[start : start + block_tokens]), digest_size=8).digest()
        parent = int.from_bytes(digest, "little")
        hashes.append(parent)
    return tuple(hashes)


class OutOfBlocks(Exception):  # noqa: N818 - a capacity outcome, handled by the caller
    """No free or evictable block is left."""


@dataclass(slots=True)
class BlockTable:
    """The blocks of one request, in token order. The first `reused` tokens came from the cache."""

    blocks: list[int] = field(default_factory=list)
    reused_tokens: int = 0
    retain: bool = False


class BlockPool:
    """Allocates `blocks_total` blocks of `block_tokens` tokens. Not thread-safe."""

    def __init__(self, blocks_total: int, block_tokens: int) -> None:
        if blocks_total < 1 or block_tokens < 1:
            raise ValueError("blocks_total and block_tokens must be at least 1")
        self.blocks_total = blocks_total
        self.block_tokens = block_tokens
        self._free = list(range(blocks_total - 1, -1, -1))
        self._refs = [0] * blocks_total
        self._hash_of: dict[int, int] = {}  # block -> chain hash, full and published blocks only
        self._block_of: dict[int, int] = {}  # chain hash -> block
        self._retained: set[int] = set()  # blocks to evict last
        self._idle: tuple[OrderedDict[int, None], OrderedDict[int, None]] = (OrderedDict(), OrderedDict())
        self._events: list[KvEvent] = []

    @property
    def blocks_free(self) -> int:
        return len(self._free)

    @property
    def blocks_cached(self) -> int:
        return len(self._idle[0]) + len(self._idle[1])

    def lookup(self, hashes: Sequence[int]) -> int:
        """How many leading blocks of `hashes` could be reused now."""
        count = 0
        for value in hashes:
            if value not in self._block_of:
                break
            count += 1
        return count

    def acquire(self, hashes: Sequence[int], tokens_max: int, *, retain: bool = False) -> BlockTable:
        """Start a table with the cached leading blocks of `hashes`, at most `tokens_max` tokens of them."""
        table = BlockTable(retain=retain)
        for value in hashes[: max(0, tokens_max) // self.block_tokens]:
            block = self._block_of.get(value)
            if block is None:
                break
            self._hold(block)
            table.blocks.append(block)
        table.reused_tokens = len(table.blocks) * self.block_tokens
        return table

    def extend(self, table: BlockTable, tokens: int) -> None:
        """Grow `table` to hold `tokens` tokens. All or nothing; raises OutOfBlocks."""
        missing = -(-tokens // self.block_tokens) - len(table.blocks)
        if missing > self.blocks_free + self.blocks_cached:
            raise OutOfBlocks(f"{missing} blocks needed, {self.blocks_free + self.blocks_cached} to be had")
        for _ in range(missing):
            block = self._free.pop() if self._free else self._evict()
            self._refs[block] = 1
            table.blocks.append(block)

    def publish(self, table: BlockTable, hashes: Sequence[int]) -> None:
        """Make the leading full blocks of `table` reusable under `hashes` (those not yet known)."""
        stored: list[int] = []
        for block, value in zip(table.blocks, hashes, strict=False):
            if value not in self._block_of and block not in self._hash_of:
                self._hash_of[block] = value
                self._block_of[value] = block
                stored.append(value)
        if stored:
            self._events.append(BlocksStored(tuple(stored)))

    def release(self, table: BlockTable) -> None:
        """Give the blocks of `table` back; published ones stay reusable. Tail blocks are evicted first."""
        for block in reversed(table.blocks):
            if table.retain:
                self._retained.add(block)
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if block in self._hash_of:
                    self._idle[block in self._retained][block] = None
                else:
                    self._retained.discard(block)
                    self._free.append(block)
        table.blocks.clear()

    def take_events(self) -> tuple[KvEvent, ...]:
        events, self._events = tuple(self._events), []
        return events

    def check(self) -> None:
        """Raise AssertionError when a block is lost or counted twice (tests and debug runs)."""
        held = sum(1 for refs in self._refs if refs > 0)
        idle = [*self._idle[0], *self._idle[1]]
        assert held + self.blocks_free + self.blocks_cached == self.blocks_total
        assert len({*self._free, *idle}) == len(self._free) + len(idle)
        assert all(self._refs[block] == 0 for block in (*self._free, *idle))
        assert all(block in self._hash_of for block in idle)
        assert not self._hash_of.keys() & set(self._free)
        assert not self._retained & set(self._free)
        assert {v: k for k, v in self._hash_of.items()} == self._block_of

    def _hold(self, block: int) -> None:
        if self._refs[block] == 0:
            for idle in self._idle:
                idle.pop(block, None)
        self._refs[block] += 1

    def _evict(self) -> int:
        block, _ = (self._idle[0] or self._idle[1]).popitem(last=False)
        self._retained.discard(block)
        value = self._hash_of.pop(block)
        del self._block_of[value]
        self._events.append(BlocksRemoved((value,)))
        return block
