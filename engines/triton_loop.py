"""One event loop, in a thread of its own, for all Triton links of a process; it runs until the process ends.

gRPC's asyncio side has one poller for a process. The poller goes when its last channel goes, comes back with
the next, and tells all loops through one socket: with a loop a link, closed loops and closed sockets make an
answer of another link late, until the next one wakes its loop. So here is one loop that never closes, and the
poller is held for good.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from typing import Any

_START_S = 10.0
_lock = threading.Lock()
_running: tuple[int, asyncio.AbstractEventLoop] | None = None  # process id, since a fork has no thread


def process_loop() -> asyncio.AbstractEventLoop:
    """Started when first asked for."""
    global _running
    with _lock:
        if _running is None or _running[0] != os.getpid():
            loop = asyncio.new_event_loop()
            loop.set_exception_handler(_quiet)
            threading.Thread(target=loop.run_forever, name="triton-links", daemon=True).start()
            asyncio.run_coroutine_threadsafe(_hold_poller(), loop).result(_START_S)
            _running = os.getpid(), loop
        return _running[1]


async def _hold_poller() -> None:
    from grpc import aio

    aio.init_grpc_aio()


def _quiet(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """The poller wakes every loop of the process (a gRPC server may have another): the one that comes second
    finds nothing to read."""
    error = context.get("exception")
    if not (isinstance(error, OSError) and error.errno in (errno.EAGAIN, errno.EBADF)):
        loop.default_exception_handler(context)
