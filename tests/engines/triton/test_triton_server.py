"""A link through the real tritonclient to a Triton server in this process, over the fake executor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.executor.engine import ExecutorEngine
from engines.executor.types import Answer, Call, CallKind, ContextTicket, Ending, ExecutorRole, LinkLost
from engines.profiles import Profiles
from engines.triton_link import TritonLink
from engines.triton_options import CancelBy
from engines.triton_server import capabilities, open_engine
from engines.triton_tensors import tensor_table
from engines.types import EngineRequest, Layout, Padding, Pass, PassItem, PassKind, Sampling
from tests.engines.triton.conftest import Serve
from tests.executor_fakes.messages import make_token
from tests.executor_fakes.model import VOCABULARY
from tests.executor_fakes.triton import VERSION, FakeTriton
from tests.executor_fakes.triton_small import FINGERPRINT, SteppedLink, options_for
from tests.executor_fakes.vices import NEVER, Vices

Connect = Callable[..., TritonLink]
WAIT_S = 10.0  # bound of every wait here; none takes so long unless something is wrong


def call(name: str = "a", tokens: int = 20, max_tokens: int = 4, **other: Any) -> Call:
    prompt = tuple((7 * place + 3) % VOCABULARY for place in range(tokens))
    return Call(name, other.pop("kind", CallKind.GENERATE), prompt, max_tokens, **other)


def answers(link: TritonLink, name: str = "a", *, until: Callable[[list[Answer]], bool]) -> list[Answer]:
    """Answers of one call until enough was heard."""
    heard: list[Answer] = []
    deadline_s = time.monotonic() + WAIT_S
    while not until(heard):
        assert time.monotonic() < deadline_s, heard
        heard += [r for r in link.receive(0.5) if isinstance(r, Answer) and r.call_id == name]
    return heard


def ended(heard: list[Answer]) -> bool:
    return bool(heard) and heard[-1].final


def said(heard: list[Answer]) -> list[int]:
    return [token for answer in heard for token in answer.tokens]


def expected(made: Call) -> list[int]:
    return [make_token(made.token_ids, place, VOCABULARY, made.end_id) for place in range(made.max_tokens)]


def lost(link: TritonLink) -> str:
    """What the link says when it is lost, in time, and before that nothing of any call."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        try:
            assert not link.receive(0.2)
        except LinkLost as error:
            return str(error)
    raise AssertionError("the link was not lost")


def eventually(true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


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


# --- ends before the end ---


@pytest.mark.parametrize("cancel_by", list(CancelBy))
def test_a_cancelled_call_ends_and_the_server_frees_its_blocks(
    serve: Serve, connect: Connect, cancel_by: CancelBy
) -> None:
    server = serve()
    link = connect(server, cancel_by=cancel_by)
    server.hold()
    link.enqueue([call(max_tokens=100)])
    eventually(lambda: len(server.requests) == 1)
    server.allow(3)
    answers(link, until=lambda heard: len(said(heard)) == 3)
    assert server.executor.pool.held
    link.cancel("a")
    eventually(lambda: bool(server.cancelled or server.stopped))
    server.allow()
    heard = answers(link, until=ended)
    assert (heard[-1].ending, heard[-1].error) == (Ending.CANCELLED, None)
    eventually(lambda: server.executor.pool.held == 0)
    assert len(server.cancelled) == (cancel_by is CancelBy.STREAM)
    link.cancel("a")
    link.cancel("never heard of")
    assert not link.receive(0.05)


def test_the_stop_request_has_the_id_of_its_call(serve: Serve, connect: Connect) -> None:
    server = serve()
    link = connect(server)
    server.hold()
    link.enqueue([call(max_tokens=100)])
    eventually(lambda: len(server.requests) == 1)
    link.cancel("a")
    eventually(lambda: len(server.stopped) == 1)
    server.allow()
    answers(link, until=ended)
    assert server.requests[0].request_id == server.requests[1].request_id
    assert server.requests[1].tensors["stop"] == [True]


def test_a_server_that_ignores_stop_requests_has_the_stream_cut_off(serve: Serve, connect: Connect) -> None:
    server = serve()
    server.quirks.ignore_stop = True
    link = connect(server, cancel_timeout_s=0.1)
    server.hold()
    link.enqueue([call(max_tokens=100)])
    eventually(lambda: len(server.requests) == 1)
    link.cancel("a")
    assert answers(link, until=ended)[-1].ending is Ending.CANCELLED
    eventually(lambda: len(server.cancelled) == 1)


def test_an_error_of_the_server_is_its_calls_alone(serve: Serve, connect: Connect) -> None:
    server, good = serve(Vices(error_response=2)), call("b")
    link = connect(server)
    link.enqueue([good])
    assert said(answers(link, "b", until=ended)) == expected(good)
    link.enqueue([call("a")])
    heard = answers(link, "a", until=ended)
    assert "met an error" in (heard[-1].error or "")
    link.enqueue([replace(good, call_id="c")])
    assert said(answers(link, "c", until=ended)) == expected(good)


def test_a_refusal_is_told_in_the_servers_words(serve: Serve, connect: Connect) -> None:
    server = serve()
    server.quirks.error = "Exceeds maximum queue size"
    link = connect(server)
    link.enqueue([call()])
    assert answers(link, until=ended)[-1].error == "Exceeds maximum queue size"


@pytest.mark.parametrize(
    ("name", "datatype", "shape", "values"),
    [
        ("output_ids", "INT32", [2], [1, 2]),
        ("sequence_length", "INT32", [1, 1], [99]),
        ("kv_cache_reused_blocks", "INT32", [1, 2], [1, 2]),
        ("output_ids", "INT32", [1, 1, 7], [1]),
    ],
)
def test_a_response_that_can_not_be_read_fails_its_call(
    serve: Serve, connect: Connect, name: str, datatype: str, shape: list[int], values: list[int]
) -> None:
    server = serve()
    server.quirks.mangled = {name: (datatype, shape, values)}
    link = connect(server)
    link.enqueue([call()])
    assert "bad response" in (answers(link, until=ended)[-1].error or "")
    server.quirks.mangled = {}
    link.enqueue([call("b")])
    assert said(answers(link, "b", until=ended)) == expected(call())


def test_a_call_that_takes_too_long_is_told_and_ended(serve: Serve, connect: Connect) -> None:
    server = serve()
    link = connect(server, call_timeout_s=0.2)
    server.hold()
    link.enqueue([call()])
    assert "0.2 s" in (answers(link, until=ended)[-1].error or "")
    eventually(lambda: len(server.cancelled) == 1)


# --- the server goes away ---


def test_a_server_that_dies_loses_the_link_and_start_brings_it_back(serve: Serve, connect: Connect) -> None:
    server, made = serve(), call(max_tokens=50)
    link = connect(server)
    server.hold()
    link.enqueue([made])
    eventually(lambda: len(server.requests) == 1)
    server.allow(2)
    answers(link, until=lambda heard: len(said(heard)) == 2)
    server.stop()
    assert server.url in lost(link)
    with pytest.raises(LinkLost):
        link.enqueue([call("b")])
    serve(port=server.port)
    link.start()
    link.enqueue([made])
    assert said(answers(link, until=ended)) == expected(made)


def test_an_idle_link_notices_a_restart(serve: Serve, connect: Connect) -> None:
    server = serve()
    link = connect(server)
    server.stop()
    serve(port=server.port)
    assert "down" in lost(link)


def test_a_model_that_is_unloaded_loses_the_link(serve: Serve, connect: Connect) -> None:
    server = serve()
    link = connect(server, probe_period_s=0.05)
    server.quirks.ready = False
    assert "no longer ready" in lost(link)


def test_closing_ends_calls_on_the_server(serve: Serve, connect: Connect) -> None:
    server = serve()
    link = connect(server)
    server.hold()
    link.enqueue([call()])
    eventually(lambda: len(server.requests) == 1)
    link.close()
    link.close()
    eventually(lambda: len(server.cancelled) == 1)
    with pytest.raises(LinkLost):
        link.receive(0.0)
    server.allow()
    link.start()
    link.enqueue([call()])
    assert said(answers(link, until=ended)) == expected(call())


# --- hand-over ---


def ticket_of(link: TritonLink, made: Call) -> ContextTicket:
    link.enqueue([replace(made, kind=CallKind.CONTEXT_ONLY)])
    last = answers(link, made.call_id, until=ended)[-1]
    assert last.ending is Ending.NOT_FINISHED
    assert last.ticket is not None
    return last.ticket


@pytest.mark.parametrize("again", [False, True], ids=["once", "first_token_again"])
def test_a_prefill_server_hands_over_to_a_decode_server(serve: Serve, connect: Connect, again: bool) -> None:
    prefill, decode = serve(), serve(Vices(dup_first_token=again))
    context, generation = (
        connect(prefill, role=ExecutorRole.CONTEXT),
        connect(decode, role=ExecutorRole.GENERATION),
    )
    made = call(max_tokens=6)
    ticket = ticket_of(context, made)
    assert list(ticket.first_gen_tokens) == expected(made)[:1]
    assert (ticket.fingerprint, ticket.block_tokens) == (FINGERPRINT, 8)
    assert prefill.executor.pool.held
    generation.enqueue([replace(made, kind=CallKind.GENERATION_ONLY, ticket=ticket)])
    heard = answers(generation, until=ended)
    assert said(heard) == expected(made)[0 if again else 1 :]
    assert heard[-1].ending is Ending.LENGTH
    assert prefill.requests[0].parameters == {"request_type": "context_only"}
    assert decode.requests[0].parameters == {"request_type": "generation_only"}
    assert bytes(decode.requests[0].tensors["context_phase_params"]) == ticket.opaque_state
    eventually(lambda: prefill.executor.pool.held == 0)


def test_a_generation_only_call_without_ticket_is_refused_here(serve: Serve, connect: Connect) -> None:
    link = connect(serve())
    with pytest.raises(ValueError, match="ticket"):
        link.enqueue([call("b"), call(kind=CallKind.GENERATION_ONLY)])
    assert not link.receive(0.05)


def test_kv_that_nobody_pulls_can_not_be_given_up(serve: Serve, connect: Connect) -> None:
    """The backend forgets the id of a request with its last response; see `engines.triton_server`."""
    server = serve()
    link = connect(server)
    ticket_of(link, call())
    link.cancel("a")
    assert not link.receive(0.1)
    assert server.executor.pool.held


# --- an engine through it ---


def open_pair(serve: Serve, vices: Vices = Vices()) -> Any:  # noqa: B008 - frozen
    prefill, decode = serve(), serve(vices)
    return prefill, *(
        open_engine(options_for(server.url, role=role, pass_tokens_max=128))
        for server, role in ((prefill, ExecutorRole.CONTEXT), (decode, ExecutorRole.GENERATION))
    )


def prefilled(engine: Any, request: EngineRequest) -> list[int]:
    engine.submit(request)
    item = PassItem(request.request_id, len(request.token_ids), 0)
    result = engine.execute(Pass(1, PassKind.PREFILL, (item,)))
    return [item.token for item in result.items]


@pytest.mark.parametrize("again", [False, True], ids=["once", "first_token_again"])
def test_engines_hand_over_through_two_servers(serve: Serve, again: bool) -> None:
    _, prefill, decode = open_pair(serve, Vices(dup_first_token=again))
    made = call(max_tokens=5)
    request = EngineRequest("r", made.token_ids, 5, Sampling(ignore_eos=True))
    try:
        tokens = prefilled(prefill, request)
        decode.adopt(request, prefill.take_ticket("r"))
        position, finish = len(request.token_ids), None
        while finish is None:
            item = PassItem("r", 1, position)
            for result in decode.execute(Pass(2, PassKind.DECODE, (item,))).items:
                assert result.error is None, result.error
                tokens.append(result.token)
                position, finish = result.position, result.finish
        prefill.release("r")
    finally:
        prefill.close()
        decode.close()
    assert tokens == expected(made)


def test_an_engine_survives_a_restart_of_its_server(serve: Serve) -> None:
    server: FakeTriton = serve()
    engine = open_engine(options_for(server.url, pass_tokens_max=128))
    request = EngineRequest("r", call().token_ids, 1, Sampling(ignore_eos=True))
    try:
        assert prefilled(engine, request) == expected(call())[:1]
        server.stop()
        serve(port=server.port)
        with pytest.raises(Exception, match="lost and restarted"):
            prefilled(engine, replace(request, request_id="s"))
        assert prefilled(engine, replace(request, request_id="t")) == expected(call())[:1]
        assert dict(engine.stats().incidents)["restarted"] == 1
    finally:
        engine.close()


def test_an_engine_without_cache_events_learns_of_evictions_from_answers(tmp_path: Path) -> None:
    """It thinks that the prompt is cached, the server has lost it: less was reused, and the rest came out."""
    link = SteppedLink(tmp_path)
    options = options_for("localhost:8001")
    profiles = Profiles(Layout.PACKED, Padding.NOTHING, (64,))
    engine = ExecutorEngine(link, capabilities(options), profiles, fingerprint=FINGERPRINT, clock=link.clock)
    engine.start()
    request = EngineRequest("r", call(tokens=40).token_ids, 1, Sampling(ignore_eos=True))
    try:
        assert prefilled(engine, request) == expected(call(tokens=40))[:1]
        assert engine.stats().kv_blocks_cached == 5
        link.server.executor.pool.evict_idle()
        engine.submit(replace(request, request_id="s"))
        item = engine.execute(Pass(2, PassKind.PREFILL, (PassItem("s", 40, 0),))).items[0]
        assert (item.reused, item.computed, item.position) == (0, 40, 40)
        assert item.token == expected(call(tokens=40))[0]
        assert dict(engine.stats().incidents)["evicted"] == 1
        engine.submit(replace(request, request_id="t"))
        item = engine.execute(Pass(3, PassKind.PREFILL, (PassItem("t", 40, 0),))).items[0]
        assert (item.reused, item.computed) == (32, 8)  # the last token is always computed, with its block
    finally:
        engine.close()


def test_kv_that_never_comes_fails_the_decode_side_in_time(serve: Serve) -> None:
    from engines.executor.types import ExecutorSettings

    prefill_server, decode_server = serve(), serve(Vices(late_transfer=NEVER))
    prefill = open_engine(options_for(prefill_server.url, role=ExecutorRole.CONTEXT, pass_tokens_max=128))
    decode = open_engine(
        options_for(decode_server.url, role=ExecutorRole.GENERATION, pass_tokens_max=128),
        ExecutorSettings(handover_timeout_s=0.2),
    )
    request = EngineRequest("r", call().token_ids, 5, Sampling(ignore_eos=True))
    try:
        prefilled(prefill, request)
        decode.adopt(request, prefill.take_ticket("r"))
        result = decode.execute(Pass(2, PassKind.DECODE, (PassItem("r", 1, 20),)))
        assert "transfer" in (result.items[0].error or "")
        eventually(lambda: decode_server.executor.pool.held == 0)
    finally:
        prefill.close()
        decode.close()
