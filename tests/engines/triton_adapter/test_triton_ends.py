"""Calls that end before their end: cancelled, refused, too slow, or with their server."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engines.executor.types import Ending, LinkLost
from engines.triton_options import CancelBy
from tests.engines.triton_adapter.conftest import Serve
from tests.engines.triton_adapter.talk import (
    Connect,
    answers,
    call,
    ended,
    eventually,
    expected,
    lost,
    said,
)
from tests.executor_fakes.vices import Vices

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
