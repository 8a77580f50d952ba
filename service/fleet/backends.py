"""The choice of who keeps membership, by settings."""

from __future__ import annotations

from service.fleet.membership import Membership
from service.fleet.memory import MemoryFleet
from service.fleet.settings import FleetSettings
from service.fleet.stored import MembershipTimes


def make_membership(settings: FleetSettings, memory: MemoryFleet | None = None) -> Membership:
    """A membership by settings, not yet opened.

    memory: the fleet of this process, shared by all who are in it (membership = memory); None: a new one.
    Raises OSError when a certificate can't be read.
    """
    times = MembershipTimes(
        ttl_s=settings.lease_ttl_s,
        stale_after_s=settings.stale_after_s,
        settle_s=min(1.0, settings.call_timeout_s),
        open_timeout_s=settings.open_timeout_s,
    )
    if settings.membership == "memory":
        return (memory or MemoryFleet()).membership(settings.name, times, settings.prefix)
    from service.fleet.etcd import EtcdOptions, EtcdTls, etcd_membership

    tls = EtcdTls(settings.tls_ca, settings.tls_cert, settings.tls_key, settings.tls_name)
    options = EtcdOptions(
        endpoints=settings.endpoints,
        tls=tls if settings.tls else None,
        username=settings.username,
        password=settings.password.get_secret_value(),
        call_timeout_s=settings.call_timeout_s,
        silence_s=settings.stale_after_s,
    )
    return etcd_membership(options, fleet=settings.name, root=settings.prefix, times=times)
