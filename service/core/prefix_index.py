"""Which prompt blocks are cached on which instance, as told by KV events.

One table for all instances of a scheduler: for every block hash the set of its holders, as the bits of a
number. So the instance with most of a prompt is found in one walk along the prompt, however many there are.

The index is a belief: the engine decides at the moment of the pass and reports what it really reused, and a
request that reached less than planned is simply planned again.
"""

from __future__ import annotations

from collections.abc import Sequence

from engines.types import BlocksStored, KvEvent


class PrefixTable:
    """Chain hash of a block -> its holders. Rows (instances) are bits, numbered from 0."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._rows = 0  # the bits in use

    def join(self) -> int:
        """A row of one's own: the lowest that is free."""
        row = (~self._rows & (self._rows + 1)).bit_length() - 1
        self._rows |= 1 << row
        return row

    def leave(self, row: int) -> None:
        """Forget everything of `row`; it may be given out again. Walks the whole table."""
        kept = ~(1 << row)
        self._rows &= kept
        self._holders = {value: left for value, mask in self._holders.items() if (left := mask & kept)}

    def store(self, row: int, hashes: Sequence[int]) -> int:
        """Returns how many of them are new to the row."""
        bit, holders, new = 1 << row, self._holders, 0
        for value in hashes:
            mask = holders.get(value, 0)
            if not mask & bit:
                holders[value] = mask | bit
                new += 1
        return new

    def remove(self, row: int, hashes: Sequence[int]) -> int:
        """Returns how many of them the row had."""
        bit, holders, gone = 1 << row, self._holders, 0
        for value in hashes:
            mask = holders.get(value, 0)
            if mask & bit:
                gone += 1
                if mask == bit:
                    del holders[value]
                else:
                    holders[value] = mask ^ bit
        return gone

    def leading(self, row: int, hashes: Sequence[int]) -> int:
        """How many `hashes` from the first on the row holds."""
        bit, holders, count = 1 << row, self._holders, 0
        for value in hashes:
            if not holders.get(value, 0) & bit:
                break
            count += 1
        return count

    def is_held(self, value: int) -> bool:
        """Whether any row holds the block."""
        return value in self._holders

    def best_row(self, hashes: Sequence[int]) -> int | None:
        """The row that holds most of `hashes` from the first on, the lowest of equals; None: no row any."""
        mask = self._rows
        for value in hashes:
            left = mask & self._holders.get(value, 0)
            if not left:
                break
            mask = left
        if not hashes or not mask & self._holders.get(hashes[0], 0):
            return None
        return (mask & -mask).bit_length() - 1

    def leaders(self, hashes: Sequence[int], count: int) -> list[int]:
        """At most `count` of the rows that hold some of `hashes` from the first on, those with most first."""
        mask = self._holders.get(hashes[0], 0) if hashes else 0
        groups: list[int] = []  # those that end at the same block
        for value in hashes:
            left = mask & self._holders.get(value, 0)
            if left != mask:
                groups.append(mask ^ left)
                mask = left
            if not mask:
                break
        groups.append(mask)
        rows: list[int] = []
        for group in reversed(groups):
            while group and len(rows) < count:
                rows.append((group & -group).bit_length() - 1)
                group &= group - 1
        return rows


class PrefixIndex:
    """The reusable blocks of one instance: its row of `table`, or of a table of its own."""

    def __init__(self, block_tokens: int, table: PrefixTable | None = None) -> None:
        self._block_tokens = block_tokens
        self.table = table if table is not None else PrefixTable()
        self.row = self.table.join()
        self._count = 0
        self.version = 0  # changes whenever an answer may

    def __len__(self) -> int:
        return self._count

    def apply(self, events: Sequence[KvEvent]) -> None:
        self.version += 1
        for event in events:
            if isinstance(event, BlocksStored):
                self._count += self.table.store(self.row, event.block_hashes)
            else:
                self._count -= self.table.remove(self.row, event.block_hashes)

    def cached_tokens(self, block_hashes: Sequence[int], prompt_tokens: int) -> int:
        """Leading prompt tokens with KV here; at least one token is always left to compute."""
        blocks_max = max(0, prompt_tokens - 1) // self._block_tokens
        return self.table.leading(self.row, block_hashes[:blocks_max]) * self._block_tokens

    def forget(self) -> None:
        """The instance is gone."""
        self.table.leave(self.row)
        self._count = 0
        self.version += 1
