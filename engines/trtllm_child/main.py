"""The child process: `python -m engines.trtllm_child`, started by `engines.trtllm_link` and by nobody else.

It connects to its parent's socket, is told what to be, and only then imports tensorrt_llm. After the first
request it says what it is, and from then on two threads work: one takes calls from the parent, the main one
polls the executor and tells what it heard. One moment is one message.

It ends with its parent: the kernel kills it when the parent's keeper thread dies, and the end of the socket
ends it too. An executor's shutdown may block, so it is given a grace and then the process just ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import sys
import threading
import traceback
from importlib import metadata
from multiprocessing.connection import Client, Connection

from engines.executor.types import BackendUnavailable
from engines.trtllm_child.config import ChildConfig, Driver
from engines.trtllm_child.driver import ChildDriver, warm_up
from engines.trtllm_child.guard import PINNED, check_pinned, check_version
from engines.trtllm_child.wire import (
    Cancel,
    Close,
    Configure,
    Enqueue,
    Failed,
    Message,
    Reports,
    Started,
    decode,
    encode,
)

ADDRESS_VARIABLE = "PLASERVE_CHILD_ADDRESS"
KEY_VARIABLE = "PLASERVE_CHILD_KEY"
POLL_S = 0.05  # longest silence of the executor before the parent hears of idle iterations
_PR_SET_PDEATHSIG = 1
_PARENT_GONE, _CLOSED, _BROKEN, _UNAVAILABLE = 3, 0, 1, 4  # exit codes


class Outlet:
    """The sending end; both threads send."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        data = encode(message)
        try:
            with self._lock:
                self._connection.send_bytes(data)
        except OSError:
            os._exit(_PARENT_GONE)


def main() -> int:
    _die_with_parent()
    address, key = os.environ.pop(ADDRESS_VARIABLE), bytes.fromhex(os.environ.pop(KEY_VARIABLE))
    connection = Client(address, family="AF_UNIX", authkey=key)
    outlet = Outlet(connection)
    try:
        first = decode(connection.recv_bytes())
    except (EOFError, OSError):
        return _PARENT_GONE
    if not isinstance(first, Configure):
        print(f"expected Configure, got {type(first).__name__}", file=sys.stderr)  # noqa: T201
        return _BROKEN
    try:
        driver = load(first.config)
        facts = warm_up(driver, first.config)
    except BackendUnavailable as error:
        outlet.send(Failed(error.reason, error.remedy))
        return _leave(_UNAVAILABLE)
    except Exception:
        traceback.print_exc()
        return _leave(_BROKEN)
    outlet.send(Started(facts))
    closing = threading.Event()
    threading.Thread(
        target=_take, args=(connection, driver, outlet, closing), name="calls", daemon=True
    ).start()
    try:
        while not closing.is_set():
            heard = driver.poll(POLL_S)
            if heard.reports or heard.skipped:
                outlet.send(heard)
        driver.shutdown()
    except Exception:
        traceback.print_exc()
        return _leave(_BROKEN)
    return _leave(_CLOSED)


def load(config: ChildConfig) -> ChildDriver:
    """Raises BackendUnavailable; anything else that tensorrt_llm raises at its start."""
    with contextlib.suppress(metadata.PackageNotFoundError):  # refused before it is imported, where known
        check_version(metadata.version("tensorrt_llm"), config.driver)
    try:
        package = importlib.import_module("tensorrt_llm")
    except ImportError as error:
        raise BackendUnavailable(
            f"tensorrt_llm can't be imported by {sys.executable}: {error}",
            f"install TensorRT-LLM {PINNED} there, or name the python of the environment that has it",
        ) from None
    version = str(package.__version__)
    check_version(version, config.driver)
    check_pinned(version, config.version)
    if config.driver is Driver.ENGINE:
        from engines.trtllm_child.executor_driver import ExecutorDriver

        return ExecutorDriver(config, version)
    from engines.trtllm_child.torch_driver import TorchDriver

    return TorchDriver(config, version)


def _take(connection: Connection, driver: ChildDriver, outlet: Outlet, closing: threading.Event) -> None:
    """The thread of calls. The end of the socket is the end of the parent."""
    try:
        while True:
            match decode(connection.recv_bytes()):
                case Enqueue(calls):
                    if refused := tuple(driver.enqueue(calls)):
                        outlet.send(Reports(refused))
                case Cancel(call_id):
                    driver.cancel(call_id)
                case Close(grace_s):
                    last = threading.Timer(grace_s, os._exit, (_CLOSED,))
                    last.daemon = True
                    last.start()
                    closing.set()
                case other:
                    raise TypeError(f"{type(other).__name__} is not for a child")
    except (EOFError, OSError):
        os._exit(_PARENT_GONE)
    except Exception:
        traceback.print_exc()
        _leave(_BROKEN)


def _leave(code: int) -> int:
    """End here and now: threads of the executor may hold an ordinary exit up for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _die_with_parent() -> None:
    """Linux: SIGKILL when the thread that started this process ends. Elsewhere the socket's end must do."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
