"""KV blocks: chain hashes, allocation, prefix reuse, eviction. Accounting only, no tensors.

A block holds `block_tokens` consecutive tokens of one request. A full block is named by a chain hash: the
hash of its tokens and of the block before it, so equal hashes mean equal prefixes. Full blocks whose last
holder is gone stay reusable in least-recently-used order until their memory is needed; a block that any
retained request (a session) ever held goes after all ordinary ones, and what waits for the next part of its
prompt, on an engine that takes each part as a request of its own, goes last.

Adapters that own tensors index them by the block numbers given out here; the simulated engine uses the same
accounting with no tensors behind it.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from engines.types import BlocksRemoved, BlocksStored, KvEvent


def chain_hash(parent: int, token_ids: Sequence[int]) -> int:
    """64-bit hash of one full block after the block with hash `parent`; 0: the first of a prompt."""
    pack = struct.Struct(f"<Q{len(token_ids)}I").pack
    return int.from_bytes(blake2b(pack(parent, *token_ids), digest_size=8).digest(), "little")


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
    published: bool = False  # whether any of the blocks is


_Idle = OrderedDict[int, None]


class BlockPool:
    """Allocates `blocks_total` blocks of `block_tokens` tokens. Not thread-safe.

    Only published blocks have records of their own: a private block has one holder, its table, and moves in
    slices. Blocks that were never used are a range, so a large pool costs nothing before it is filled.
    """

    def __init__(self, blocks_total: int, block_tokens: int) -> None:
        if blocks_total < 1 or block_tokens < 1:
            raise ValueError("blocks_total and block_tokens must be at least 1")
        self.blocks_total = blocks_total
        self.block_tokens = block_tokens
        self._unused = 0  # this block and all above were never given out
        self._free: list[int] = []  # given back
        self._private = 0  # held, not published
        self._holders: dict[int, int] = {}  # published block -> tables that hold it, 0 where it is idle
        self._hash_of: dict[int, int] = {}  # published block -> chain hash
        self._block_of: dict[int, int] = {}  # chain hash -> block
        self._retained: set[int] = set()  # blocks to evict after all ordinary ones
        # Evictable, oldest first, in the order to go: ordinary, retained, between two parts of a prompt.
        self._idle = (_Idle(), _Idle(), _Idle())
        self._events: list[KvEvent] = []

    @property
    def blocks_free(self) -> int:
        return self.blocks_total - self._unused + len(self._free)

    @property
    def blocks_cached(self) -> int:
        return len(self._idle[0]) + len(self._idle[1]) + len(self._idle[2])

    def lookup(self, hashes: Iterable[int]) -> int:
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
        if not hashes or tokens_max < self.block_tokens:
            return table
        for value in hashes[: tokens_max // self.block_tokens]:
            block = self._block_of.get(value)
            if block is None:
                break
            if not self._holders[block]:
                for idle in self._idle:
                    idle.pop(block, None)
            self._holders[block] += 1
            table.blocks.append(block)
        table.published = bool(table.blocks)
        table.reused_tokens = len(table.blocks) * self.block_tokens
        return table

    def extend(self, table: BlockTable, tokens: int) -> None:
        """Grow `table` to hold `tokens` tokens. All or nothing; raises OutOfBlocks."""
        missing = -(-tokens // self.block_tokens) - len(table.blocks)
        if missing <= 0:
            return
        if missing <= len(self._free):
            table.blocks += self._free[-missing:]
            del self._free[-missing:]
        else:
            table.blocks += self._taken(missing)
        self._private += missing

    def _taken(self, missing: int) -> list[int]:
        """More blocks than were given back: unused ones, then evicted ones."""
        free = self.blocks_free
        if missing > free + self.blocks_cached:
            raise OutOfBlocks(f"{missing} blocks needed, {free + self.blocks_cached} to be had")
        fresh = min(missing - len(self._free), self.blocks_total - self._unused)
        taken = [*self._free, *range(self._unused, self._unused + fresh)]
        self._free.clear()
        self._unused += fresh
        taken += [self._evict() for _ in range(missing - len(taken))]
        return taken

    def publish(self, table: BlockTable, hashes: Sequence[int]) -> None:
        """Make the leading full blocks of `table` reusable under `hashes` (those not yet known)."""
        if not hashes:
            return
        stored: list[int] = []
        for block, value in zip(table.blocks, hashes, strict=False):
            if value not in self._block_of and block not in self._hash_of:
                self._hash_of[block] = value
                self._block_of[value] = block
                self._holders[block] = 1
                stored.append(value)
        if stored:
            table.published = True
            self._private -= len(stored)
            self._events.append(BlocksStored(tuple(stored)))

    def release(self, table: BlockTable, *, part: bool = False) -> None:
        """Give the blocks of `table` back; published ones stay reusable. Tail blocks are evicted first.

        part: the prompt goes on in another pass, so what is published of it is evicted after all else.
        """
        blocks = table.blocks
        private = blocks[::-1]
        if table.published:
            private = [block for block in private if block not in self._hash_of]
            shared = (block for block in reversed(blocks) if block in self._hash_of)
            self._let_go(shared, table.retain, part)
        self._free += private
        self._private -= len(private)
        table.blocks, table.published = [], False

    def _let_go(self, shared: Iterable[int], retain: bool, part: bool) -> None:
        if retain:
            shared = list(shared)
            self._retained.update(shared)
        for block in shared:
            self._holders[block] -= 1
            if not self._holders[block]:
                self._idle[2 if part else block in self._retained][block] = None

    def end_part(self, hashes: Iterable[int]) -> None:
        """The prompt that these blocks were kept for does not go on: they are evicted as any other."""
        for value in hashes:
            block = self._block_of.get(value)
            if block is not None and block in self._idle[2]:
                del self._idle[2][block]
                self._idle[block in self._retained][block] = None

    def take_events(self) -> tuple[KvEvent, ...]:
        if not self._events:
            return ()
        events, self._events = tuple(self._events), []
        return events

    def check(self) -> None:
        """Raise AssertionError when a block is lost or counted twice (tests and debug runs)."""
        shared = sum(1 for holders in self._holders.values() if holders > 0)
        idle = [block for blocks in self._idle for block in blocks]
        assert self._private >= 0
        assert self._private + shared + self.blocks_free + self.blocks_cached == self.blocks_total
        assert len({*self._free, *idle}) == len(self._free) + len(idle)
        assert all(block < self._unused for block in (*self._free, *idle))
        assert {block for block, holders in self._holders.items() if not holders} == set(idle)
        assert self._holders.keys() == self._hash_of.keys()
        assert not self._hash_of.keys() & set(self._free)
        assert not self._retained & set(self._free)
        assert {v: k for k, v in self._hash_of.items()} == self._block_of

    def _evict(self) -> int:
        idle = self._idle[0] or self._idle[1] or self._idle[2]
        block, _ = idle.popitem(last=False)
        self._retained.discard(block)
        value = self._hash_of.pop(block)
        del self._holders[block], self._block_of[value]
        self._events.append(BlocksRemoved((value,)))
        return block
