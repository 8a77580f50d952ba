"""A gateway's own idea of what is cached where: the prompts that it has sent to each instance.

It sees no events of the engines, so it takes for cached what was long evicted, and cuts itself back, least
recently used first. Chain hashes make a set per instance a tree: a block's hash names all that lies before
it. A path is touched from its end to its start, so a leaf always goes before its parent and every
instance's set stays closed under prefixes. So the longest match of a prompt is found by bisection.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class PrefixTree:
    """Blocks by instance, each in the order of its last use."""

    def __init__(self) -> None:
        self._blocks: dict[str, dict[int, None]] = {}

    def join(self, instance_id: str) -> None:
        self._blocks.setdefault(instance_id, {})

    def leave(self, instance_id: str) -> None:
        self._blocks.pop(instance_id, None)

    def size(self, instance_id: str) -> int:
        """Blocks that the instance is thought to hold."""
        return len(self._blocks[instance_id])

    def insert(self, instance_id: str, hashes: Sequence[int]) -> None:
        """The prompt with these blocks went to the instance."""
        blocks = self._blocks[instance_id]
        for value in reversed(hashes):
            blocks.pop(value, None)
            blocks[value] = None

    def match(self, hashes: Sequence[int]) -> tuple[int, list[str]]:
        """The longest match in blocks, and the instances that have it; (0, []) for none."""
        longest = 0
        owners: list[str] = []
        for instance_id, blocks in self._blocks.items():
            held = _held(blocks, hashes)
            if held > longest:
                longest, owners = held, []
            if held and held == longest:
                owners.append(instance_id)
        return longest, owners

    def evict(self, blocks_max: int) -> None:
        """Cut every instance back to `blocks_max`, what was used longest ago first."""
        for blocks in self._blocks.values():
            for value in list(blocks)[: max(0, len(blocks) - blocks_max)]:
                del blocks[value]


def _held(blocks: dict[int, None], hashes: Sequence[int]) -> int:
    """How many leading `hashes` are in `blocks`."""
    if not hashes or hashes[0] not in blocks:
        return 0
    return bisect_left(hashes, True, key=lambda value: value not in blocks)
