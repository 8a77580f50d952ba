"""The KV blocks of a fake executor: reuse by whole blocks, eviction by priority and age, and its events.

A full block is named by a chain hash of its tokens and of the block before. A block without a holder stays
reusable until its memory is needed; then the one with the lowest priority goes, of these the least recently
used, and one that others follow only when no other is left. This is written apart from `engines.blocks` on
purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

DEFAULT_PRIORITY = 35  # of 0 to 100


def block_hashes(tokens: Sequence[int], block_tokens: int) -> list[int]:
    hashes: list[int] = []
    for end in range(block_tokens, len(tokens) + 1, block_tokens):
        parent = hashes[-1] if hashes else 0
        text = f"{parent}:{','.join(map(str, tokens[end - block_tokens : end]))}"
        hashes.append(int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1)
    return hashes


@dataclass(slots=True, eq=False)
class Block:
    hash: int | None = None  # None: private, not reusable
    parent: int | None = None
    priority: int = DEFAULT_PRIORITY
    holders: int = 1
    used_at: int = 0  # when its last holder let go


class FakePool:
    def __init__(self, blocks_total: int, block_tokens: int, event_lost_every: int = 0) -> None:
        if blocks_total < 1 or block_tokens < 1:
            raise ValueError("blocks_total and block_tokens must be at least 1")
        self.blocks_total = blocks_total
        self.block_tokens = block_tokens
        self.untouched = blocks_total  # free and not reusable
        self.leaked: list[Block] = []
        self.reused = 0
        self.missed = 0
        self.allocated = 0
        self._cached: dict[int, Block] = {}
        self._children: dict[int, int] = {}
        self._private = 0  # held, without a name
        self._tick = 0
        self._events: list[dict[str, Any]] = []
        self._event_id = 0
        self._lost_every = event_lost_every
        self._emit({"type": "created", "num_blocks_per_cache_level": [blocks_total, 0]})

    @property
    def idle(self) -> int:
        return sum(1 for block in self._cached.values() if not block.holders)

    @property
    def held(self) -> int:
        return self.blocks_total - self.untouched - self.idle

    @property
    def takeable(self) -> int:
        return self.untouched + self.idle

    def match(self, hashes: Sequence[int]) -> list[Block]:
        found: list[Block] = []
        for value in hashes:
            block = self._cached.get(value)
            if block is None:
                break
            found.append(block)
        return found

    def hold(self, blocks: Sequence[Block]) -> list[Block]:
        for block in blocks:
            block.holders += 1
        return list(blocks)

    def take(self, count: int) -> list[Block]:
        """New blocks; evicts. The caller has made sure that there are so many."""
        taken = []
        for _ in range(count):
            if not self.untouched:
                self._evict_one()
            self.untouched -= 1
            self._private += 1
            self.allocated += 1
            taken.append(Block())
        return taken

    def store(self, table: Sequence[Block], hashes: Sequence[int], tokens: Sequence[int],
              priority_of: Callable[[int], int]) -> None:  # fmt: skip
        """Name the leading blocks of `table` by `hashes`; what is known already stays as it is."""
        run: list[dict[str, Any]] = []
        run_parent: int | None = None
        for index, (block, value) in enumerate(zip(table, hashes, strict=False)):
            if block.hash is not None or value in self._cached:
                self._stored(run_parent, run)
                run = []
                continue
            parent = hashes[index - 1] if index else None
            block.hash, block.parent, block.priority = value, parent, priority_of(index)
            self._cached[value] = block
            self._private -= 1
            if parent is not None:
                self._children[parent] = self._children.get(parent, 0) + 1
            if not run:
                run_parent = parent
            run.append(self._stored_block(block, tokens, index))
        self._stored(run_parent, run)

    def release(self, table: list[Block]) -> None:
        """Give a table back; its tail is the first to be evicted later."""
        for block in reversed(table):
            block.holders -= 1
            if block.holders:
                continue
            if block.hash is None:
                self._private -= 1
                self.untouched += 1
            else:
                self._tick += 1
                block.used_at = self._tick
        table.clear()

    def leak(self, table: list[Block]) -> None:
        self.leaked += table
        table.clear()

    def evict_idle(self) -> None:
        while self.idle:
            self._evict_one()

    def priorities(self, hashes: Sequence[int]) -> list[int]:
        """Of the leading blocks of `hashes` that are cached."""
        return [block.priority for block in self.match(hashes)]

    def take_events(self) -> list[dict[str, Any]]:
        events, self._events = self._events, []
        return events

    def check(self) -> None:
        """Raise AssertionError when a block is lost or counted twice."""
        shared = sum(1 for block in self._cached.values() if block.holders)
        assert min(self._private, self.untouched) >= 0
        assert self._private + shared + self.idle + self.untouched == self.blocks_total
        assert all(block.hash == value and block.holders >= 0 for value, block in self._cached.items())

    def _evict_one(self) -> None:
        idle = [block for block in self._cached.values() if not block.holders]
        block = min(idle, key=lambda b: (self._children.get(b.hash or 0, 0) > 0, b.priority, b.used_at))
        assert block.hash is not None
        del self._cached[block.hash]
        if block.parent is not None:
            self._children[block.parent] -= 1
        self.untouched += 1
        self._emit({"type": "removed", "block_hashes": [block.hash]})

    def _stored_block(self, block: Block, tokens: Sequence[int], index: int) -> dict[str, Any]:
        size = self.block_tokens
        return {
            "type": "stored_block",
            "block_hash": block.hash,
            "tokens": [
                {"type": "unique_token", "token_id": token, "token_extra_id": 0}
                for token in tokens[index * size : (index + 1) * size]
            ],
            "cache_level": 0,
            "priority": block.priority,
        }

    def _stored(self, parent: int | None, blocks: list[dict[str, Any]]) -> None:
        if blocks:
            self._emit({"type": "stored", "parent_hash": parent, "blocks": blocks})

    def _emit(self, data: dict[str, Any]) -> None:
        event = {"event_id": self._event_id, "data": data, "window_size": 0}
        self._event_id += 1
        if self._lost_every and self._event_id % self._lost_every == 0:
            return
        self._events.append(event)
