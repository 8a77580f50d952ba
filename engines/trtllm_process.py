"""One life of a child process: started, connected, heard, ended.

The child runs another interpreter with another environment. Of this project it sees the `engines` package and
nothing else: its private directory has a symlink to that and the socket, and is the whole PYTHONPATH. What
the service has installed beside `engines` must not shadow the child's own numpy and torch.

Two threads. The *keeper* starts the child and reads what it prints; it lives as long as the child, since the
kernel ends the child with the thread that started it. The *reader* takes messages, so that nobody waits for
the second half of a message of a stopped process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from logging.handlers import RotatingFileHandler
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path

import engines
from engines.executor.types import BackendUnavailable, LinkLost
from engines.trtllm_child.main import ADDRESS_VARIABLE, KEY_VARIABLE
from engines.trtllm_child.wire import MESSAGE_BYTES_MAX, Close, Message, WireError, decode, encode

# What a child may know of the environment: where the driver, the libraries, the caches and the links are.
_PASSED = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR")
_PASSED_PREFIXES = (
    *("CUDA_", "NVIDIA_", "LD_", "TRTLLM_", "TLLM_", "NCCL_", "UCX_", "NIXL_", "OMPI_MCA_"),
    *("HF_", "TORCH", "TRITON_", "FLASHINFER_", "LC_"),
)
_POLL_S = 0.1
_HELLO_S = 5.0  # for a process that called to say who it is
_MESSAGES_MAX = 4_096  # heard and not yet taken; beyond it the child waits
_SOCKET_PATH_MAX = 100  # bytes; the kernel takes 107
INTERRUPTED = "the service is stopping"


@dataclass(frozen=True, slots=True)
class ChildSettings:
    """How a child is kept.

    start_timeout_s: to load the engine and answer its first request. send_timeout_s: for a child that takes
    no message. close_grace_s: for the executor's shutdown, then for each stronger way. printed_bytes: of its
    last output that are kept. log: file that its output goes to, with the one before at most twice log_bytes.
    environment: added to the child's; PYTHONPATH is put behind the private directory.
    """

    start_timeout_s: float = 600.0
    send_timeout_s: float = 5.0
    close_grace_s: float = 5.0
    printed_bytes: int = 65_536
    log: Path | None = None
    log_bytes: int = 16_000_000
    environment: Mapping[str, str] = field(default_factory=dict)


class Child:
    """Raises BackendUnavailable where the interpreter can't be started."""

    def __init__(self, python: Path, device: int, settings: ChildSettings) -> None:
        self._settings = settings
        self._printed: deque[bytes] = deque()
        self._printed_bytes = 0
        self._heard: queue.Queue[Message | LinkLost] = queue.Queue(_MESSAGES_MAX)
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._interrupted = threading.Event()
        self._failure = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._reader: threading.Thread | None = None
        self._end_of_messages: LinkLost | None = None
        self.exit_text = "runs"
        self._key = secrets.token_bytes(32)
        environment = _environment(settings.environment, device)
        self._directory = _private_directory()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        address = str(self._directory / "socket")
        self._listener.bind(address)
        self._listener.listen(1)
        self._listener.settimeout(_POLL_S)
        environment |= {ADDRESS_VARIABLE: address, KEY_VARIABLE: self._key.hex()}
        paths = [str(self._directory), *filter(None, [settings.environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        command = [str(python), "-u", "-P", "-m", "engines.trtllm_child"]
        self._keeper = threading.Thread(
            target=self._keep, args=(command, environment), name="trtllm-keeper", daemon=True
        )
        self._keeper.start()
        self._ready.wait()
        if self._process is None:
            self._stop.set()
            self._put_away()
            raise BackendUnavailable(
                f"{python} can't be started: {self._failure}",
                "name the python of the environment that has TensorRT-LLM",
            )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    # --- talk ---

    def connect(self, deadline: float) -> None:
        """Wait for the child to call. Raises LinkLost."""
        while True:
            try:
                taken, _ = self._listener.accept()
                break
            except TimeoutError:
                if self._interrupted.is_set():
                    raise LinkLost(INTERRUPTED) from None
                if self._has_ended():
                    raise LinkLost("it ended before it was up") from None
                if time.monotonic() >= deadline:
                    raise LinkLost(f"it did not call in {self._settings.start_timeout_s:g} s") from None
        taken.setblocking(True)
        _limit(taken, socket.SO_RCVTIMEO, _HELLO_S)
        _limit(taken, socket.SO_SNDTIMEO, self._settings.send_timeout_s)
        self._connection = Connection(os.dup(taken.fileno()))
        with taken:
            try:
                deliver_challenge(self._connection, self._key)
                answer_challenge(self._connection, self._key)
            except (OSError, EOFError, ValueError, AuthenticationError) as error:
                raise LinkLost(f"it did not say who it is: {error}") from None
            _limit(taken, socket.SO_RCVTIMEO, 0.0)
        self._reader = threading.Thread(target=self._read, name="trtllm-reader", daemon=True)
        self._reader.start()

    def send(self, message: Message) -> None:
        assert self._connection is not None
        try:
            self._connection.send_bytes(encode(message))
        except BlockingIOError:
            raise LinkLost(f"it took no message for {self._settings.send_timeout_s:g} s") from None
        except OSError as error:
            raise LinkLost(f"its socket is closed ({error.strerror or error})") from None

    def hear(self, timeout_s: float) -> Message | None:
        """Raises LinkLost, again and again, after the last message."""
        if self._end_of_messages is not None:
            raise self._end_of_messages
        try:
            heard = self._heard.get(timeout=timeout_s) if timeout_s > 0 else self._heard.get_nowait()
        except queue.Empty:
            return None
        if isinstance(heard, LinkLost):
            self._end_of_messages = heard
            raise heard
        return heard

    def interrupt(self) -> None:
        """From any thread: who waits in `connect` or `hear` is told."""
        self._interrupted.set()
        with contextlib.suppress(queue.Full):  # then nobody waits
            self._heard.put_nowait(LinkLost(INTERRUPTED))

    def _read(self) -> None:
        assert self._connection is not None
        why: str | None = None
        try:
            while not self._stop.is_set():
                if self._connection.poll(_POLL_S):
                    if not self._give(decode(self._connection.recv_bytes(MESSAGE_BYTES_MAX))):
                        return
                elif self._has_ended() and not self._connection.poll(0):
                    raise EOFError  # a process that it forked may hold its socket open
        except EOFError:
            why = "its socket closed"
        except WireError as error:
            why = f"it sent garbage: {error}"
        except OSError as error:
            why = f"its socket failed: {error}"
        except Exception as error:
            why = f"its messages can't be read: {error}"
        self._give(LinkLost(why or "it was closed"))

    def _give(self, heard: Message | LinkLost) -> bool:
        while not self._stop.is_set():
            with contextlib.suppress(queue.Full):
                self._heard.put(heard, timeout=_POLL_S)
                return True
        return False

    # --- the process ---

    def _keep(self, command: list[str], environment: dict[str, str]) -> None:
        """Start it, read what it prints to the end, and stay until it is put away."""
        try:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C at the service is for the service
            )
        except (OSError, ValueError) as error:
            self._failure = str(error)
        self._ready.set()
        if self._process is None or self._process.stdout is None:
            return
        log = _log(self._settings)
        try:
            while chunk := os.read(self._process.stdout.fileno(), 65_536):
                self._print(chunk)
                if log is not None:
                    text = chunk.decode("utf-8", "replace")
                    log.handle(logging.makeLogRecord({"msg": text}))
        except OSError:
            pass
        finally:
            self._process.stdout.close()
            if log is not None:
                log.close()
        self._stop.wait()
        self._process.wait()

    def _print(self, chunk: bytes) -> None:
        self._printed.append(chunk)
        self._printed_bytes += len(chunk)
        while len(self._printed) > 1 and self._printed_bytes > self._settings.printed_bytes:
            self._printed_bytes -= len(self._printed.popleft())

    def last_lines(self, lines: int = 20) -> str:
        text = b"".join(tuple(self._printed))[-self._settings.printed_bytes :].decode("utf-8", "replace")
        return "\n".join(text.rstrip().splitlines()[-lines:])

    def _has_ended(self) -> bool:
        """Looks without reaping: until it is reaped nobody else can have its pid."""
        if self._process is None or self._process.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def ended_by_itself(self, wait_s: float) -> bool:
        deadline = time.monotonic() + wait_s
        while not (ended := self._has_ended()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return ended

    def ask_to_close(self, grace_s: float) -> bool:
        if self._connection is None or self._has_ended():
            return False
        try:
            self.send(Close(grace_s))
        except LinkLost:
            return False
        return True

    def end(self, patience_s: float, grace_s: float) -> None:
        """Wait, then tell it to end, then make it; nothing of it is left."""
        process = self._process
        assert process is not None
        if not self.ended_by_itself(patience_s + 1.0 if patience_s else 0.0):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
            self.ended_by_itself(grace_s)
        # Processes that it started are in its group; the group's number is ours until the child is reaped.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # the keeper reaps what takes longer
            process.wait(grace_s)
            self.exit_text = _exit_text(process.returncode)
        self._stop.set()
        self._put_away()

    def _put_away(self) -> None:
        if self._reader is not None:
            self._reader.join(2.0)
        self._keeper.join(2.0)
        if self._connection is not None:
            self._connection.close()
        self._listener.close()  # what it prints is the keeper's: a process that got away may hold that open
        shutil.rmtree(self._directory, ignore_errors=True)


def _limit(sock: socket.socket, option: int, seconds: float) -> None:
    """How long a read or write may take; 0: for ever."""
    sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _private_directory() -> Path:
    """0700, with a symlink to this project's `engines`, so that the child finds that and nothing else."""
    directory = Path(tempfile.mkdtemp(prefix="plaserve-"))
    if len(str(directory).encode()) > _SOCKET_PATH_MAX - len("/socket"):
        directory.rmdir()
        directory = Path(tempfile.mkdtemp(prefix="plaserve-", dir="/tmp"))
    (directory / "engines").symlink_to(Path(str(engines.__file__)).resolve().parent)
    return directory


def _environment(added: Mapping[str, str], device: int) -> dict[str, str]:
    """device: index among those that this process sees; the child sees that one alone."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in _PASSED or name.startswith(_PASSED_PREFIXES)
    }
    visible = [each for each in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.strip()]
    if visible and device >= len(visible):
        raise BackendUnavailable(
            f"device {device} is not there: CUDA_VISIBLE_DEVICES names {len(visible)}",
            "choose a lower device, or make more visible",
        )
    if visible:
        environment["CUDA_VISIBLE_DEVICES"] = visible[device].strip()
    else:  # set and empty means none, and stays so
        environment.setdefault("CUDA_VISIBLE_DEVICES", str(device))
    return environment | dict(added)


def _log(settings: ChildSettings) -> RotatingFileHandler | None:
    if settings.log is None:
        return None
    try:
        settings.log.parent.mkdir(parents=True, exist_ok=True)
        handler = RotatingFileHandler(settings.log, maxBytes=settings.log_bytes, backupCount=1)
    except OSError as error:
        logging.getLogger(__name__).warning("no log of the TensorRT-LLM child: %s", error)
        return None
    handler.terminator = ""  # what is read has its own ends of lines
    return handler
