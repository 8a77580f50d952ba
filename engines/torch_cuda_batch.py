"""How requests are packed into one row of tokens for the torch engine: plain integer arrays, no torch.

A pass is one row of T new tokens, request after request. K and V lie in a pool of slots, one token each. A
new token writes its slot; a request reads its history and its new tokens, in the order of their positions,
as one run of K rows. Where no request has a history the new K and V are used as they are; where the rows lie
one after the other in the pool they are read in place; otherwise they are gathered.

Behind the slots of the blocks lies a scratch area. What pads a pass to its class is one more request that
writes and reads there, so it never meets the KV of a real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Piece:
    """One request's part of a pass.

    token_ids: the new tokens. blocks: of the request, from its first token on, with room for the new tokens.
    history: tokens before the new ones. logits: whether the last new token wants them.
    """

    token_ids: Sequence[int]
    blocks: Sequence[int]
    history: int
    logits: bool


@dataclass(frozen=True, slots=True)
class Slots:
    """The pool: `blocks` blocks of `block_tokens` slots, then `scratch` slots."""

    blocks: int
    block_tokens: int
    scratch: int

    @property
    def scratch_start(self) -> int:
        return self.blocks * self.block_tokens

    @property
    def total(self) -> int:
        return self.scratch_start + self.scratch

    def of(self, blocks: Sequence[int], start: int, stop: int) -> Ints:
        """Slots of the tokens `start` to `stop` of a request that holds `blocks`."""
        index = np.arange(start, stop, dtype=np.int64)
        table = np.asarray(blocks, dtype=np.int64)
        slots: Ints = table[index // self.block_tokens] * self.block_tokens + index % self.block_tokens
        return slots


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The inputs of one forward.

    token_ids, positions, writes: [T]. reads: [K] slots in the order of the requests; a pair (start, stop) of
    slots that lie in one run; None where there is no history and K = T. q_lens, k_lens: new tokens, and
    tokens attended to, of each request (the padding is the last one). last: rows of T that want logits.
    """

    token_ids: Ints
    positions: Ints
    writes: Ints
    reads: Ints | tuple[int, int] | None
    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    last: Ints

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    def kept(self, requests: Sequence[int]) -> tuple[PackedBatch, Ints]:
        """The batch of some of its requests, by number, and which of the T rows those are."""
        q_ends, k_ends = np.cumsum(self.q_lens), np.cumsum(self.k_lens)
        rows = np.concatenate([np.arange(q_ends[i] - self.q_lens[i], q_ends[i]) for i in requests])
        reads: Ints | tuple[int, int] | None = None
        if self.reads is not None:
            held = np.arange(*self.reads) if isinstance(self.reads, tuple) else self.reads
            reads = np.concatenate([held[k_ends[i] - self.k_lens[i] : k_ends[i]] for i in requests])
        where = {int(row): number for number, row in enumerate(rows)}
        last = np.asarray([where[int(row)] for row in self.last if int(row) in where], dtype=np.int64)
        batch = PackedBatch(
            self.token_ids[rows],
            self.positions[rows],
            self.writes[rows],
            reads,
            tuple(self.q_lens[i] for i in requests),
            tuple(self.k_lens[i] for i in requests),
            last,
        )
        return batch, rows


def pack(pieces: Sequence[Piece], slots: Slots) -> PackedBatch:
    """The batch of `pieces`, without padding."""
    new = [len(piece.token_ids) for piece in pieces]
    ends = [piece.history + count for piece, count in zip(pieces, new, strict=True)]
    reads: Ints | None = None
    if any(piece.history for piece in pieces):
        reads = np.concatenate([slots.of(p.blocks, 0, end) for p, end in zip(pieces, ends, strict=True)])
    return PackedBatch(
        np.concatenate([np.asarray(piece.token_ids, dtype=np.int64) for piece in pieces]),
        np.concatenate([np.arange(p.history, end) for p, end in zip(pieces, ends, strict=True)]),
        np.concatenate([slots.of(p.blocks, p.history, end) for p, end in zip(pieces, ends, strict=True)]),
        _as_run(reads),
        tuple(new),
        tuple(ends),
        np.asarray([e - 1 for e, p in zip(np.cumsum(new), pieces, strict=True) if p.logits], dtype=np.int64),
    )


def pad(batch: PackedBatch, tokens: int, rows: int, slots: Slots) -> PackedBatch:
    """`batch` with one more request of padding, so that T is `tokens`; K rows are padded to `rows`.

    rows == tokens says that no request has a history. Rows beyond those of the padding belong to nobody.
    """
    extra = tokens - batch.tokens
    assert extra >= 0
    assert rows >= sum(batch.k_lens) + extra  # the caller chose a class that holds it
    scratch = np.arange(slots.scratch_start, slots.scratch_start + extra, dtype=np.int64)
    reads: Ints | None = None
    if rows != tokens:
        reads = np.full(rows, slots.scratch_start, dtype=np.int64)
        real = np.concatenate([read_slots(batch), scratch])
        reads[: len(real)] = real
    return PackedBatch(
        np.concatenate([batch.token_ids, np.zeros(extra, np.int64)]),
        np.concatenate([batch.positions, np.zeros(extra, np.int64)]),
        np.concatenate([batch.writes, scratch]),
        reads,
        (*batch.q_lens, extra),
        (*batch.k_lens, extra),
        batch.last,
    )


def read_slots(batch: PackedBatch) -> Ints:
    """The slots that the requests read, one by one."""
    if batch.reads is None:
        return batch.writes
    return np.arange(*batch.reads) if isinstance(batch.reads, tuple) else batch.reads


def probe_batch(sizes: Sequence[tuple[int, int]], slots: Slots, vocab: int, seed: int = 0) -> PackedBatch:
    """Made-up tokens for requests of (new, history) tokens each, to be timed.

    History is read in place from the first slots of the pool; new K and V go to the scratch area, so that
    nothing that a request holds changes. Raises ValueError where the pool is too small.
    """
    new = [count for count, _ in sizes]
    ends = [count + past for count, past in sizes]
    tokens, rows = sum(new), sum(ends)
    if tokens > slots.scratch or (rows != tokens and rows > slots.total):
        raise ValueError(
            f"{tokens} tokens over {rows - tokens} of history do not fit into {slots.scratch} scratch slots "
            f"and {slots.total} in all: raise kv_capacity_tokens or scratch_tokens"
        )
    return PackedBatch(
        np.random.default_rng(seed).integers(0, vocab, tokens),
        np.concatenate([np.arange(past, past + count) for count, past in sizes]),
        np.arange(slots.scratch_start, slots.scratch_start + tokens, dtype=np.int64),
        None if rows == tokens else (0, rows),
        tuple(new),
        tuple(ends),
        np.cumsum(new).astype(np.int64) - 1,
    )


def _as_run(reads: Ints | None) -> Ints | tuple[int, int] | None:
    if reads is not None and (np.diff(reads) == 1).all():
        return int(reads[0]), int(reads[-1]) + 1
    return reads
