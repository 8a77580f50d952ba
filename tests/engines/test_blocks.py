"""Laws of the block pool, against a model that keeps every block as a plain record."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from engines.blocks import BlockPool, BlockTable, OutOfBlocks, chain_hashes
from engines.types import BlocksStored

BLOCKS, BLOCK_TOKENS = 8, 4

tokens = st.integers(0, 2**32 - 1)


@given(st.lists(tokens, max_size=40), st.lists(tokens, max_size=40), st.integers(1, 9))
def test_equal_hashes_mean_equal_prefixes(first: list[int], second: list[int], block_tokens: int) -> None:
    pairs = zip(chain_hashes(first, block_tokens), chain_hashes(second, block_tokens), strict=False)
    for index, (a, b) in enumerate(pairs):
        end = (index + 1) * block_tokens
        assert (a == b) == (first[:end] == second[:end])


@given(st.lists(tokens, max_size=40), st.integers(1, 9))
def test_only_full_blocks_are_hashed_and_a_longer_prompt_keeps_its_hashes(
    ids: list[int], block_tokens: int
) -> None:
    hashes = chain_hashes(ids, block_tokens)
    assert len(hashes) == len(ids) // block_tokens
    assert chain_hashes([*ids, *range(block_tokens)], block_tokens)[: len(hashes)] == hashes


@pytest.mark.parametrize(("total", "size"), [(0, 4), (4, 0)])
def test_an_empty_pool_is_refused(total: int, size: int) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        BlockPool(total, size)


def test_a_block_that_a_session_shares_goes_last_whoever_lets_go_of_it_last() -> None:
    pool = BlockPool(2, 1)
    session = pool.acquire((), 0, retain=True)
    pool.extend(session, 1)
    pool.publish(session, (11,))
    guest = pool.acquire((11,), 1)
    other = pool.acquire((), 0)
    pool.extend(other, 1)
    pool.publish(other, (22,))
    for table in (session, guest, other):
        pool.release(table)
    pool.extend(pool.acquire((), 0), 1)
    assert pool.lookup((11,)) == 1
    assert pool.lookup((22,)) == 0


@dataclass
class ModelBlock:
    """What is known of one published block: who holds it, when it was let go, whether a session had it."""

    holders: int
    retained: bool = False
    released: int = -1
    part: bool = False  # let go between two parts of a prompt


@dataclass
class Held:
    """One table: the pool's, and for each of its blocks the published hash or None."""

    table: BlockTable
    prefix: tuple[int, ...]
    hashes: list[int | None]
    alive: bool = True


class PoolMachine(RuleBasedStateMachine):
    """The model: published hashes with their holders, and a count of private blocks."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, BLOCK_TOKENS)
        self.cache: dict[int, ModelBlock] = {}
        self.private = 0  # held blocks that are not published
        self.mirror: set[int] = set()  # what the events say is cached
        self.clock = 0

    @property
    def idle(self) -> list[int]:
        """Evictable hashes in the order in which they must go."""
        free = [(b.part, b.retained, b.released, h) for h, b in self.cache.items() if b.holders == 0]
        return [value for *_, value in sorted(free)]

    @property
    def unused(self) -> int:
        return BLOCKS - self.private - len(self.cache)

    @rule(
        target=tables,
        family=st.integers(1, 3),
        length=st.integers(0, 6),
        tokens_max=st.integers(-1, 30),
        retain=st.booleans(),
    )
    def acquire(self, family: int, length: int, tokens_max: int, retain: bool) -> Held:
        prefix = tuple(family * 100 + index for index in range(length))
        known = 0
        while known < length and prefix[known] in self.cache:
            known += 1
        assert self.pool.lookup(prefix) == known
        table = self.pool.acquire(prefix, tokens_max, retain=retain)
        reused = min(known, max(tokens_max, 0) // BLOCK_TOKENS)
        assert table.reused_tokens == reused * BLOCK_TOKENS
        assert len(table.blocks) == reused
        for value in prefix[:reused]:
            self.cache[value].holders += 1
            self.cache[value].part = False
        return Held(table, prefix, list(prefix[:reused]))

    @rule(family=st.integers(1, 3), length=st.integers(1, 6), retain=st.booleans())
    def whole_life(self, family: int, length: int, retain: bool) -> None:
        """What requests mostly do, in one step, so that the cache fills up."""
        held = self.acquire(family, length, 1000, retain)
        self.extend(held, length * BLOCK_TOKENS)
        self.publish(held, length)
        self.release(held)

    @rule(held=tables, tokens=st.integers(0, 40))
    def extend(self, held: Held, tokens: int) -> None:
        if not held.alive:
            return
        missing = max(0, -(-tokens // BLOCK_TOKENS) - len(held.hashes))
        before = list(held.table.blocks)
        if missing > self.unused + len(self.idle):
            with pytest.raises(OutOfBlocks):
                self.pool.extend(held.table, tokens)
            assert held.table.blocks == before
            return
        self.pool.extend(held.table, tokens)
        for value in self.idle[: max(0, missing - self.unused)]:
            del self.cache[value]
        self.private += missing
        held.hashes += [None] * missing
        assert held.table.blocks[: len(before)] == before
        assert len(held.table.blocks) == len(held.hashes)

    @rule(held=tables, count=st.integers(0, 6))
    def publish(self, held: Held, count: int) -> None:
        if not held.alive:
            return
        self.pool.publish(held.table, held.prefix[:count])
        for index, value in enumerate(held.prefix[: min(count, len(held.hashes))]):
            if held.hashes[index] is None and value not in self.cache:
                held.hashes[index] = value
                self.cache[value] = ModelBlock(holders=1)
                self.private -= 1

    @rule(held=consumes(tables), part=st.booleans())
    def release(self, held: Held, part: bool = False) -> None:
        self.pool.release(held.table, part=part)
        for value in reversed(held.hashes):  # the tail of a prefix is worth least: it goes first
            if value is None:
                self.private -= 1
                continue
            block = self.cache[value]
            block.holders -= 1
            block.retained |= held.table.retain
            block.released = self.clock
            block.part = part and block.holders == 0
            self.clock += 1
        held.alive = False
        self.pool.release(held.table)  # twice is harmless: the table holds nothing any more

    @rule(family=st.integers(1, 3), length=st.integers(1, 6))
    def end_part(self, family: int, length: int) -> None:
        """A prompt between two parts is given up: its blocks go with the others, as the latest of them."""
        prefix = tuple(family * 100 + index for index in range(length))
        self.pool.end_part(prefix)
        for value in prefix:
            block = self.cache.get(value)
            if block is not None and block.holders == 0 and block.part:
                block.part, block.released = False, self.clock
                self.clock += 1

    @invariant()
    def accounts_agree(self) -> None:
        self.pool.check()
        assert self.pool.blocks_cached == len(self.idle)
        assert self.pool.blocks_free == self.unused

    @invariant()
    def events_mirror_the_cache(self) -> None:
        for event in self.pool.take_events():
            if isinstance(event, BlocksStored):
                assert self.mirror.isdisjoint(event.block_hashes)
                self.mirror.update(event.block_hashes)
            else:
                assert self.mirror.issuperset(event.block_hashes)
                self.mirror.difference_update(event.block_hashes)
        assert self.mirror == set(self.cache)


def test_a_large_pool_costs_nothing_before_it_is_filled() -> None:
    pool = BlockPool(10**12, BLOCK_TOKENS)
    table = pool.acquire((), 0)
    pool.extend(table, 1000 * BLOCK_TOKENS)
    assert len(set(table.blocks)) == 1000
    pool.release(table)
    again = pool.acquire((), 0)
    pool.extend(again, 1000 * BLOCK_TOKENS)
    assert max(again.blocks) == 999  # what was given back goes out again first
    pool.check()


PoolMachine.TestCase.settings = settings(max_examples=60)
TestPool = PoolMachine.TestCase
