"""What an engine knows of the blocks of its executor: which prefixes are cached, and which a request holds.

An executor names blocks by hashes of its own. It tells them with their tokens and their parent, so each gets
our chain hash (`engines.blocks`), and from then on a prompt can be looked up before it is sent.

Two sources feed the ledger. Events are the truth, but may come late, be lost, or not exist. So a call that
ends is a source too: the blocks that it computed or found are taken as cached, except those of which an event
spoke after the call was sent.

Held blocks are counted by content: two requests that hold the same prefix share its blocks. What they share
with nobody, a last block that is not full or generated tokens, they hold on top.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from engines.blocks import chain_hash
from engines.executor.types import CacheRemoved, CacheStored
from engines.types import BlocksRemoved, BlocksStored, KvEvent

_MEMORY = 4  # times the pool: hashes that are remembered beyond what can be cached


class Ledger:
    """Our chain hashes of what an executor of `blocks_total` blocks has cached. Not thread-safe."""

    def __init__(self, blocks_total: int, block_tokens: int) -> None:
        self.blocks_total = blocks_total
        self.block_tokens = block_tokens
        self._cached: dict[int, None] = {}  # our hashes, least recently used first
        self._ours: dict[int, int] = {}  # the executor's hash -> ours
        self._names: Counter[int] = Counter()  # ours -> how many of the executor's stand for it
        self._holders: Counter[int] = Counter()  # ours -> requests that hold it
        self._held_cached = 0  # hashes that are both
        self._private = 0  # blocks that a request holds alone
        self._heard: dict[int, int] = {}  # ours -> when an event spoke of it last, oldest first
        self._now = 0  # counts events
        self._events: list[KvEvent] = []

    # --- what it says ---

    @property
    def blocks_held(self) -> int:
        return min(self.blocks_total, len(self._holders) + self._private)

    @property
    def blocks_cached(self) -> int:
        """Reusable and held by nobody. Late events can't make it more than there is room for."""
        return min(len(self._cached) - self._held_cached, self.blocks_total - self.blocks_held)

    @property
    def blocks_free(self) -> int:
        return self.blocks_total - self.blocks_held - self.blocks_cached

    def lookup(self, hashes: Iterable[int]) -> int:
        """How many leading blocks of `hashes` are cached."""
        count = 0
        for value in hashes:
            if value not in self._cached:
                break
            count += 1
        return count

    def is_there(self, value: int) -> bool:
        """Whether a block of this name exists, cached or held by a request."""
        return value in self._cached or value in self._holders

    def take_events(self) -> tuple[KvEvent, ...]:
        events, self._events = tuple(self._events), []
        return events

    # --- what the executor says ---

    def stored(self, event: CacheStored) -> bool:
        """Blocks became reusable. False where they follow a block that is not known: they have no name."""
        parent = 0 if event.parent is None else self._ours.get(event.parent)
        if parent is None:
            return False
        added: list[int] = []
        for theirs, tokens in event.blocks:
            if len(tokens) != self.block_tokens:
                break  # a block that is not full is never reused here, and nothing can follow it
            ours = self._ours.get(theirs)
            if ours is None:
                ours = chain_hash(parent, tokens)
                self._ours[theirs] = ours
                self._names[ours] += 1
            self._heard_of(ours)
            added.append(ours)
            parent = ours
        self._add(added)
        self._bound_names()
        return True

    def removed(self, event: CacheRemoved) -> None:
        """Unknown hashes are of blocks that were never named, or gone with a gap: left out."""
        gone: list[int] = []
        for theirs in event.hashes:
            ours = self._ours.pop(theirs, None)
            if ours is None:
                continue
            self._heard_of(ours)
            self._names[ours] -= 1
            if not self._names[ours]:
                del self._names[ours]
                gone.append(ours)
        self.drop(gone)

    def clear(self, *, names: bool = True) -> None:
        """Nothing is cached as far as is known: the executor is gone, or events were lost.

        names: what its hashes stand for is void too; after a mere gap they still mean the same.
        """
        if names:
            self._ours.clear()
            self._names.clear()
        self._heard.clear()
        self.drop(list(self._cached))

    # --- what calls leave ---

    def mark(self) -> int:
        """Now, in events: for `settle`, of a call that is about to be sent."""
        return self._now

    def settle(self, mark: int, hashes: Sequence[int]) -> None:
        """A call sent at `mark` has ended and left these blocks. They are cached, events permitting."""
        left = [value for value in hashes if self._heard.get(value, 0) <= mark]
        added: list[int] = []
        for value in left:
            if value in self._cached:
                del self._cached[value]
                self._held_cached -= value in self._holders
            else:
                added.append(value)
        for value in reversed(left):  # the tail of a prefix goes first
            self._cached[value] = None
            self._held_cached += value in self._holders
        if added:
            self._events.append(BlocksStored(tuple(added)))
        self._forget_oldest()

    def drop(self, hashes: Iterable[int]) -> None:
        """These are cached no more."""
        gone = [value for value in hashes if value in self._cached]
        for value in gone:
            del self._cached[value]
            self._held_cached -= value in self._holders
        if gone:
            self._events.append(BlocksRemoved(tuple(gone)))

    def _forget_oldest(self) -> None:
        """No more names than blocks, least recently used first: an executor may not tell what it evicts.
        After its events this finds nothing to do."""
        excess = len(self._cached) - self.blocks_total
        if excess > 0:
            idle = [value for value in self._cached if value not in self._holders]
            self.drop(idle[:excess])

    # --- what requests hold ---

    def hold(self, hashes: Iterable[int], private: int = 0) -> None:
        """A request holds its full blocks of these names, and `private` others."""
        for value in hashes:
            if value not in self._holders and value in self._cached:
                self._held_cached += 1
            self._holders[value] += 1
        self._private += private

    def let_go(self, hashes: Iterable[int], private: int = 0) -> None:
        for value in hashes:
            self._holders[value] -= 1
            if not self._holders[value]:
                del self._holders[value]
                self._held_cached -= value in self._cached
        self._private -= private

    def check(self) -> None:
        """Raise AssertionError when the accounts don't add up (tests)."""
        assert self._private >= 0
        assert all(count > 0 for count in (*self._holders.values(), *self._names.values()))
        assert self._held_cached == len(self._cached.keys() & self._holders.keys())
        assert Counter(self._ours.values()) == self._names
        assert self.blocks_held + self.blocks_cached + self.blocks_free == self.blocks_total
        assert min(self.blocks_held, self.blocks_cached, self.blocks_free) >= 0

    def _add(self, hashes: Iterable[int]) -> None:
        added: list[int] = []
        for value in hashes:
            if value not in self._cached:
                self._cached[value] = None
                self._held_cached += value in self._holders
                added.append(value)
        if added:
            self._events.append(BlocksStored(tuple(added)))

    def _heard_of(self, ours: int) -> None:
        self._now += 1
        self._heard.pop(ours, None)
        self._heard[ours] = self._now
        if len(self._heard) > _MEMORY * self.blocks_total:
            del self._heard[next(iter(self._heard))]

    def _bound_names(self) -> None:
        """Names whose removal was lost would pile up."""
        while len(self._ours) > _MEMORY * self.blocks_total:
            ours = self._ours.pop(next(iter(self._ours)))
            self._names[ours] -= 1
            if not self._names[ours]:
                del self._names[ours]
