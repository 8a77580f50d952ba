"""The last known state of a fleet, kept up by following the store. Reads come from here and never wait.

One task reads everything once and then follows from that revision. When the connection breaks it resumes
after the last revision it has, so nothing is left out; when those changes are no longer kept (compaction), or
the store went back in time (restored from a backup), it reads everything again. Each record is decoded once.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import aclosing
from dataclasses import replace

from service.fleet.clock import Clock, Signal, sleep
from service.fleet.membership import (
    Assignment,
    FleetSnapshot,
    Leader,
    Member,
    MembershipRefused,
    MembershipUnavailable,
    Move,
    RetiredShard,
)
from service.fleet.records import Keys, Record, decode
from service.fleet.store import Batch, Compacted, Entry, Store

_log = logging.getLogger(__name__)


class Backoff:
    """Waits that double up to a bound, each shortened by up to half so that a fleet does not come at once."""

    def __init__(self, first_s: float = 0.05, most_s: float = 2.0, seed: int | None = None) -> None:
        self._first_s, self._most_s = first_s, most_s
        self._next_s = first_s
        self._random = random.Random(seed)

    def next_s(self) -> float:
        wait_s, self._next_s = self._next_s, min(self._most_s, self._next_s * 2.0)
        return wait_s * self._random.uniform(0.5, 1.0)

    def reset(self) -> None:
        self._next_s = self._first_s


class Mirror:
    """stale_after_s: without a sign of life for so long, snapshots are marked stale."""

    def __init__(self, store: Store, keys: Keys, clock: Clock, stale_after_s: float) -> None:
        self._store, self._keys, self._clock = store, keys, clock
        self._stale_after_s = stale_after_s
        self._entries: dict[str, Entry] = {}
        self._records: dict[str, Record] = {}
        self._unreadable: set[str] = set()
        self._cached: FleetSnapshot | None = None
        self._heard_s: float | None = None  # the last sign of life
        self._broken = True  # no stream at present
        self._moved = Signal()  # set and replaced at every change
        self._moved_keys: dict[str, Signal] = {}  # the same, of one key each, where somebody asked
        self._task: asyncio.Task[None] | None = None
        self.revision = 0
        self.error: Exception | None = None  # why it is broken
        self.resumes = 0  # how often following began anew
        self.fresh_reads = 0
        self.closed = False

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="membership mirror")

    async def close(self) -> None:
        self.closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._announce()

    # --- reads --------------------------------------------------------------------------------------------

    def entry(self, key: str) -> Entry | None:
        return self._entries.get(key)

    def record(self, key: str) -> Record | None:
        return self._records.get(key)

    @property
    def stale(self) -> bool:
        """No stream, or nothing heard on it lately."""
        heard_s = self._heard_s
        return self._broken or heard_s is None or self._clock.now_s() - heard_s > self._stale_after_s

    def snapshot(self) -> FleetSnapshot:
        if self._cached is None:
            self._cached = self._build()
        stale = self.stale
        heard_s = self._clock.now_s() if self._heard_s is None else self._heard_s
        age_s = max(0.0, self._clock.now_s() - heard_s) if stale else 0.0
        return replace(self._cached, stale=True, age_s=age_s) if stale else self._cached

    def _build(self) -> FleetSnapshot:
        members: dict[str, Member] = {}
        assignments: dict[str, Assignment] = {}
        leaders: dict[str, Leader] = {}
        moves: list[Move] = []
        retired: dict[str, RetiredShard] = {}
        for record in self._records.values():
            match record:
                case Member():
                    members[record.member_id] = record
                case Assignment():
                    assignments[record.worker_id] = record
                case Leader():
                    leaders[record.election] = record
                case Move():
                    moves.append(record)
                case RetiredShard():
                    retired[record.name] = record
        moves.sort(key=lambda move: -move.number)
        unreadable = tuple(sorted(self._unreadable))
        return FleetSnapshot(self.revision, members, assignments, leaders, tuple(moves), retired, unreadable)

    # --- waiting ------------------------------------------------------------------------------------------

    def moved(self, key: str = "") -> Signal:
        """Set at the next change (of the key), or change of staleness. Take it before looking, wait after."""
        return self._moved_keys.setdefault(key, Signal()) if key else self._moved

    async def reach(self, revision: int, seconds: float) -> bool:
        """Until the state is at least at this revision; false if that takes longer."""
        end_s = self._clock.now_s() + seconds
        while self.revision < revision and not self.closed:
            seen = self._moved
            left_s = end_s - self._clock.now_s()
            if left_s <= 0.0 or not await seen.wait(self._clock, left_s):
                return self.revision >= revision
        return self.revision >= revision

    async def snapshots(self) -> AsyncIterator[FleetSnapshot]:
        """The snapshot now, then one at every change, the newest only; also when it turns stale or fresh."""
        last: tuple[int, int, bool] | None = None
        while not self.closed:
            seen = self._moved
            state = (self.fresh_reads, self.revision, self.stale)
            if state != last:
                last = state
                yield self.snapshot()
                continue
            await seen.wait(self._clock, self._stale_after_s / 2.0)

    def _announce(self, keys: Iterable[str] | None = None) -> None:
        """keys None: anything may have changed."""
        moved, self._moved = self._moved, Signal()
        moved.set()
        for key in list(self._moved_keys) if keys is None else keys:
            signal = self._moved_keys.pop(key, None)
            if signal is not None:
                signal.set()

    # --- following ----------------------------------------------------------------------------------------

    async def _run(self) -> None:
        backoff = Backoff()
        fresh = True
        while True:
            try:
                if fresh:
                    self._replace(*await self._store.read(self._keys.prefix))
                    fresh = False
                self.resumes += 1
                async with aclosing(self._store.follow(self._keys.prefix, self.revision)) as batches:
                    async for batch in batches:
                        backoff.reset()
                        self._take(batch)
            except Compacted as error:
                _log.info("membership: reading afresh: %s", error)
                fresh = True
                await sleep(self._clock, backoff.next_s())
            except (MembershipUnavailable, MembershipRefused) as error:
                self._lose(error)
                await sleep(self._clock, backoff.next_s())
            except Exception as error:  # a defect: served on from the last known state, and read afresh
                _log.exception("membership: following failed")
                self._lose(error)
                fresh = True
                await sleep(self._clock, backoff.next_s())

    def _lose(self, error: Exception) -> None:
        if not self._broken or self.error is None:
            _log.warning("membership: last known state only: %s", error)
        self._broken, self.error = True, error
        self._announce()

    def _alive(self) -> bool:
        """Note a sign of life; whether that ended a stale time."""
        was_stale = self.stale
        self._heard_s = self._clock.now_s()
        if self._broken and self.error is not None:
            _log.warning("membership: in touch again")
        self._broken, self.error = False, None
        return was_stale

    def _replace(self, revision: int, entries: Mapping[str, Entry]) -> None:
        self._entries, self._records = {}, {}
        self._unreadable.clear()
        for key, entry in entries.items():
            self._set(key, entry)
        self.revision = revision
        self.fresh_reads += 1
        self._cached = None
        self._alive()
        self._announce()

    def _take(self, batch: Batch) -> None:
        announce = self._alive()
        for key, entry in batch.changes:
            self._set(key, entry)
        if batch.changes:
            self.revision = max(self.revision, batch.revision)
            self._cached = None
        if announce:
            self._announce()
        elif batch.changes:
            self._announce(key for key, _ in batch.changes)

    def _set(self, key: str, entry: Entry | None) -> None:
        self._unreadable.discard(key)
        self._records.pop(key, None)
        if entry is None:
            self._entries.pop(key, None)
            return
        self._entries[key] = entry
        try:
            self._records[key] = decode(*self._keys.split(key), entry)
        except ValueError as error:
            self._unreadable.add(key)
            _log.warning("membership: unreadable %s: %s", key, error)
