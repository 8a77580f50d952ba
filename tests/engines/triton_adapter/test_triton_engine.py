"""Hand-overs through two servers, by links and by engines, and an engine through one server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.executor.engine import ExecutorEngine
from engines.executor.types import Call, CallKind, ContextTicket, Ending, ExecutorRole
from engines.profiles import Profiles
from engines.triton_link import TritonLink
from engines.triton_server import capabilities, open_engine
from engines.types import EngineRequest, Layout, Padding, Pass, PassItem, PassKind, Sampling
from tests.engines.triton_adapter.conftest import Serve
from tests.engines.triton_adapter.talk import (
    Connect,
    answers,
    call,
    ended,
    eventually,
    expected,
    said,
)
from tests.executor_fakes.triton import FakeTriton
from tests.executor_fakes.triton_small import FINGERPRINT, SteppedLink, options_for
from tests.executor_fakes.vices import NEVER, Vices

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
