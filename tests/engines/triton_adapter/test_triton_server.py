"""A link through the real tritonclient to a Triton server in this process, over the fake executor."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.executor.types import Answer, Ending
from engines.triton_link import TritonLink
from engines.triton_tensors import tensor_table
from engines.types import Sampling
from tests.engines.triton_adapter.conftest import Serve
from tests.engines.triton_adapter.talk import (
    WAIT_S,
    Connect,
    answers,
    call,
    ended,
    eventually,
    expected,
    said,
)
from tests.executor_fakes.triton import VERSION
from tests.executor_fakes.triton_small import options_for
from tests.executor_fakes.vices import Vices

# --- what it is told ---


def test_start_tells_what_a_triton_server_can_not_say(serve: Serve) -> None:
    link = TritonLink(options_for(serve().url))
    try:
        facts = link.start()
    finally:
        link.close()
    assert (facts.kv_blocks_total, facts.block_tokens) == (24, 8)
    assert facts.version == f"triton {VERSION}"
    assert (facts.cache_events, facts.iteration_stats, facts.reports_reuse) == (False, False, True)


# --- plain calls ---


def test_a_call_gets_its_tokens_and_one_end(serve: Serve, connect: Connect) -> None:
    link, made = connect(serve()), call(max_tokens=6)
    link.enqueue([made])
    heard = answers(link, until=ended)
    assert said(heard) == expected(made)
    assert [answer.ending for answer in heard if answer.final] == [Ending.LENGTH]
    assert not link.receive(0.05)


def test_tokens_come_one_by_one_as_they_are_made(serve: Serve, connect: Connect) -> None:
    server, made = serve(), call(max_tokens=4)
    link = connect(server)
    server.hold()
    link.enqueue([made])
    for place in range(4):
        assert not link.receive(0.05)  # nothing before it is made
        server.allow(1)
        heard = answers(link, until=bool)
        assert said(heard) == [expected(made)[place]]
        assert heard[-1].final is (place == 3)


@pytest.mark.parametrize("vices", [Vices(), Vices(end_id_left_out=True)], ids=["told", "left_out"])
def test_the_end_token_ends_an_answer_whether_or_not_it_is_told(
    serve: Serve, connect: Connect, vices: Vices
) -> None:
    link, made = connect(serve(vices, stop_after=3)), call(max_tokens=8, end_id=5)
    link.enqueue([made])
    heard = answers(link, until=ended)
    assert heard[-1].ending is Ending.END_ID
    assert [token for token in said(heard) if token != 5] == expected(made)[:2]


def test_an_early_end_that_nothing_explains_is_an_error(serve: Serve, connect: Connect) -> None:
    server = serve()
    link = connect(server)
    server.hold()
    link.enqueue([call(max_tokens=8)])
    eventually(lambda: len(server.requests) == 1)
    server.allow(2)
    answers(link, until=lambda heard: len(said(heard)) == 2)
    server.executor.cancel_request(1)  # by somebody else
    server.allow()
    assert "after 2 of 8 tokens" in (answers(link, until=ended)[-1].error or "")


def test_what_was_reused_is_told(serve: Serve, connect: Connect) -> None:
    link = connect(serve())
    link.enqueue([call("a", tokens=20)])
    assert [answer.reused_tokens for answer in answers(link, "a", until=ended)][-1] == 0
    link.enqueue([call("b", tokens=20)])
    assert [answer.reused_tokens for answer in answers(link, "b", until=ended)][-1] == 16


def test_calls_of_one_enqueue_are_told_apart(serve: Serve, connect: Connect) -> None:
    link, made = connect(serve()), {name: call(name, tokens=10 + ord(name) % 7) for name in "abcdefgh"}
    link.enqueue(list(made.values()))
    heard: list[Answer] = []
    while sum(answer.final for answer in heard) < len(made):
        heard += [report for report in link.receive(WAIT_S) if isinstance(report, Answer)]
    for name, one in made.items():
        assert said([answer for answer in heard if answer.call_id == name]) == expected(one)


def test_the_end_of_the_stream_is_the_end_where_no_response_says_so(serve: Serve, connect: Connect) -> None:
    server, made = serve(), call()
    server.quirks.final_flag = False
    link = connect(server)
    link.enqueue([made])
    heard = answers(link, until=ended)
    assert said(heard) == expected(made)
    assert heard[-1].ending is Ending.LENGTH


def test_a_full_queue_of_reports_makes_streams_wait_and_loses_nothing(serve: Serve, connect: Connect) -> None:
    server, made = serve(), call(max_tokens=30)
    link = connect(server, reports_max=4)
    link.enqueue([made])
    eventually(lambda: server.executor.live == 0)  # it has made them all
    first = link.receive(WAIT_S)
    assert len(first) <= 4
    heard = [report for report in first if isinstance(report, Answer)]
    heard += answers(link, until=ended)
    assert said(heard) == expected(made)


# --- what is sent ---


@given(
    tokens=st.integers(1, 60),
    temperature=st.sampled_from([0.0, 0.7]),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.1, 1.0),
    seed=st.integers(-(2**63), 2**64 - 1),
    end_id=st.none() | st.integers(0, 96),
    priority=st.none() | st.integers(0, 100),
)
def test_every_call_fits_the_table(
    tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    end_id: int | None,
    priority: int | None,
) -> None:
    from engines.triton_messages import SENT, request_of, values_of

    sampling = Sampling(temperature, top_p, top_k, seed)
    made = call(tokens=tokens, sampling=sampling, end_id=end_id, priority=priority)
    request = request_of(values_of(made), model="m", version="1", request_id="r", kind=made.kind)
    sent = {tensor.name(): tensor for tensor in request["inputs"]}
    assert set(sent) <= set(SENT)
    for name, tensor in sent.items():
        known = tensor_table().input(name)
        assert known.wire_type == tensor.datatype()
        assert known.fits(tuple(tensor.shape()))
    assert {t.name for t in tensor_table().inputs if not t.optional} <= set(sent)
    assert ("seed" in sent) is (temperature > 0)
    assert ("retention_token_range_ends" in sent) is (priority is not None)


def test_values_arrive_as_they_were_meant(serve: Serve, connect: Connect) -> None:
    server = serve()
    link = connect(server)
    sampling = Sampling(temperature=0.5, top_p=0.75, top_k=7, seed=2**64 - 1)
    link.enqueue([call("a", sampling=sampling, end_id=96, priority=80), call("b", tokens=9)])
    answers(link, "b", until=ended)
    eventually(lambda: len(server.requests) == 2)
    first, second = sorted(server.requests, key=lambda seen: -len(seen.tensors["input_ids"]))
    assert first.tensors["seed"] == [2**64 - 1]
    assert (first.tensors["temperature"], first.tensors["runtime_top_p"]) == ([0.5], [0.75])
    assert first.tensors["end_id"] == first.tensors["pad_id"] == [96]
    assert first.tensors["retention_token_range_ends"] == [-1]
    assert first.tensors["retention_decode_priority"] == [80]
    assert second.tensors["runtime_top_k"] == [1]
    assert not {"temperature", "end_id", "retention_token_range_starts"} & set(second.tensors)
    assert (first.parameters, second.parameters) == ({}, {})
    assert len({first.request_id, second.request_id}) == 2


def test_request_ids_of_two_links_never_meet(serve: Serve, connect: Connect) -> None:
    server = serve()
    links = [connect(server), connect(server)]
    for link in links:
        link.enqueue([call()])
        answers(link, until=ended)
    assert len({seen.request_id for seen in server.requests}) == 2


@pytest.mark.parametrize(
    ("name", "datatype", "shape", "dtype"),
    [
        ("input_ids", "INT64", [1, 3], "int64"),
        ("input_ids", "INT32", [3], "int32"),
        ("seed", "INT64", [1, 1], "int64"),
        ("context_phase_params", "INT32", [1, 3], "int32"),
        ("no_such_tensor", "INT32", [1, 1], "int32"),
    ],
)
def test_the_fake_server_refuses_what_the_table_does_not_have(
    serve: Serve, name: str, datatype: str, shape: list[int], dtype: str
) -> None:
    server = serve()

    async def send() -> str:
        import numpy as np
        from tritonclient.grpc import InferInput
        from tritonclient.grpc.aio import InferenceServerClient

        from engines.triton_messages import request_of, values_of

        request = request_of(values_of(call()), model="tensorrt_llm", version="1", request_id="x", kind=None)
        request["inputs"] = [tensor for tensor in request["inputs"] if tensor.name() != name]
        tensor = InferInput(name, shape, datatype)
        tensor.set_data_from_numpy(np.ones(shape, dtype))
        request["inputs"].append(tensor)

        async def one() -> Any:
            yield request

        async with InferenceServerClient(server.url) as client:
            errors = [str(error) async for _, error in client.stream_infer(one())]
        return errors[0]

    assert name in asyncio.run(send())
    assert not server.requests
