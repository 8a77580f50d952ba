"""From what an executor says of itself to reports: iteration statistics and events of the prefix cache.

Both drivers get the same things in two forms: objects of the C++ bindings, or JSON of them. Fields come and
go between releases and some are null in the wild (TensorRT-LLM issue 4666), so what can't be read is left out
and counted, never raised: a report too few is survivable, a dead reader is not.

Numbers that tell the size of the KV pool are kept aside: they say at start-up how many blocks there are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from engines.executor.types import CacheGap, CacheRemoved, CacheStored, Iteration, Report


def pick(thing: Any, name: str) -> Any:
    """A field of a mapping or an attribute of an object; None where there is none."""
    if isinstance(thing, Mapping):
        return thing.get(name)
    return getattr(thing, name, None)


def _whole(raw: Any) -> int | None:
    return int(raw) if isinstance(raw, int | float) and math.isfinite(raw) and raw >= 0 else None


class Hearing:
    """Reads one executor's statistics and events; remembers where they were.

    blocks, block_tokens: of the KV pool, as last told; None as long as nothing told. skipped: what could not
    be read since the last `take_skipped`.
    """

    def __init__(self, block_tokens: int) -> None:
        self.blocks: int | None = None
        self.block_tokens: int | None = None
        self._want_tokens = block_tokens
        self._last_event: int | None = None
        self._skipped = 0

    def take_skipped(self) -> int:
        skipped, self._skipped = self._skipped, 0
        return skipped

    def skip(self) -> None:
        self._skipped += 1

    def iterations(self, stats: Iterable[Any]) -> list[Report]:
        """stats: `IterationStats` of the bindings, or dicts or JSON text as `LLM.get_stats` gives them."""
        found: list[Report] = []
        for one in stats:
            try:
                raw = _mapping(one)
                if (report := self._iteration(raw)) is not None:
                    found.append(report)
                    continue
            except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
                pass
            self.skip()
        return found

    def _iteration(self, raw: Mapping[str, Any]) -> Iteration | None:
        number = _whole(raw.get("iter"))
        batch = raw.get("inflightBatchingStats")
        if number is None or not isinstance(batch, Mapping):
            return None
        counts = [_whole(batch.get(key)) for key in ("numContextRequests", "numCtxTokens", "numGenRequests")]
        if counts[0] is None or counts[1] is None or counts[2] is None:
            return None
        pool = raw.get("kvCacheStats")
        pool = pool if isinstance(pool, Mapping) else {}
        total = _whole(pool.get("maxNumBlocks"))
        if total:
            self.blocks = total
        self.block_tokens = _whole(pool.get("tokensPerBlock")) or self.block_tokens
        latency_ms = raw.get("iterLatencyMS")
        timed = isinstance(latency_ms, int | float) and math.isfinite(latency_ms)
        return Iteration(
            number=number,
            context_requests=counts[0],
            context_tokens=counts[1],
            generation_requests=counts[2],
            queued_requests=_whole(raw.get("numQueuedRequests")),
            active_requests=_whole(raw.get("numActiveRequests")),
            latency_s=float(latency_ms) / 1e3 if timed and latency_ms is not None else None,
            kv_blocks_total=total,
            kv_blocks_free=_whole(pool.get("freeNumBlocks")),
            kv_blocks_used=_whole(pool.get("usedNumBlocks")),
        )

    def events(self, events: Iterable[Any]) -> list[Report]:
        """events: `KVCacheEvent` of the bindings, or dicts or JSON text of `LLM.get_kv_cache_events`.

        A gap in the ids is told before the event that showed it. Blocks that are not full are left out: they
        are stored, but with partial reuse off nothing is taken from them.
        """
        found: list[Report] = []
        for one in events:
            if one is None:  # what a runtime without an event manager gives
                continue
            try:
                raw = json.loads(one) if isinstance(one, str) else one
                number = pick(raw, "event_id")
                if not isinstance(number, int):
                    raise ValueError(f"event_id is {number!r}")
                if self._last_event is not None and number > self._last_event + 1:
                    found.append(CacheGap(number - self._last_event - 1))
                self._last_event = number
                found.extend(self._changes(pick(raw, "data")))
            except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
                self.skip()
        return found

    def _changes(self, data: Any) -> list[Report]:
        if data is None:
            raise ValueError("no data")
        if (levels := pick(data, "num_blocks_per_cache_level")) is not None:
            if levels:
                self.blocks = self.blocks or int(levels[0])
            return []
        if (stored := pick(data, "blocks")) is not None:
            blocks = [
                (int(pick(block, "block_hash")), _tokens(pick(block, "tokens") or ())) for block in stored
            ]
            full = tuple(block for block in blocks if len(block[1]) == self._want_tokens)
            parent = pick(data, "parent_hash")
            return [CacheStored(None if parent is None else int(parent), full)] if full else []
        if (hashes := pick(data, "block_hashes")) is not None:
            return [CacheRemoved(tuple(int(each) for each in hashes))]
        return []  # updated: the level or priority of a block, of no use here


def _mapping(one: Any) -> Mapping[str, Any]:
    raw = one if isinstance(one, Mapping) else json.loads(one if isinstance(one, str) else one.to_json_str())
    if not isinstance(raw, Mapping):
        raise ValueError("not an object")
    return raw


def _tokens(tokens: Iterable[Any]) -> tuple[int, ...]:
    """Of `UniqueToken`s; plain numbers are taken too."""
    return tuple(int(one) if isinstance(one, int) else int(pick(one, "token_id")) for one in tokens)
