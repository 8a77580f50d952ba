"""What a scheduler and a worker say comes back the same, and what makes no sense is named."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.simulated_settings import h200_32b_like, padded_grid_like, small_cpu_like
from engines.types import (
    BlocksRemoved,
    BlocksStored,
    EngineRequest,
    EngineStats,
    FinishReason,
    ItemResult,
    Pass,
    PassItem,
    PassKind,
    PassResult,
    Ran,
    Sampling,
)
from protos.plaserve.v1 import worker_pb2 as pb
from service.core.types import (
    Event,
    InstanceDown,
    InstanceSpec,
    KvChanged,
    PassFailed,
    PassFinished,
    PassRevoked,
    PassStarted,
    Role,
    RoleChanged,
)
from service.fleet.convert import (
    HASHES_MAX,
    HIDDEN_TOKEN,
    BadMessage,
    describe,
    dispatch_of,
    events_of,
    read_event,
    read_pass,
    read_requests,
    read_spec,
    read_statistics,
    statistics_of,
)

NAMES = st.text(min_size=1, max_size=20)
COUNTS = st.integers(0, (1 << 32) - 1)
NUMBERS = st.integers(0, (1 << 64) - 1)
SECONDS = st.integers(0, 10**13).map(lambda nanoseconds: nanoseconds / 1e9)


@st.composite
def passes(draw: st.DrawFn) -> Pass:
    blocks = draw(st.integers(1, 64))
    return Pass(
        draw(NUMBERS),
        draw(st.sampled_from(PassKind)),
        tuple(draw(st.lists(st.builds(PassItem, NAMES, COUNTS, COUNTS), min_size=1, max_size=5))),
        draw(st.integers(0, blocks - 1)),
        blocks,
    )


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.floats(0, 10),
    top_p=st.floats(0, 1),
    top_k=COUNTS,
    seed=NUMBERS,
    ignore_eos=st.booleans(),
)


@given(passes(), st.booleans(), st.data())
def test_a_pass_and_the_requests_that_it_brings(pass_: Pass, staged: bool, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.sampled_from([item.request_id for item in pass_.items]), unique=True))
    requests = [
        EngineRequest(
            name,
            tuple(data.draw(st.lists(COUNTS, min_size=1, max_size=9))),
            data.draw(COUNTS),
            data.draw(SAMPLINGS),
            data.draw(st.booleans()),
        )
        for name in ids
    ]
    sent = dispatch_of(pass_, requests, staged=staged, front_end_of=lambda name: f"for {name}")
    message = pb.DispatchPass.FromString(sent.SerializeToString())
    assert read_pass(message) == pass_
    assert message.staged is staged
    assert read_requests(message) == tuple((request, f"for {request.request_id}") for request in requests)


@st.composite
def items(draw: st.DrawFn) -> ItemResult:
    token = draw(st.none() | st.integers(0, 200_000))
    finish = draw(st.none() | st.sampled_from(FinishReason)) if token is not None else None
    counts = [draw(COUNTS) for _ in range(3)]
    return ItemResult(draw(NAMES), *counts, token, finish, draw(st.none() | st.text(max_size=9)))


EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(PassStarted, st.just("w"), NUMBERS),
    st.builds(PassRevoked, st.just("w"), NUMBERS),
    st.builds(PassFailed, st.just("w"), NUMBERS, st.lists(NAMES).map(tuple), st.text()),
    st.builds(InstanceDown, st.just("w"), st.text()),
    st.builds(RoleChanged, st.just("w"), st.sampled_from(Role)),
    st.builds(
        PassFinished,
        st.just("w"),
        st.builds(
            PassResult,
            NUMBERS,
            st.sampled_from(PassKind),
            st.lists(items(), max_size=4).map(tuple),
            COUNTS,
            COUNTS,
            SECONDS,
            st.none() | st.builds(Ran, COUNTS, COUNTS, COUNTS),
        ),
    ),
)


def unseen(event: Event) -> Event:
    """What is left of an event when tokens are not told."""
    if not isinstance(event, PassFinished):
        return event
    shown = tuple(
        replace(item, token=None if item.token is None else HIDDEN_TOKEN) for item in event.result.items
    )
    return replace(event, result=replace(event.result, items=shown))


@given(EVENTS)
def test_an_event(event: Event) -> None:
    (sent,) = events_of(event)
    assert read_event(pb.ControlResponse.FromString(sent.SerializeToString()), "w") == unseen(event)


KV = st.one_of(
    st.builds(BlocksStored, st.lists(NUMBERS, max_size=7).map(tuple)),
    st.builds(BlocksRemoved, st.lists(NUMBERS, max_size=7).map(tuple)),
)


def flat(events: Any) -> list[tuple[type, int]]:
    return [(type(event), block) for event in events for block in event.block_hashes]


@given(st.lists(KV, min_size=1, max_size=8))
def test_changes_of_the_cache(events: list[Any]) -> None:
    (sent,) = events_of(KvChanged("w", tuple(events)))
    assert read_event(sent, "w") == KvChanged("w", tuple(events))


@pytest.mark.parametrize("sizes", [(HASHES_MAX,), (HASHES_MAX + 1,), (3, HASHES_MAX, 2), (3 * HASHES_MAX, 1)])
def test_many_changes_of_the_cache_take_several_messages(sizes: tuple[int, ...]) -> None:
    kinds = (BlocksStored, BlocksRemoved)
    events = tuple(kinds[n % 2](tuple(range(n, n + size))) for n, size in enumerate(sizes))
    sent = list(events_of(KvChanged("w", events)))
    assert all(sum(len(e.block_hashes) for e in m.kv_events.events) <= HASHES_MAX for m in sent)
    came = [event for message in sent for event in read_event(message, "w").events]  # type: ignore[union-attr]
    assert flat(came) == flat(events)


@given(
    st.builds(
        EngineStats, COUNTS, COUNTS, COUNTS, COUNTS, NUMBERS, st.lists(st.tuples(NAMES, NUMBERS)).map(tuple)
    )
)
def test_statistics(stats: EngineStats) -> None:
    assert read_statistics(statistics_of(stats)) == stats


@pytest.mark.parametrize("setting", [h200_32b_like, small_cpu_like, padded_grid_like])
@pytest.mark.parametrize("role", list(Role))
def test_an_instance(setting: Any, role: Role) -> None:
    spec, ready = InstanceSpec("w", *setting(), role), pb.WorkerReady()
    describe(spec, ready)
    assert read_spec(pb.WorkerReady.FromString(ready.SerializeToString())) == spec


def a_ready() -> pb.WorkerReady:
    ready = pb.WorkerReady()
    describe(InstanceSpec("w", *h200_32b_like()), ready)
    return ready


def test_what_a_newer_worker_says_more_is_ignored() -> None:
    ready = a_ready()
    spec = read_spec(ready)
    ready.cost_json = json.dumps({**asdict(spec.cost), "new_term_s": 1.0})
    ready.capabilities_json = json.dumps({**asdict(spec.capabilities), "new_ability": ["x"]})
    assert read_spec(ready) == spec


def test_what_an_older_worker_does_not_say_has_its_default() -> None:
    ready = a_ready()
    spec = read_spec(ready)
    ready.capabilities_json = json.dumps(
        {k: v for k, v in asdict(spec.capabilities).items() if k != "layer_blocks_max"}
    )
    ready.role = 0  # type: ignore[assignment]
    assert read_spec(ready) == replace(spec, capabilities=replace(spec.capabilities, layer_blocks_max=1))
    dispatch = dispatch_of(Pass(1, PassKind.PREFILL, (PassItem("r", 1, 0),)), [], staged=False)
    dispatch.layer_blocks = 0
    assert read_pass(dispatch).layer_blocks == 1


def spoilt(**changes: Any) -> pb.WorkerReady:
    ready = a_ready()
    for name, value in changes.items():
        setattr(ready, name, value)
    return ready


@pytest.mark.parametrize(
    ("ready", "named"),
    [
        (spoilt(instance_id=""), "instance_id"),
        (spoilt(cost_json="{"), "cost_json"),
        (spoilt(cost_json='{"launch_s": 1}'), "cost_json.weights_s"),
        (spoilt(cost_json=spoilt().cost_json.replace('"launch_s": 0.0', '"launch_s": -1.0')), "launch_s"),
        (spoilt(profiles_json=spoilt().profiles_json.replace("packed", "stacked")), "profiles_json.layout"),
        (spoilt(capabilities_json="[]"), "capabilities_json"),
        (spoilt(role=9), "role: 9"),
    ],
)
def test_an_instance_that_can_not_be_is_refused_by_field(ready: pb.WorkerReady, named: str) -> None:
    with pytest.raises(BadMessage, match=named.replace(".", r"\.")):
        read_spec(ready)


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (pb.DispatchPass(pass_id=1, kind=1), "DispatchPass.items"),
        (pb.DispatchPass(pass_id=1, kind=7, items=[pb.PassItem(request_id="r")]), "DispatchPass.kind: 7"),
        (pb.DispatchPass(pass_id=1, items=[pb.PassItem(request_id="r")]), "DispatchPass.kind: 0"),
        (pb.DispatchPass(pass_id=1, kind=1, items=[pb.PassItem()]), "items.request_id"),
        (
            pb.DispatchPass(
                pass_id=1, kind=1, items=[pb.PassItem(request_id="r")], layer_block=2, layer_blocks=2
            ),
            "layer_block: 2 of 2",
        ),
    ],
)
def test_a_pass_that_can_not_be_is_refused_by_field(message: pb.DispatchPass, named: str) -> None:
    with pytest.raises(BadMessage, match=named):
        read_pass(message)


def test_requests_that_can_not_be_are_refused_by_field() -> None:
    item = pb.PassItem(request_id="r")
    stray = pb.DispatchPass(items=[item], new_requests=[pb.WorkerRequest(request_id="other", token_ids=[1])])
    with pytest.raises(BadMessage, match="new_requests: 'other'"):
        read_requests(stray)
    empty = pb.DispatchPass(items=[item], new_requests=[pb.WorkerRequest(request_id="r")])
    with pytest.raises(BadMessage, match="token_ids: 'r'"):
        read_requests(empty)


def test_an_answer_can_not_end_without_a_token() -> None:
    item = pb.ItemResult(request_id="r", finish_reason=1)
    with pytest.raises(BadMessage, match="finish_reason"):
        read_event(pb.ControlResponse(finished=pb.PassFinished(kind=1, items=[item])), "w")


def test_what_is_no_event_is_none() -> None:
    assert read_event(pb.ControlResponse(), "w") is None
    assert read_event(pb.ControlResponse(progress=pb.Progress()), "w") is None
