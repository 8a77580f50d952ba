"""Who may speak plain: loopback and Unix sockets. Everything else is mutual TLS, or refused.

Between the processes of a fleet both ends show a certificate that the fleet's own authority signed; whoever
has one is trusted with everything, so that authority should sign nothing else. Files are PEM and read when a
channel or port is made: a renewed certificate is taken with the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import grpc
import grpc.aio


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """authority: certificates that the other end must be signed by. certificate, key: our own, with chain.
    server_name: the name in the other end's certificate; empty: its address."""

    authority: Path
    certificate: Path
    key: Path
    server_name: str = ""


def is_local(address: str) -> bool:
    """Whether `address` (host:port or unix:...) never leaves this machine."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def channel_opener(
    tls: TlsFiles | None, setting: str, options: Sequence[tuple[str, Any]] = ()
) -> Callable[[str], grpc.aio.Channel]:
    """What makes channels to addresses. setting: what the settings of the files begin with, for errors.

    It raises ValueError for an address that plain text may not go to, or a file that can't be read.
    """

    def opened(address: str) -> grpc.aio.Channel:
        # A pool of its own: the back-off of a broken connection is the caller's, not that of the process.
        chosen = [("grpc.use_local_subchannel_pool", 1), *options]
        if tls is None:
            _refuse_plain(address, setting)
            return grpc.aio.insecure_channel(address, options=chosen)
        if tls.server_name:
            chosen.append(("grpc.ssl_target_name_override", tls.server_name))
        credentials = grpc.ssl_channel_credentials(
            _read(tls.authority, setting, "authority"),
            _read(tls.key, setting, "key"),
            _read(tls.certificate, setting, "certificate"),
        )
        return grpc.aio.secure_channel(address, credentials, options=chosen)

    return opened


def listen(server: grpc.aio.Server, address: str, tls: TlsFiles | None, setting: str) -> int:
    """Add a port; returns the real one. Raises ValueError as `channel_opener`, OSError if it is taken."""
    if tls is None:
        _refuse_plain(address, setting)
    try:
        if tls is None:
            return server.add_insecure_port(address)
        pair = (_read(tls.key, setting, "key"), _read(tls.certificate, setting, "certificate"))
        credentials = grpc.ssl_server_credentials(
            [pair], _read(tls.authority, setting, "authority"), require_client_auth=True
        )
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise OSError(f"can't listen on {address}; choose another port, or 0 for a free one") from error


def _refuse_plain(address: str, setting: str) -> None:
    if not is_local(address):
        raise ValueError(
            f"{setting}: {address} is not on this machine and without TLS anybody could give orders; set "
            f"{setting}_authority, {setting}_certificate and {setting}_key"
        )


def _read(path: Path, setting: str, name: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{setting}_{name}: {path}: {error.strerror}") from error
