"""Membership in an etcd that asks for certificates or passwords."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from aetcd import rpc
from etcd_server import MISSING, EtcdServer, find_etcd, running_etcd
from membership_backends import TIMES, InEtcd, worker

from service.fleet.etcd import EtcdOptions, EtcdTls, etcd_membership
from service.fleet.membership import MembershipRefused, MembershipUnavailable

WORKER = worker()


def certificates(folder: Path) -> tuple[Path, Path, Path]:
    """An authority, and one certificate that it signed for 127.0.0.1, for servers and clients."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl to make certificates with")
    folder.mkdir()
    ca, ca_key = folder / "ca.pem", folder / "ca.key"
    certificate, key, request = folder / "cert.pem", folder / "cert.key", folder / "cert.csr"
    extension = folder / "ext"
    extension.write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    signed = ["-days", "2", "-out", certificate, "-extfile", extension]
    for arguments in (
        ["req", "-x509", *curve, "-keyout", ca_key, "-out", ca, "-subj", "/CN=ca", "-days", "2"],
        ["req", *curve, "-keyout", key, "-out", request, "-subj", "/CN=etcd"],
        ["x509", "-req", "-in", request, "-CA", ca, "-CAkey", ca_key, "-CAcreateserial", *signed],
    ):
        subprocess.run([openssl, *map(str, arguments)], check=True, capture_output=True, timeout=30)
    return ca, certificate, key


async def test_tls_with_certificates_on_both_sides(tmp_path: Path) -> None:
    if find_etcd() is None:
        pytest.skip(MISSING)
    ca, certificate, key = certificates(tmp_path / "good")
    strange, _, _ = certificates(tmp_path / "strange")
    with running_etcd(tmp_path / "etcd", (ca, certificate, key)) as server:
        options = EtcdOptions((server.endpoint,), tls=EtcdTls(ca, certificate, key))
        membership = etcd_membership(options, times=TIMES)
        await membership.open()
        await membership.join(WORKER)
        assert set(membership.snapshot().members) == {"w1"}
        await membership.close()
        refused = [
            etcd_membership(replace(options, tls=tls), times=replace(TIMES, open_timeout_s=0.5)).open()
            for tls in (EtcdTls(strange, certificate, key), EtcdTls(ca), None)
        ]
        for outcome in await asyncio.gather(*refused, return_exceptions=True):
            assert isinstance(outcome, MembershipUnavailable)


async def test_passwords_permissions_and_tokens_that_run_out(own: InEtcd, own_etcd: EtcdServer) -> None:
    prefix = f"/plaserve/{own.fleet}/".encode()
    async with grpc.aio.insecure_channel(own_etcd.endpoint) as channel:
        auth = rpc.AuthStub(channel)
        for name in ("root", "fleet"):
            await auth.UserAdd(rpc.AuthUserAddRequest(name=name, password="secret"))
            await auth.RoleAdd(rpc.AuthRoleAddRequest(name=name))
            await auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user=name, role=name))
        permission = rpc.Permission(
            permType=rpc.Permission.READWRITE, key=prefix, range_end=prefix[:-1] + b"0"
        )
        await auth.RoleGrantPermission(rpc.AuthRoleGrantPermissionRequest(name="fleet", perm=permission))
        await auth.AuthEnable(rpc.AuthEnableRequest())

    with pytest.raises(MembershipRefused):
        await etcd_membership(replace(own.options, username="fleet", password="wrong"), times=TIMES).open()
    with pytest.raises(MembershipRefused):
        await etcd_membership(own.options, times=TIMES).open()
    own.options = replace(own.options, username="fleet", password="secret")
    with pytest.raises(MembershipRefused, match="permission denied"):
        await etcd_membership(own.options, fleet="other", times=TIMES).open()

    membership = await own.connect()
    lease = await membership.join(WORKER)
    membership._store._token = "run-out"
    await lease.update(facts={"a": 1})
    assert membership.snapshot().members["w1"].facts == {"a": 1}
    assert membership._store._token not in ("", "run-out")
