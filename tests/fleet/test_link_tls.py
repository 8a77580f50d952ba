"""Plain on this machine, mutual TLS between machines, and nothing in between."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
from link_rig import QUICK, SETTING, a_model

from service.core.types import InstanceSpec
from service.fleet.link import OPTIONS, Caller
from service.fleet.remote_worker import RemoteWorker, WorkerUnavailable
from service.fleet.worker_service import WorkerServicer
from service.rpc.tls import TlsFiles, channel_opener, is_local, listen
from service.runtime.worker import TimedRunner


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1:1", True),
        ("127.8.9.1:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("unix:/run/x", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.7:1", False),
        ("worker-0.workers:1", False),
        ("localhost.example:1", False),
        (":1", False),
    ],
)
async def test_plain_text_goes_nowhere_but_to_this_machine(address: str, local: bool) -> None:
    assert is_local(address) is local
    if local:
        await channel_opener(None, SETTING)(address).close()
        return
    for refused in (channel_opener(None, SETTING), lambda a: listen(grpc.aio.server(), a, None, SETTING)):
        with pytest.raises(ValueError, match=r"^fleet\.tls: .*set fleet\.tls_authority"):
            refused(address)


async def test_a_file_that_is_missing_is_named_by_its_setting(tmp_path: Path) -> None:
    files = TlsFiles(tmp_path / "ca.pem", tmp_path / "own.pem", tmp_path / "own.key")
    with pytest.raises(ValueError, match=r"fleet\.tls_authority: .*ca\.pem: No such file"):
        channel_opener(files, SETTING)("10.0.0.7:1")
    with pytest.raises(ValueError, match=r"fleet\.tls_key: .*own\.key"):
        listen(grpc.aio.server(), "127.0.0.1:0", files, SETTING)


async def test_a_port_that_is_taken_is_an_error_of_the_system() -> None:
    first = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    port = listen(first, "127.0.0.1:0", None, SETTING)
    await first.start()
    second = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    with pytest.raises(OSError, match="choose another port"):
        listen(second, f"127.0.0.1:{port}", None, SETTING)
    await first.stop(None)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of an authority and two of its own, and a stranger's."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make certificates with")
    folder = tmp_path_factory.mktemp("certificates")
    _certificate(folder, "ca")
    _certificate(folder, "stranger-ca")
    for name in ("worker", "scheduler"):
        _certificate(folder, name, "ca")
    _certificate(folder, "stranger", "stranger-ca")
    return folder


def _certificate(folder: Path, name: str, issuer: str | None = None) -> None:
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    command += ["-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.pem")]
    command += ["-subj", f"/CN={name}", "-days", "2", "-addext", "subjectAltName=DNS:fleet.test"]
    if issuer is not None:
        command += ["-CA", str(folder / f"{issuer}.pem"), "-CAkey", str(folder / f"{issuer}.key")]
        command += ["-addext", "basicConstraints=critical,CA:FALSE"]
    subprocess.run(command, check=True, capture_output=True)


def _files(folder: Path, name: str, authority: str = "ca", server_name: str = "fleet.test") -> TlsFiles:
    return TlsFiles(folder / f"{authority}.pem", folder / f"{name}.pem", folder / f"{name}.key", server_name)


@asynccontextmanager
async def _worker(files: TlsFiles) -> AsyncIterator[str]:
    model = a_model()
    servicer = WorkerServicer(
        InstanceSpec("w0", model.capabilities, model.profiles, model.cost), TimedRunner(model), QUICK
    )
    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers((servicer.handler(),))
    port = listen(server, "127.0.0.1:0", files, SETTING)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await servicer.close()
        await server.stop(None)


async def _start(address: str, files: TlsFiles | None) -> str:
    """The id of the worker. Raises WorkerUnavailable."""
    settings = type(QUICK)(heartbeat_s=0.05, silence_s=1.0, settle_s=1.0)
    remote = RemoteWorker(address, Caller("s", 1, 1, 0), channel_opener(files, SETTING, OPTIONS), settings)
    try:
        return (await remote.start()).instance_id
    finally:
        await remote.close()


async def test_both_ends_show_a_certificate_of_the_fleet(authority: Path) -> None:
    async with _worker(_files(authority, "worker")) as address:
        assert await _start(address, _files(authority, "scheduler")) == "w0"


@pytest.mark.parametrize("who", ["plain", "a stranger", "of another name"])
async def test_whoever_shows_another_or_none_is_kept_out(authority: Path, who: str) -> None:
    files = {
        "plain": None,
        "a stranger": _files(authority, "stranger"),
        "of another name": _files(authority, "scheduler", server_name="other.test"),
    }[who]
    async with _worker(_files(authority, "worker")) as address:
        with pytest.raises(WorkerUnavailable, match="link: no use of"):
            await _start(address, files)
