"""KV blocks promised to requests on one instance.

A request reserves blocks for all tokens that it may come to hold before its first pass, so a running request
can never be without memory. Sharing through the prefix cache is not credited: the promise stays safe when
shared blocks part ways.
"""

from __future__ import annotations


class KvBudget:
    def __init__(self, blocks_total: int, block_tokens: int) -> None:
        self.blocks_total = blocks_total
        self.block_tokens = block_tokens
        self._held: dict[str, int] = {}
        self.blocks_reserved = 0

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def holds(self, request_id: str) -> bool:
        return request_id in self._held

    @property
    def blocks_free(self) -> int:
        return self.blocks_total - self.blocks_reserved

    def fits(self, tokens: int, blocks_pending: int = 0) -> bool:
        """Whether `tokens` more can be promised, beside `blocks_pending` about to be."""
        return self.blocks_for(tokens) + blocks_pending <= self.blocks_free

    def reserve(self, request_id: str, tokens: int) -> None:
        """Promise blocks, unless the request holds some already. Raises ValueError beyond the total."""
        if request_id in self._held:
            return
        blocks = self.blocks_for(tokens)
        if self.blocks_reserved + blocks > self.blocks_total:
            raise ValueError(f"KV budget exceeded by {request_id}: ask fits() first")
        self._held[request_id] = blocks
        self.blocks_reserved += blocks

    def release(self, request_id: str) -> None:
        self.blocks_reserved -= self._held.pop(request_id, 0)
