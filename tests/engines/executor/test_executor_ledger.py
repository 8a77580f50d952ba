"""The ledger against a pool that evicts: honest events tell it all, answers correct what they do not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engines.blocks import chain_hash, chain_hashes
from engines.executor.ledger import Ledger
from engines.executor.types import CacheRemoved, CacheStored
from engines.types import BlocksStored

BLOCK, TOTAL = 4, 8


def prompt(blocks: int, family: int = 0) -> tuple[int, ...]:
    return tuple(family * 1000 + place for place in range(blocks * BLOCK))


def theirs(family: int, index: int) -> int:
    """The executor's hash of a block: nothing like ours."""
    return -1 - (family * 100 + index)


def stored(family: int, start: int, blocks: int) -> CacheStored:
    tokens = prompt(start + blocks, family)
    told = tuple(
        (theirs(family, i), tokens[i * BLOCK : (i + 1) * BLOCK]) for i in range(start, start + blocks)
    )
    return CacheStored(theirs(family, start - 1) if start else None, told)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 9))
def test_chain_hashes_are_made_one_by_one_as_well(tokens: list[int], block: int) -> None:
    parent = 0
    for index, value in enumerate(chain_hashes(tokens, block)):
        parent = chain_hash(parent, tokens[index * block : (index + 1) * block])
        assert parent == value


class Cached:
    """Prefixes of three families, as an executor that evicts the tail of one at a time has them."""

    def __init__(self) -> None:
        self.depth = [0, 0, 0]

    def event(self, family: int, blocks: int) -> CacheStored | CacheRemoved:
        """Grow a prefix to `blocks`, or cut it there."""
        have, self.depth[family] = self.depth[family], blocks
        if blocks > have:
            return stored(family, have, blocks - have)
        return CacheRemoved(tuple(theirs(family, index) for index in reversed(range(blocks, have))))


CHANGES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=30)


@given(CHANGES)
def test_events_alone_say_what_is_cached(changes: list[tuple[int, int]]) -> None:
    ledger, cached, mirror = Ledger(64, BLOCK), Cached(), set()
    for family, blocks in changes:
        event = cached.event(family, blocks)
        if isinstance(event, CacheStored):
            assert ledger.stored(event)
        else:
            ledger.removed(event)
        ledger.check()
        for change in ledger.take_events():
            if isinstance(change, BlocksStored):
                assert not mirror & set(change.block_hashes)
                mirror |= set(change.block_hashes)
            else:
                assert mirror >= set(change.block_hashes)
                mirror -= set(change.block_hashes)
        for other, depth in enumerate(cached.depth):
            assert ledger.lookup(chain_hashes(prompt(6, other), BLOCK)) == depth
        assert ledger.blocks_cached == len(mirror) == sum(cached.depth)


@given(CHANGES, CHANGES, st.integers(0, 2), st.integers(1, 5))
def test_a_call_that_ends_is_believed_but_events_are_believed_more(
    before: list[tuple[int, int]], during: list[tuple[int, int]], family: int, blocks: int
) -> None:
    ledger, cached = Ledger(64, BLOCK), Cached()

    def tell(changes: list[tuple[int, int]]) -> None:
        for which, depth in changes:
            event = cached.event(which, depth)
            if isinstance(event, CacheStored):
                ledger.stored(event)
            else:
                ledger.removed(event)

    tell(before)
    mark, known = ledger.mark(), cached.depth[family]
    tell(during)
    touched = {index for which, depth in during if which == family for index in (depth, known)}
    ledger.settle(mark, chain_hashes(prompt(blocks, family), BLOCK))
    ledger.check()
    hashes = chain_hashes(prompt(6, family), BLOCK)
    if not touched:  # no event spoke of this family
        assert ledger.lookup(hashes) == max(known, blocks)
    else:  # what an event took away after the call was sent stays away
        gone = [i for i in range(6) if ledger._heard.get(hashes[i], 0) > mark and i >= cached.depth[family]]
        assert all(ledger.lookup(hashes) <= index for index in gone)


def test_after_a_gap_a_call_that_ends_is_believed_whatever_was_heard_before() -> None:
    ledger = Ledger(TOTAL, BLOCK)
    hashes, mark = chain_hashes(prompt(3), BLOCK), ledger.mark()
    ledger.stored(stored(0, 0, 3))
    ledger.clear(names=False)
    ledger.settle(mark, hashes)
    assert ledger.lookup(hashes) == 3


def test_blocks_after_an_unknown_one_have_no_name() -> None:
    ledger = Ledger(TOTAL, BLOCK)
    assert not ledger.stored(stored(0, 2, 1))
    ledger.removed(CacheRemoved((theirs(0, 2),)))
    assert ledger.blocks_cached == 0
    assert ledger.take_events() == ()


def test_after_a_gap_names_still_mean_the_same() -> None:
    ledger = Ledger(TOTAL, BLOCK)
    ledger.stored(stored(0, 0, 2))
    ledger.clear(names=False)
    assert ledger.blocks_cached == 0
    assert ledger.stored(stored(0, 2, 1))
    assert ledger.blocks_cached == 1
    assert ledger.lookup(chain_hashes(prompt(3), BLOCK)) == 0  # what is before it is not known


def test_a_block_that_is_not_full_is_nothing() -> None:
    ledger = Ledger(TOTAL, BLOCK)
    assert ledger.stored(CacheStored(None, ((5, (1, 2, 3)),)))
    assert ledger.blocks_cached == 0


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 3)), max_size=6),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), max_size=6),
)
def test_held_cached_and_free_are_the_pool(
    holds: list[tuple[int, int, int]], ends: list[tuple[int, int]]
) -> None:
    """Also where more is held and cached than there is, as late events may make it seem."""
    ledger = Ledger(TOTAL, BLOCK)
    held: list[tuple[tuple[int, ...], int]] = []
    for family, blocks, private in holds:
        held.append((chain_hashes(prompt(blocks, family), BLOCK), private))
        ledger.hold(*held[-1])
        ledger.check()
    for family, blocks in ends:
        ledger.settle(ledger.mark(), chain_hashes(prompt(blocks, family), BLOCK))
        ledger.check()
    for hashes, private in held:
        ledger.let_go(hashes, private)
        ledger.check()
    assert ledger.blocks_held == 0
    ledger.settle(ledger.mark(), ())
    assert ledger.blocks_cached <= TOTAL


def test_what_is_shared_is_held_once() -> None:
    ledger = Ledger(TOTAL, BLOCK)
    hashes = chain_hashes(prompt(3), BLOCK)
    ledger.settle(ledger.mark(), hashes)
    ledger.hold(hashes, 1)
    ledger.hold(hashes[:2], 1)
    assert (ledger.blocks_held, ledger.blocks_cached) == (5, 0)
    ledger.let_go(hashes, 1)
    assert (ledger.blocks_held, ledger.blocks_cached) == (3, 1)


def test_without_events_the_least_recently_used_goes_and_its_tail_first() -> None:
    ledger = Ledger(TOTAL, BLOCK)
    old, new, last = (chain_hashes(prompt(blocks, which), BLOCK) for which, blocks in enumerate((4, 4, 2)))
    for hashes in (new, old, new, last):  # `new` is used again
        ledger.settle(ledger.mark(), hashes)
        ledger.check()
    assert [ledger.lookup(hashes) for hashes in (old, new, last)] == [2, 4, 2]


def test_names_whose_removal_was_lost_do_not_pile_up() -> None:
    ledger = Ledger(TOTAL, BLOCK)
    for family in range(40 * TOTAL):
        ledger.stored(stored(family, 0, 1))
        ledger.clear(names=False)
    assert max(len(ledger._ours), len(ledger._heard)) <= 4 * TOTAL
    ledger.check()
