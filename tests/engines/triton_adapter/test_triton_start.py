"""What a link refuses before it sends a call: addresses, files, servers and models that do not fit."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from build_scripts.trtllm.triton_repository import read_config
from engines.executor.types import BackendUnavailable, Call, CallKind, ExecutorRole, LinkLost
from engines.triton_check import check_config
from engines.triton_link import TritonLink
from engines.triton_messages import SENT
from engines.triton_options import Tls, is_local
from tests.engines.triton_adapter.conftest import Serve
from tests.executor_fakes.triton_small import options_for

# --- options ---


@pytest.mark.parametrize("url", ["127.0.0.1:8001", "localhost:8001", "[::1]:8001", "unix:/run/triton"])
def test_plaintext_stays_on_this_machine(url: str) -> None:
    assert options_for(url).tls is None


@pytest.mark.parametrize("url", ["10.0.0.7:8001", "triton.example:8001", "[2001:db8::1]:8001"])
def test_plaintext_to_elsewhere_must_be_allowed_by_name(url: str) -> None:
    with pytest.raises(ValueError, match=r"plaintext.*tls.*allow_plaintext"):
        options_for(url)
    assert options_for(url, allow_plaintext=True).url == url
    assert options_for(url, tls=Tls()).url == url


def test_a_name_that_only_begins_like_this_machine_is_elsewhere() -> None:
    assert not is_local("localhost.example")
    assert not is_local("127.0.0.1.example")
    assert is_local("127.1.2.3")


@pytest.mark.parametrize(
    "url", ["", "triton", "http://triton:8000", "triton:0", "triton:x", "::1:8001", ":8001"]
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="url"):
        options_for(url, allow_plaintext=True)


@pytest.mark.parametrize(
    ("name", "value"), [("kv_blocks", 0), ("call_timeout_s", 0.0), ("model", ""), ("fingerprint", "")]
)
def test_an_option_that_makes_no_sense_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        options_for("localhost:8001", **{name: value})


def test_files_of_tls_are_looked_for_and_belong_together(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="root_certificates"):
        Tls(root_certificates=tmp_path / "none.pem")
    with pytest.raises(ValueError, match="belong together"):
        Tls(private_key=tmp_path / "key.pem")


def test_headers_are_not_shown() -> None:
    assert "secret" not in repr(options_for("localhost:8001", headers=(("authorization", "secret"),)))


# --- the model's configuration ---


def test_the_repository_that_this_project_writes_fits(directory: Path) -> None:
    for role in ExecutorRole:
        assert check_config(read_config(directory), options_for("localhost:1", role=role))


@pytest.mark.parametrize("name", SENT)
def test_every_tensor_that_is_sent_must_be_there_as_documented(directory: Path, name: str) -> None:
    for change, what in (("remove", "missing"), ("type", "data_type"), ("dims", "dims")):
        config = read_config(directory)
        index = next(i for i, tensor in enumerate(config.input) if tensor.name == name)
        if change == "remove":
            del config.input[index]
        elif change == "type":
            config.input[index].data_type = 13  # TYPE_STRING
        else:
            config.input[index].dims.append(2)
        with pytest.raises(BackendUnavailable, match=rf"input {name} .*{what}"):
            check_config(config, options_for("localhost:1"))


def test_all_that_is_wrong_is_told_at_once(directory: Path) -> None:
    config = read_config(directory)
    config.backend = "python"
    config.max_batch_size = 2
    config.model_transaction_policy.decoupled = False
    config.parameters["enable_kv_cache_reuse"].string_value = "false"
    config.parameters["enable_chunked_context"].string_value = "false"
    del config.parameters["batch_scheduler_policy"]
    config.input.add(name="mystery", data_type=8, dims=[1])
    with pytest.raises(BackendUnavailable) as caught:
        check_config(config, options_for("localhost:1"))
    for name in (
        "backend",
        "max_batch_size",
        "decoupled",
        "enable_kv_cache_reuse",
        "enable_chunked_context",
        "batch_scheduler_policy",
        "mystery",
    ):
        assert name in caught.value.reason


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"fingerprint": "bundle-2"}, "plaserve_fingerprint"),
        ({"block_tokens": 16}, "plaserve_block_tokens"),
        ({"kv_blocks": 25}, "max_tokens_in_paged_kv_cache"),
        ({"requests_max": 5}, "max_batch_size"),
    ],
)
def test_a_server_of_another_bundle_is_refused(
    serve: Serve, connect: Callable[..., TritonLink], other: dict[str, Any], named: str
) -> None:
    with pytest.raises(BackendUnavailable, match=named) as caught:
        connect(serve(), **other)
    assert "triton_repository" in caught.value.remedy


def test_the_fingerprint_may_be_left_unchecked(directory: Path) -> None:
    options = options_for("localhost:1", fingerprint="", check_fingerprint=False)
    assert check_config(read_config(directory), options)


def test_a_hand_over_needs_its_output(directory: Path) -> None:
    config = read_config(directory)
    index = next(i for i, tensor in enumerate(config.output) if tensor.name == "context_phase_params")
    del config.output[index]
    assert check_config(config, options_for("localhost:1"))
    with pytest.raises(BackendUnavailable, match="output context_phase_params is missing"):
        check_config(config, options_for("localhost:1", role=ExecutorRole.CONTEXT))


def test_without_the_output_reuse_is_said_to_be_unknown(directory: Path) -> None:
    config = read_config(directory)
    index = next(i for i, tensor in enumerate(config.output) if tensor.name == "kv_cache_reused_blocks")
    del config.output[index]
    assert check_config(config, options_for("localhost:1")) is False


# --- the server ---


def test_a_server_that_is_not_there_is_given_its_time(connect: Callable[..., TritonLink]) -> None:
    with pytest.raises(LinkLost, match=r"not ready in 0\.2 s"):
        connect("127.0.0.1:1", start_timeout_s=0.2)


def test_a_start_is_given_up_when_the_service_ends() -> None:
    link = TritonLink(options_for("127.0.0.1:1", start_timeout_s=60.0))
    ending = threading.Timer(0.2, link.interrupt)
    ending.start()
    with pytest.raises(LinkLost, match="the service is stopping"):
        link.start()
    with pytest.raises(LinkLost, match="the service is stopping"):
        link.start()
    ending.join()
    link.close()


@pytest.mark.parametrize(("quirk", "what"), [("live", "not live"), ("ready", "is not ready")])
def test_a_server_or_model_that_is_not_ready_is_told(
    serve: Serve, connect: Callable[..., TritonLink], quirk: str, what: str
) -> None:
    server = serve()
    setattr(server.quirks, quirk, False)
    with pytest.raises(LinkLost, match=what):
        connect(server, start_timeout_s=0.2)


def test_a_model_of_another_name_is_told(serve: Serve, connect: Callable[..., TritonLink]) -> None:
    with pytest.raises(LinkLost, match="model other version 1"):
        connect(serve(), model="other", start_timeout_s=0.2)


# --- TLS ---


def _certificate(directory: Path, name: str, issuer: str | None = None) -> tuple[Path, Path]:
    """Key and certificate for localhost, signed by itself or by `issuer`, with the openssl command."""
    key, made = directory / f"{name}.key", directory / f"{name}.pem"
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
    command += ["-keyout", str(key), "-out", str(made), "-subj", f"/CN={name}", "-days", "2"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    if issuer is not None:
        command += ["-CA", str(directory / f"{issuer}.pem"), "-CAkey", str(directory / f"{issuer}.key")]
        command += ["-addext", "basicConstraints=critical,CA:FALSE"]
    subprocess.run(command, check=True, capture_output=True)
    return key, made


def test_both_sides_of_a_tls_connection_prove_who_they_are(
    serve: Serve, connect: Callable[..., TritonLink], tmp_path: Path
) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make certificates with")
    import grpc

    _, root = _certificate(tmp_path, "root")
    key, chain = _certificate(tmp_path, "server", "root")
    client_key, client_chain = _certificate(tmp_path, "client", "root")
    credentials = grpc.ssl_server_credentials(
        [(key.read_bytes(), chain.read_bytes())], root.read_bytes(), require_client_auth=True
    )
    server = serve(credentials=credentials)
    link = connect(server, tls=Tls(root, client_key, client_chain))
    link.enqueue([Call("a", CallKind.GENERATE, (1, 2, 3), 1)])
    assert link.receive(5.0)
    with pytest.raises(LinkLost, match="not ready"):
        connect(server, tls=Tls(root), start_timeout_s=0.3)
    with pytest.raises(LinkLost, match="not ready"):
        connect(server, start_timeout_s=0.3)
