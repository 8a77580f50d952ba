"""How to reach a Triton server and what is expected of the model there.

Sizes and limits are of the engine that the server hosts; its configuration is checked against them. Plaintext
is for this machine: to any other address it must be allowed by name, or TLS used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from ipaddress import ip_address
from pathlib import Path

from engines.executor.types import ExecutorRole

_ABOVE_ZERO = (
    "requests_max",
    "pass_tokens_max",
    "context_tokens_max",
    "kv_blocks",
    "block_tokens",
    "start_timeout_s",
    "rpc_timeout_s",
    "call_timeout_s",
    "cancel_timeout_s",
    "probe_period_s",
    "reports_max",
)


class CancelBy(StrEnum):
    """How the server is told to stop a call; what it does not end in time is cut off by the other way."""

    STOP_REQUEST = "stop_request"  # a request with `stop` and the same id: the call's own end is still heard
    STREAM = "stream"  # its stream is cancelled: the server finds out, unheard, at its next look


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM. root_certificates: None takes gRPC's own. key and chain: for a client certificate."""

    root_certificates: Path | None = None
    private_key: Path | None = None
    certificate_chain: Path | None = None

    def __post_init__(self) -> None:
        if (self.private_key is None) != (self.certificate_chain is None):
            raise ValueError("tls: private_key and certificate_chain belong together; give both or neither")
        for name in self.__slots__:
            path = getattr(self, name)
            if path is not None and not path.is_file():
                raise ValueError(f"tls: {name}: no file {path}")


@dataclass(frozen=True, slots=True)
class TritonOptions:
    """One model of one server.

    url: host:port or unix:path. fingerprint: bundle id; the server's model must carry the same
    (`engines.triton_tensors.FINGERPRINT`), unless `check_fingerprint` is off. pass_tokens_max: of one pass.
    start_timeout_s: until server and model are ready. rpc_timeout_s: of every question that is answered at
    once. call_timeout_s: of one call, waiting included. cancel_timeout_s: from a stop request to the call's
    end. probe_period_s: how often a silent connection is tried. reports_max: unread reports, then streams
    wait.
    """

    url: str
    model: str
    fingerprint: str
    requests_max: int
    pass_tokens_max: int
    context_tokens_max: int
    kv_blocks: int
    block_tokens: int
    model_version: str = "1"
    role: ExecutorRole = ExecutorRole.BOTH
    check_fingerprint: bool = True
    tls: Tls | None = None
    allow_plaintext: bool = False
    cancel_by: CancelBy = CancelBy.STOP_REQUEST
    start_timeout_s: float = 120.0
    rpc_timeout_s: float = 10.0
    call_timeout_s: float = 600.0
    cancel_timeout_s: float = 2.0
    probe_period_s: float = 5.0
    reports_max: int = 10_000
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)  # may hold a token

    def __post_init__(self) -> None:
        for name in _ABOVE_ZERO:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if not self.model:
            raise ValueError("model must be the name of a model in the server's repository")
        if self.check_fingerprint and not self.fingerprint:
            raise ValueError("fingerprint must be the bundle's id; or set check_fingerprint=False")
        host = host_of(self.url)
        if self.tls is None and not self.allow_plaintext and not is_local(host):
            raise ValueError(
                f"url: plaintext to {host} is refused, since prompts and answers would cross the network "
                "readable; set tls, or allow_plaintext where the network is trusted"
            )


def host_of(url: str) -> str:
    """Host of host:port; the whole of unix:path. Raises ValueError for anything else."""
    if url.startswith("unix:"):
        return url
    host, colon, port = url.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65_536 or "/" in host:
        raise ValueError(f"url must be host:port without a scheme (Triton's gRPC port is 8001), got {url!r}")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError(f"url: an IPv6 address goes into brackets, got {url!r}")
    return host.strip("[]")


def is_local(host: str) -> bool:
    """Whether bytes to `host` stay on this machine."""
    if host.startswith("unix:") or host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
