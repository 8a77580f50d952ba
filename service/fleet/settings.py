"""Settings of membership: which service keeps it, how to reach it, and its times."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator


class FleetSettings(BaseModel):
    """Membership of a fleet."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    membership: Literal["memory", "etcd"] = Field(
        "memory",
        description="Who keeps it: memory (all in one process), etcd (processes that find each other).",
    )
    name: str = Field(
        "default",
        pattern=r"^[A-Za-z0-9._:@-]{1,128}$",
        description="Name of the fleet; fleets of other names in one etcd do not see each other.",
    )
    prefix: str = Field(
        "/plaserve", pattern=r"^/.*[^/]$", description="Keys begin with it (etcd); permissions go by it."
    )
    endpoints: tuple[str, ...] = Field(
        ("127.0.0.1:2379",), min_length=1, description="host:port of etcd's members, tried in turn (etcd)."
    )
    lease_ttl_s: float = Field(
        10.0, ge=2, description="A dead process is noticed after it; below 2 s etcd rounds up."
    )
    call_timeout_s: float = Field(2.0, gt=0, description="Deadline of each call (etcd).")
    stale_after_s: float = Field(
        3.0, gt=0, description="Without a word from etcd for so long, what is known is marked stale."
    )
    open_timeout_s: float = Field(10.0, gt=0, description="At the start: until the fleet is read.")
    username: str = Field("", description="User of etcd; empty: no authentication.")
    password: SecretStr = Field(SecretStr(""), description="Its password; best given in the environment.")
    tls: bool = Field(False, description="Speak TLS to etcd.")
    tls_ca: Path | None = Field(None, description="Root certificates, PEM; unset: the system's.")
    tls_cert: Path | None = Field(None, description="Client certificate chain, PEM.")
    tls_key: Path | None = Field(None, description="Private key of the client certificate, PEM.")
    tls_name: str = Field("", description="Name to expect in etcd's certificate; empty: the endpoint's host.")
    allow_plaintext: bool = Field(False, description="Speak to etcd on another machine without TLS.")

    @field_validator("endpoints")
    @classmethod
    def _endpoints_are_addresses(cls, endpoints: tuple[str, ...]) -> tuple[str, ...]:
        for endpoint in endpoints:
            host, colon, port = endpoint.rpartition(":")
            if not colon or not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65_536:
                raise ValueError(f"each must be host:port without a scheme, got {endpoint!r}")
        return endpoints

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.lease_ttl_s < 2.0 * self.call_timeout_s:
            raise ValueError(
                f"lease_ttl_s ({self.lease_ttl_s}) must be at least twice call_timeout_s "
                f"({self.call_timeout_s}), or one slow renewal ends the lease"
            )
        if bool(self.username) != bool(self.password.get_secret_value()):
            raise ValueError("username and password go together")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together")
        if not self.tls and (self.tls_ca or self.tls_cert or self.tls_name):
            raise ValueError("tls_ca, tls_cert, tls_key and tls_name need tls = true")
        far = [e for e in self.endpoints if not _is_local(e.rpartition(":")[0])]
        if self.membership == "etcd" and far and not self.tls and not self.allow_plaintext:
            raise ValueError(
                f"endpoints: plaintext to {far[0]} is refused, since whoever reads or changes it there rules "
                "the fleet; set tls, or allow_plaintext where the network is trusted"
            )
        return self


def _is_local(host: str) -> bool:
    """Whether bytes to `host` stay on this machine."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
