"""Statistics and events, as they should be and as they come: what can't be read is counted, never raised."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.executor.types import CacheGap, CacheRemoved, CacheStored, Iteration, Report
from engines.trtllm_child.reports import Hearing

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
BLOCK = 4


def stats(**changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "iter": 7,
        "iterLatencyMS": 2.5,
        "numActiveRequests": 3,
        "numQueuedRequests": 1,
        "inflightBatchingStats": {"numContextRequests": 2, "numCtxTokens": 300, "numGenRequests": 1},
        "kvCacheStats": {"maxNumBlocks": 90, "freeNumBlocks": 80, "usedNumBlocks": 10, "tokensPerBlock": 4},
    }
    return {**made, **changes}


def stored(number: int, first: int, *, parent: int | None = None, size: int = BLOCK) -> dict[str, Any]:
    tokens = [{"token_id": first + n, "token_extra_id": 0} for n in range(size)]
    block = {"block_hash": first, "tokens": tokens, "cache_level": 0, "priority": 35}
    return {"event_id": number, "data": {"type": "stored", "parent_hash": parent, "blocks": [block]}}


def test_one_iteration_in_each_of_its_forms() -> None:
    raw = stats()
    as_object = SimpleNamespace(to_json_str=lambda: json.dumps(raw))
    found = Hearing(BLOCK).iterations([raw, json.dumps(raw), as_object])
    assert found == [Iteration(7, 2, 300, 1, 1, 3, 0.0025, 90, 80, 10)] * 3


@pytest.mark.parametrize("form", ["dict", "text", "object"])
def test_events_in_each_of_their_forms(form: str) -> None:
    def shaped(event: dict[str, Any]) -> Any:
        if form == "text":
            return json.dumps(event)
        if form == "object":
            return json.loads(json.dumps(event), object_hook=lambda each: SimpleNamespace(**each))
        return event

    hearing = Hearing(BLOCK)
    created = {"event_id": 0, "data": {"type": "created", "num_blocks_per_cache_level": [90, 0]}}
    removed = {"event_id": 3, "data": {"type": "removed", "block_hashes": [10, 20]}}
    diff = {"new_value": 1, "old_value": 0}
    updated = {"event_id": 4, "data": {"type": "updated", "block_hash": 1, "cache_level": diff}}
    events = [created, stored(1, 10), stored(2, 20, parent=10), removed, updated]
    assert hearing.events([shaped(event) for event in events]) == [
        CacheStored(None, ((10, (10, 11, 12, 13)),)),
        CacheStored(10, ((20, (20, 21, 22, 23)),)),
        CacheRemoved((10, 20)),
    ]
    assert (hearing.blocks, hearing.take_skipped()) == (90, 0)


@given(st.sets(st.integers(0, 60), max_size=30), st.integers(1, 9))
def test_every_missing_id_is_in_exactly_one_gap(dropped: set[int], batch: int) -> None:
    """What was stored and what is told missing are together all there was, in order, however it is polled."""
    hearing = Hearing(BLOCK)
    kept = [n for n in range(62) if n == 0 or n == 61 or n not in dropped]
    heard: list[Report] = []
    for at in range(0, len(kept), batch):
        heard += hearing.events([stored(n, n * 10) for n in kept[at : at + batch]])
    number = 0
    for report in heard:
        if isinstance(report, CacheGap):
            number += report.missing
        else:
            assert isinstance(report, CacheStored)
            assert report.blocks[0][0] == number * 10
            number += 1
    assert number == 62


def test_a_block_that_is_not_full_is_left_out() -> None:
    hearing = Hearing(BLOCK)
    assert hearing.events([stored(0, 10, size=3)]) == []
    assert hearing.events([stored(1, 20)]) != [], "and its id is not missed"
    assert hearing.take_skipped() == 0


@settings(max_examples=100, deadline=None)
@given(st.lists(JSON, max_size=4), st.sampled_from(sorted(stats())), JSON)
def test_statistics_never_raise(junk: list[Any], field: str, value: Any) -> None:
    hearing = Hearing(BLOCK)
    found = hearing.iterations([*junk, stats(**{field: value}), stats()])
    assert found[-1] == Iteration(7, 2, 300, 1, 1, 3, 0.0025, 90, 80, 10)
    assert len(found) + hearing.take_skipped() == len(junk) + 2


@settings(max_examples=100, deadline=None)
@given(st.lists(JSON | st.fixed_dictionaries({"event_id": st.integers(), "data": JSON}), max_size=4), JSON)
def test_events_never_raise(junk: list[Any], data: Any) -> None:
    hearing = Hearing(BLOCK)
    hearing.events([*junk, {"event_id": 0, "data": {"type": "stored", "blocks": data}}])
    again = hearing.events([stored(10**9, 40)])
    assert again[-1] == CacheStored(None, ((40, (40, 41, 42, 43)),))


@pytest.mark.parametrize("missing", ["iter", "inflightBatchingStats"])
def test_an_iteration_without_its_numbers_is_counted(missing: str) -> None:
    raw = stats()
    del raw[missing]
    hearing = Hearing(BLOCK)
    assert hearing.iterations([raw]) == []
    assert (hearing.take_skipped(), hearing.take_skipped()) == (1, 0)


def test_an_event_without_data_is_counted_and_its_id_is_not_missed() -> None:
    """Issue 4666: null in events."""
    hearing = Hearing(BLOCK)
    assert hearing.events([stored(0, 10), {"event_id": 1, "data": None}, None, stored(2, 20)]) == [
        CacheStored(None, ((10, (10, 11, 12, 13)),)),
        CacheStored(None, ((20, (20, 21, 22, 23)),)),
    ]
    assert hearing.take_skipped() == 1


def test_numbers_that_are_none_are_left_out() -> None:
    [report] = Hearing(BLOCK).iterations([stats(iterLatencyMS=float("nan"), kvCacheStats=None)])
    assert isinstance(report, Iteration)
    assert (report.latency_s, report.kv_blocks_total, report.kv_blocks_used) == (None, None, None)
