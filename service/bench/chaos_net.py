"""A network of its own for each process, so that one can be cut off: namespaces on a bridge (root, Linux).

`enter` puts the whole run into a network namespace of its own first, so that nothing of this is seen or left
on the machine, however the run ends. Between such processes links are mutual TLS as between machines; the
certificates are made with openssl and are good for a day.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from service.rpc.tls import TlsFiles

INSIDE = "--inside-network"  # argument of a run that `enter` has started
BRIDGE = "chaos0"
HUB = "10.231.0.1"  # the driver's address on the bridge
NAME = "fleet.chaos"  # in all certificates


class NetworkError(Exception):
    """A namespace or a certificate could not be made."""


def missing() -> str:
    """Why there can be no networks here; empty if there can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "needs root on Linux"
    for tool, package in (("ip", "iproute2"), ("unshare", "util-linux"), ("openssl", "openssl")):
        if shutil.which(tool) is None:
            return f"needs {tool}, Debian: {package}"
    tried = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else f"unshare: {tried.stderr.decode(errors='replace').strip()}"


def enter(module: str, arguments: Sequence[str]) -> None:
    """Begin this program anew, in a network and a mount namespace of its own. Does not return."""
    inner = [sys.executable, "-m", module, *arguments, INSIDE]
    # `ip netns` keeps a file for each name: here they are nobody else's, and gone with the last process.
    begin = 'ip link set lo up && mkdir -p /run/netns && mount -t tmpfs none /run/netns && exec "$@"'
    os.execvp("unshare", ["unshare", "--net", "--mount", "--", "sh", "-c", begin, "sh", *inner])


@dataclass(slots=True)
class Network:
    """Namespaces by the names of their processes."""

    addresses: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, names: Sequence[str]) -> Network:
        """Raises NetworkError."""
        made = cls()
        try:
            _ip("link", "add", BRIDGE, "type", "bridge")
            _ip("addr", "add", f"{HUB}/24", "dev", BRIDGE)
            _ip("link", "set", BRIDGE, "up")
            for number, name in enumerate(names, start=10):
                made._add(name, f"10.231.0.{number}")
        except NetworkError:
            made.close()
            raise
        return made

    def _add(self, name: str, address: str) -> None:
        _ip("netns", "add", name)
        _ip("link", "add", f"v-{name}", "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", f"v-{name}", "master", BRIDGE, "up")
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        _ip("-n", name, "link", "set", "lo", "up")
        self.addresses[name] = address

    def before(self, name: str) -> tuple[str, ...]:
        """Put before a command that is to run there."""
        return ("ip", "netns", "exec", name)

    def cut(self, name: str) -> None:
        """Packets to it and from it vanish; nobody is told."""
        _ip("link", "set", f"v-{name}", "down")

    def heal(self, name: str) -> None:
        _ip("link", "set", f"v-{name}", "up")

    def close(self) -> None:
        """Whatever of it is there; all of it goes with the run in any case."""
        for gone in (*(("netns", "del", name) for name in self.addresses), ("link", "del", BRIDGE)):
            with contextlib.suppress(NetworkError):
                _ip(*gone)
        self.addresses.clear()


def certificates(folder: Path) -> TlsFiles:
    """One authority, and one certificate for all processes. Raises NetworkError."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("authority", "process"):
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        command += ["-nodes", "-days", "3", "-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{NAME}"]
        command += ["-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.pem")]
        if name != "authority":
            signed_by = ("-CA", folder / "authority.pem", "-CAkey", folder / "authority.key")
            command += [str(part) for part in signed_by]
            command += ["-addext", "basicConstraints=critical,CA:FALSE"]
        _run(command)
    return TlsFiles(folder / "authority.pem", folder / "process.pem", folder / "process.key", NAME)


def _ip(*arguments: str) -> None:
    _run(["ip", *arguments])


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        told = done.stderr.decode(errors="replace").strip()
        raise NetworkError(f"{' '.join(command[:4])} ...: {told}")
