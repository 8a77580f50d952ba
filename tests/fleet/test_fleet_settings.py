"""Settings of membership: what fits together, and what is made of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from service.core.progress import Health
from service.core.settings import SchedulerSettings
from service.fleet.backends import make_membership
from service.fleet.etcd import EtcdStore
from service.fleet.membership import Member, MemberKind
from service.fleet.memory import MemoryFleet, MemoryStore
from service.fleet.settings import FleetSettings
from service.settings import FleetOptions, Settings, SettingsError
from service.wiring_fleet import link_of, place_of, run_controller


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"membership": "zookeeper"}, "membership"),
        ({"endpoints": ()}, "endpoints"),
        ({"endpoints": ("http://127.0.0.1:2379",)}, "without a scheme"),
        ({"endpoints": ("127.0.0.1:0",)}, "host:port"),
        ({"name": "a/b"}, "name"),
        ({"prefix": "plaserve"}, "prefix"),
        ({"lease_ttl_s": 1.0}, "lease_ttl_s"),
        ({"lease_ttl_s": 5.0, "call_timeout_s": 3.0}, "at least twice call_timeout_s"),
        ({"username": "u"}, "username and password"),
        ({"tls": True, "tls_cert": "a.pem"}, "tls_cert and tls_key"),
        ({"tls_ca": "a.pem"}, "need tls"),
        ({"membership": "etcd", "endpoints": ("127.0.0.1:1", "10.0.0.1:2379")}, "plaintext to 10.0.0.1:2379"),
        ({"lease": 3}, "lease"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        FleetSettings(**given)


def test_plaintext_stays_on_this_machine_unless_allowed() -> None:
    far = {"membership": "etcd", "endpoints": ("etcd.example:2379",)}
    assert FleetSettings(**far, allow_plaintext=True).endpoints == ("etcd.example:2379",)
    assert FleetSettings(**far, tls=True).tls
    for near in ("localhost:1", "127.0.0.9:1", "[::1]:1"):
        FleetSettings(membership="etcd", endpoints=(near,))


def test_a_password_does_not_show() -> None:
    settings = FleetSettings(username="u", password="secret")  # type: ignore[arg-type]
    assert "secret" not in f"{settings!r} {settings} {settings.model_dump_json()}"


async def test_members_of_one_process_share_its_fleet() -> None:
    service = MemoryFleet()
    one, two = (make_membership(FleetSettings(), service) for _ in range(2))
    await one.open()
    await two.open()
    await one.join(Member("w", MemberKind.WORKER, "a:1"))
    async for snapshot in two.watch():
        if "w" in snapshot.members:
            break
    await one.close()
    await two.close()


async def test_the_backend_is_the_one_that_is_named(tmp_path: Path) -> None:
    assert isinstance(make_membership(FleetSettings())._store, MemoryStore)
    etcd = FleetSettings(membership="etcd", endpoints=("127.0.0.1:2379", "127.0.0.1:2380"))
    assert isinstance(make_membership(etcd)._store, EtcdStore)
    with pytest.raises(FileNotFoundError):
        make_membership(FleetSettings(membership="etcd", tls=True, tls_ca=tmp_path / "missing.pem"))


@pytest.mark.parametrize(("ratio", "floor_s"), [(30.0, 10.0), (2.0, 0.5), (0.0, 10.0)])
def test_the_rule_of_hangs_is_the_schedulers(ratio: float, floor_s: float) -> None:
    link = link_of(replace(SchedulerSettings(), hang_ratio=ratio, hang_s_min=floor_s))
    for predicted_s in (0.0, 0.01, 3.0):
        limit_s = max(floor_s, ratio * predicted_s) if ratio else 1e6
        assert link.hang.verdict(predicted_s, 0.99 * limit_s) is not Health.HUNG
        assert (link.hang.verdict(predicted_s, 1.01 * limit_s) is Health.HUNG) is bool(ratio)


@pytest.mark.parametrize(
    ("given", "shards"),
    [("a", ("a",)), ("a,b", ("a", "b")), (["a", "b"], ("a", "b")), ("*", ("*",)), ("1", ("1",))],
)
def test_a_front_end_may_have_several_shards_and_others_one(given: Any, shards: tuple[str, ...]) -> None:
    options = FleetOptions(shard=given)
    assert options.shards == shards
    assert place_of(options, "frontend").shard == ",".join(shards)
    for kind in ("worker", "scheduler"):
        if shards in (("a",), ("1",)):
            assert place_of(options, kind).shard == shards[0]
        else:
            with pytest.raises(SettingsError, match=rf"fleet\.shard: a {kind} is of one shard"):
                place_of(options, kind)


@pytest.mark.parametrize("given", ["", "a,", ",a", "a/b", "a,*", [], ["a", 1], "x" * 101])
def test_a_bad_shard_is_refused_by_name(given: Any) -> None:
    with pytest.raises(ValidationError, match="shard"):
        FleetOptions(shard=given)


async def test_a_controller_that_looks_too_seldom_is_refused() -> None:
    """A scheduler would take each of its looks for the first, and nothing would ever be decided."""
    settings = Settings(policy="plaserve:period_s=10")
    with pytest.raises(SettingsError, match="period_s is 10"):
        await run_controller(settings, lambda address: None)
