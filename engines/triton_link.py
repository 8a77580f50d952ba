"""A link to a Triton server, over tritonclient's asyncio client on an event loop in another thread.

The loop is one for all links of a process (`engines.triton_loop`). The caller's thread meets it in `_Reports`
and in `call_soon_threadsafe` alone. A `Session` is one connection (`engines.triton_session`); when it is
lost, `start` opens the next, and calls of before are forgotten.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any

from engines.executor.types import BackendUnavailable, Call, Facts, LinkLost, Report
from engines.triton_loop import process_loop
from engines.triton_messages import CallReader, request_of, values_of
from engines.triton_options import TritonOptions
from engines.triton_session import Session, open_client

_STOPPING = "the service is stopping"
_GRACE_S = 1.0  # for the loop to do what a deadline of ours already bounds


class _Reports:
    """What was heard and not yet fetched, and whether the connection is lost. For two threads."""

    def __init__(self, limit: int) -> None:
        self._limit, self._changed = limit, threading.Condition()
        self._waiting: deque[Report] = deque()
        self._lost: str | None = None

    def put(self, report: Report) -> None:
        with self._changed:
            self._waiting.append(report)
            self._changed.notify_all()

    def lose(self, why: str) -> None:
        """The first reason stays."""
        with self._changed:
            self._lost = self._lost or why
            self._changed.notify_all()

    @property
    def full(self) -> bool:
        return len(self._waiting) >= self._limit

    def check(self) -> None:
        if self._lost is not None:
            raise LinkLost(self._lost)

    def take(self, timeout_s: float) -> tuple[Report, ...]:
        """All there is; LinkLost only after the last report was taken."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._lost is not None, timeout_s)
            taken = tuple(self._waiting)
            self._waiting.clear()
        if not taken:
            self.check()
        return taken


class TritonLink:
    """`ExecutorLink` to one model of a Triton server. The server is somebody else's: `close` leaves it up."""

    def __init__(self, options: TritonOptions) -> None:
        self._options = options
        self._reports = _Reports(options.reports_max)
        self._session: Session | None = None
        self._interrupted = threading.Event()
        self._waited_for: Future[Any] | None = None  # by the caller's thread, of the loop

    def start(self) -> Facts:
        """Connect anew. Calls of before are forgotten; the server ends them: their streams are cancelled."""
        try:
            import tritonclient.grpc.aio  # noqa: F401
        except ImportError as error:
            raise BackendUnavailable(
                f"tritonclient can't be imported ({error})",
                "install the extra: pip install 'plaserve[triton]'",
            ) from error
        with suppress(LinkLost):  # the old connection hangs; it is let go all the same
            self._end_session()
        self._reports = _Reports(self._options.reports_max)
        limit_s = self._options.start_timeout_s + 2 * self._options.rpc_timeout_s + _GRACE_S
        if self._interrupted.is_set():
            raise LinkLost(_STOPPING)
        future = asyncio.run_coroutine_threadsafe(self._open(self._reports), process_loop())
        self._waited_for = future
        if self._interrupted.is_set():  # it came between
            future.cancel()
        try:
            facts: Facts = self._result(future, limit_s)
            return facts
        except CancelledError:
            raise LinkLost(_STOPPING) from None
        finally:
            self._waited_for = None

    def enqueue(self, calls: Sequence[Call]) -> None:
        """Raises ValueError, before anything is sent, for a call that can't be said."""
        made = [self._made(call) for call in calls]
        self._soon(lambda session: session.enqueue(made))

    def cancel(self, call_id: str) -> None:
        """The call's last answer still comes, CANCELLED unless it was at its end already."""
        self._soon(lambda session: session.cancel(call_id))

    def receive(self, timeout_s: float) -> Sequence[Report]:
        if self._session is None:
            raise LinkLost(f"no connection to {self._options.url}; start() opens one")
        return self._reports.take(timeout_s)

    def close(self) -> None:
        with suppress(LinkLost):  # it hangs; it is let go all the same
            self._end_session()

    def interrupt(self) -> None:
        self._interrupted.set()
        self._reports.lose(_STOPPING)
        waited_for = self._waited_for
        if waited_for is not None:
            waited_for.cancel()

    def _made(self, call: Call) -> tuple[CallReader, dict[str, Any]]:
        options = self._options
        request = request_of(
            values_of(call), model=options.model, version=options.model_version, request_id="", kind=call.kind
        )
        return CallReader(call, options.fingerprint, options.block_tokens), request

    async def _open(self, reports: _Reports) -> Facts:
        session = Session(open_client(self._options), self._options, reports)
        try:
            facts = await session.open()
        except BaseException:
            await session.close()
            raise
        self._session = session
        return facts

    def _end_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            self._in_loop(session.close(), self._options.rpc_timeout_s)

    def _soon(self, act: Callable[[Session], None]) -> None:
        session = self._session
        if session is None:
            raise LinkLost(f"no connection to {self._options.url}; start() opens one")
        self._reports.check()
        process_loop().call_soon_threadsafe(act, session)

    def _in_loop(self, work: Coroutine[Any, Any, Any], limit_s: float) -> Any:
        return self._result(asyncio.run_coroutine_threadsafe(work, process_loop()), limit_s)

    def _result(self, future: Future[Any], limit_s: float) -> Any:
        try:
            return future.result(limit_s)
        except TimeoutError:
            future.cancel()
            raise LinkLost(f"{self._options.url} did not answer in {limit_s:g} s") from None
