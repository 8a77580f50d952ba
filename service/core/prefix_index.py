"""Which prompt blocks are cached on which instance, as told by KV events.

The index is a belief: the engine decides at the moment of the pass and reports what it really reused, and a
request that reached less than planned is simply planned again.
"""

from __future__ import annotations

from collections.abc import Sequence

from engines.types import BlocksStored, KvEvent


class PrefixIndex:
    """Chain hashes of the reusable blocks of one instance."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._hashes: set[int] = set()

    def __len__(self) -> int:
        return len(self._hashes)

    def apply(self, events: Sequence[KvEvent]) -> None:
        for event in events:
            if isinstance(event, BlocksStored):
                self._hashes.update(event.block_hashes)
            else:
                self._hashes.difference_update(event.block_hashes)

    def cached_tokens(self, block_hashes: Sequence[int], prompt_tokens: int) -> int:
        """Leading prompt tokens with KV here; at least one token is always left to compute."""
        blocks_max = max(0, prompt_tokens - 1) // self._block_tokens
        count = 0
        for value in block_hashes[:blocks_max]:
            if value not in self._hashes:
                break
            count += 1
        return count * self._block_tokens
