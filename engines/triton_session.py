"""One connection to a Triton server and the calls on it. Everything here runs on one event loop.

One stream a call. The alternative, one stream for all of them with answers told apart by request id, is not
sound with tritonclient's asyncio client: an error comes as bare text, its request id dropped, so it could not
be put down to a call. With a stream each, an error has its call, the end of the stream is the end of the call
even where the server does not flag its last response, and a stream can be cancelled alone. Streams of one
pass are opened in one turn of the loop; the server's queue delay gives them the chance to share an iteration.

A connection is lost, whole, when the channel leaves READY (nobody knows what a server that is back still
holds), when a stream breaks off with UNAVAILABLE or CANCELLED that we did not ask for, or when a probe fails.
gRPC keepalive is not used: a server's default answers frequent pings with GOAWAY.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from time import monotonic
from typing import Any, Protocol

from engines.executor.types import Answer, Facts, LinkLost
from engines.triton_check import check_config
from engines.triton_messages import BadResponse, CallReader, arrays_of, request_of, stop_values
from engines.triton_options import CancelBy, TritonOptions, host_of, is_local

_POLL_S = 0.1  # between two looks at a server that is not ready
_FULL_S = 0.005  # between two looks at a full queue of reports
_INT32_MAX = 2**31 - 1


class Heard(Protocol):
    """Where answers go, and the news that the connection is lost."""

    @property
    def full(self) -> bool: ...

    def put(self, report: Answer) -> None: ...

    def lose(self, why: str) -> None: ...


class _Live:
    """A call on its way. request_id: unique among all clients of the server, since stop requests go by it."""

    def __init__(self, reader: CallReader, request_id: str, request: dict[str, Any]) -> None:
        self.reader, self.request_id, self.request = reader, request_id, request
        self.stream: Any = None
        self.dropped = False  # its stream was cancelled by us
        self.done = asyncio.Event()


class Session:
    """See the module text."""

    def __init__(self, client: Any, options: TritonOptions, reports: Heard) -> None:
        self._client, self._options, self._reports = client, options, reports
        self._nonce = uuid.uuid4().hex[:12]
        self._calls: dict[str, _Live] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    # --- start and end ---

    async def open(self) -> Facts:
        """Wait until server and model are ready and check them. Raises LinkLost, BackendUnavailable."""
        options = self._options
        deadline_s = monotonic() + options.start_timeout_s
        await self._ready(deadline_s)
        try:
            about = await self._client.get_server_metadata(**self._asked())
            answer = await self._client.get_model_config(
                options.model, options.model_version, **self._asked()
            )
        except _errors() as error:
            raise LinkLost(f"{options.url} did not describe model {options.model}: {_said(error)}") from error
        reports_reuse = check_config(answer.config, options)
        channel = getattr(self._client, "_channel", None)
        if channel is not None:  # without it a silent restart is found by the probe alone
            self._begin(self._watch(channel))
        self._begin(self._probe())
        return Facts(
            version=f"triton {about.version}",
            kv_blocks_total=options.kv_blocks,
            block_tokens=options.block_tokens,
            cache_events=False,
            reports_reuse=reports_reuse,
            iteration_stats=False,
        )

    async def close(self) -> None:
        self._closing = True
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    async def _ready(self, deadline_s: float) -> None:
        options, last = self._options, "it did not answer"
        while True:
            try:
                if not await self._client.is_server_live(**self._asked()):
                    last = "the server is not live"
                elif await self._client.is_model_ready(options.model, options.model_version, **self._asked()):
                    return
                else:
                    last = f"model {options.model} version {options.model_version} is not ready there"
            except _errors() as error:
                last = _said(error)
            if monotonic() >= deadline_s:
                raise LinkLost(f"{options.url} was not ready in {options.start_timeout_s:g} s: {last}")
            await asyncio.sleep(_POLL_S)

    async def _watch(self, channel: Any) -> None:
        from grpc import ChannelConnectivity

        while (state := channel.get_state(try_to_connect=False)) is ChannelConnectivity.READY:
            await channel.wait_for_state_change(state)
        self._lose(f"the connection to {self._options.url} is down")

    async def _probe(self) -> None:
        options = self._options
        while True:
            await asyncio.sleep(options.probe_period_s)
            try:
                ready = await self._client.is_model_ready(
                    options.model, options.model_version, **self._asked()
                )
            except _errors() as error:
                return self._lose(f"{options.url} does not answer: {_said(error)}")
            if not ready:
                return self._lose(f"model {options.model} is no longer ready at {options.url}")

    # --- calls ---

    def enqueue(self, calls: Sequence[tuple[CallReader, dict[str, Any]]]) -> None:
        """Open a stream each, all in this turn of the loop."""
        for reader, request in calls:
            request_id = f"{self._nonce}-{reader.call.call_id}"
            live = _Live(reader, request_id, {**request, "request_id": request_id})
            self._calls[reader.call.call_id] = live
            self._begin(self._hear(live))

    def cancel(self, call_id: str) -> None:
        live = self._calls.get(call_id)
        if live is None or live.reader.over or live.reader.cancelled:
            return
        live.reader.cancelled = True
        if self._options.cancel_by is CancelBy.STREAM:
            self._drop(live)
        else:
            self._begin(self._stop(live))

    async def _hear(self, live: _Live) -> None:
        """Read a call's stream to its end; after the last answer nothing is reported any more."""
        reader, options = live.reader, self._options
        try:
            live.stream = self._client.stream_infer(
                _once(live.request), stream_timeout=options.call_timeout_s, headers=dict(options.headers)
            )
            async for result, error in live.stream:
                await self._report(reader.fail(_said(error)) if error else reader.read(*arrays_of(result)))
            await self._report(reader.end())
        except asyncio.CancelledError:  # also when the far side cancelled the stream
            if self._closing:
                raise
            await self._cut_off(live)
        except BadResponse as error:
            live.dropped = True
            live.stream.cancel()
            await self._report(reader.fail(f"bad response: {error}"))
        except _errors() as error:
            await self._broke_off(live, error)
        finally:
            live.done.set()
            if self._calls.get(reader.call.call_id) is live:
                del self._calls[reader.call.call_id]

    async def _cut_off(self, live: _Live) -> None:
        if live.dropped:
            await self._report(live.reader.end())
        elif not live.reader.over:
            self._lose(f"{self._options.url} cancelled a stream; it is shutting down")

    async def _broke_off(self, live: _Live, error: Exception) -> None:
        name = _status(error)
        if name == "UNAVAILABLE":
            self._lose(f"the connection to {self._options.url} broke off: {_said(error)}")
        elif name == "DEADLINE_EXCEEDED":
            await self._report(live.reader.fail(f"no end within {self._options.call_timeout_s:g} s"))
        else:
            await self._report(live.reader.fail(_said(error)))

    async def _stop(self, live: _Live) -> None:
        """Send a stop request; a call that goes on regardless is cut off."""
        options = self._options
        request = request_of(
            stop_values(),
            model=options.model,
            version=options.model_version,
            request_id=live.request_id,
            kind=None,
        )
        try:
            async with asyncio.timeout(options.cancel_timeout_s):
                stream = self._client.stream_infer(
                    _once(request), stream_timeout=options.cancel_timeout_s, headers=dict(options.headers)
                )
                async for _, error in stream:
                    if error:
                        raise error
                await live.done.wait()
        except asyncio.CancelledError:
            if self._closing:
                raise
        except _errors():
            pass  # cut off below; if the connection is down, others tell
        if not live.done.is_set():
            self._drop(live)

    def _drop(self, live: _Live) -> None:
        live.dropped = True
        if live.stream is not None:
            live.stream.cancel()

    # --- common ---

    async def _report(self, answer: Answer | None) -> None:
        if answer is None:
            return
        while self._reports.full:  # noqa: ASYNC110 - read by another thread; the stream waits meanwhile
            await asyncio.sleep(_FULL_S)
        self._reports.put(answer)

    def _lose(self, why: str) -> None:
        if not self._closing:
            self._reports.lose(why)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._lose(f"reading {self._options.url} failed: {error!r}")

    def _asked(self) -> dict[str, Any]:
        return {"client_timeout": self._options.rpc_timeout_s, "headers": dict(self._options.headers)}


async def _once(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """One request; the stream is then closed on this side and ends with the last response."""
    yield request


def open_client(options: TritonOptions) -> Any:
    """tritonclient's asyncio client, made on the loop that will use it.

    Its own connection, not shared with other links of this process: it is watched. Reconnecting is quick, so
    that `start` after a restart does not wait out gRPC's back-off.
    """
    from tritonclient.grpc.aio import InferenceServerClient

    arguments: dict[str, Any] = {
        "channel_args": [
            ("grpc.max_send_message_length", _INT32_MAX),
            ("grpc.max_receive_message_length", _INT32_MAX),
            ("grpc.client_idle_timeout_ms", _INT32_MAX),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 1_000),
            ("grpc.max_reconnect_backoff_ms", 1_000),
            ("grpc.enable_http_proxy", 0 if is_local(host_of(options.url)) else 1),
        ]
    }
    if options.tls is not None:
        tls = options.tls
        arguments["ssl"] = True
        for name in ("root_certificates", "private_key", "certificate_chain"):
            path = getattr(tls, name)
            arguments[name] = None if path is None else str(path)
    return InferenceServerClient(options.url, **arguments)


def _errors() -> tuple[type[Exception], ...]:
    """What a request to the server may end with."""
    from grpc.aio import AioRpcError
    from tritonclient.utils import InferenceServerException

    return AioRpcError, InferenceServerException, TimeoutError


def _status(error: Exception) -> str:
    """Name of a gRPC status, UNKNOWN where there is none."""
    code = getattr(error, "code", None) or getattr(error, "status", None)
    return str(code() if callable(code) else code).rpartition(".")[2]


def _said(error: Exception) -> str:
    """An error in the server's words, with its status."""
    text = getattr(error, "details", None) or getattr(error, "message", None)
    words = text() if callable(text) else str(error)
    status = _status(error)
    return f"{words} ({status})" if status not in ("None", "UNKNOWN", "") else str(words)
