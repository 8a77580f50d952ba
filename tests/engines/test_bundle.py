"""A bundle opens only where and as it was built, and a refusal names the field, both sides and the remedy."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.bundle import (
    MANIFEST,
    Backend,
    Bundle,
    BundleMismatch,
    Cost,
    CpuIdentity,
    Host,
    Limits,
    Manifest,
    Model,
    Source,
    Text,
    cpu_identity,
    file_entry,
    open_bundle,
)
from engines.cost_model import CostModel
from engines.profiles import Profiles
from engines.types import Layout, Padding

ROOT = Path(__file__).parents[2]
CPU = CpuIdentity(architecture="x86_64", vendor="GenuineIntel", model_name="Xeon", isa=("avx2", "amx_bf16"))
HOST = Host(CPU, "2026.4.1")
FILES = {
    "model.xml": b"<net/>",
    "model.bin": bytes(range(256)),
    "tokenizer.json": b"{}",
    "calibration.csv": b"m\n",
}


def write(path: Path, change: Callable[[Manifest], Manifest] = lambda manifest: manifest) -> Path:
    path.mkdir()
    for name, content in FILES.items():
        (path / name).write_bytes(content)
    manifest = Manifest(
        model=Model(
            name="m",
            architecture="llama",
            parameters=7,
            config={"layers": 2, "norm_eps": 1e-5, "eos_id": None},
            source=Source(package="p==1", file="f", sha256="0" * 64, licence="Apache-2.0"),
        ),
        backend=Backend(
            name="openvino_cpu", library="openvino", version="2026.4.1", precision="bf16", threads=1
        ),
        cpu=CPU,
        profiles=Profiles(Layout.PACKED, Padding.CLASS, (1, 64), (0, 256), block_mask=True),
        limits=Limits(context_tokens_max=256, requests_max=32, block_tokens=32),
        text=Text(chat_template="{{ x }}", bos_id=1, eos_id=2, add_bos=False),
        cost=Cost(
            model=CostModel(0.0, 0.01, 1e-9, 1e-4, 0.0, 1e-7, origin="made up"),
            median_error=0.01,
            worst_error=0.1,
            sample_count=8,
            boundary_tokens=99,
            knee_tokens=400,
            quick=False,
        ),
        files=tuple(file_entry(path / name) for name in sorted(FILES)),
        steps={"fetch": "a"},
    )
    (path / MANIFEST).write_text(change(manifest.sealed()).to_text())
    return path


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest by hand, as somebody might."""
    data = json.loads((path / MANIFEST).read_text())
    change(data)
    (path / MANIFEST).write_text(json.dumps(data, indent=2, sort_keys=True) + "\n")


def refusal(path: Path, host: Host = HOST) -> BundleMismatch:
    with pytest.raises(BundleMismatch) as caught:
        open_bundle(path, host=host)
    error = caught.value
    for part in (error.field, error.expected, error.found, error.remedy, path):
        assert str(part) in str(error)
    assert "plaserve build" in error.remedy
    return error


LATER = (("cost", "model", "part_s", 0.5), ("profiles", "captured", [[8, 1]]))


@pytest.mark.parametrize("where", LATER)
def test_fields_of_later_versions_are_written_only_where_they_say_something(
    bundle: Path, where: tuple[Any, ...]
) -> None:
    """A bundle that was built before they existed is the same text, and opens."""
    *path, name, value = where
    found = json.loads((bundle / MANIFEST).read_text())
    for key in path:
        found = found[key]
    assert name not in found
    open_bundle(bundle, host=HOST)

    def add(data: dict[str, Any]) -> None:
        for key in path:
            data = data[key]
        data[name] = value

    edit(bundle, add)
    assert refusal(bundle).field


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write(tmp_path / "bundle")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("bundles") / "bundle")


def test_what_was_written_is_read(bundle: Path) -> None:
    opened = open_bundle(bundle, host=HOST)
    assert isinstance(opened, Bundle)
    assert opened.manifest.model.config == {"layers": 2, "norm_eps": 1e-5, "eos_id": None}
    assert opened.manifest.cost.model.request_s(64) > 0.0
    assert opened.manifest.profiles.t_class(2) == 64
    assert opened.tokenizer_path.read_bytes() == FILES["tokenizer.json"]


def test_a_manifest_is_written_as_it_always_was(bundle: Path) -> None:
    """Byte for byte as by the first release: another way of writing would refuse every bundle out there."""
    text = (bundle / MANIFEST).read_bytes()
    assert open_bundle(bundle, host=HOST).manifest.bundle_id == (
        "79c8c5be8d16aee8d7d6854295abf3887b7a4ff8db7105b17335a41179c66dd6"
    )
    assert hashlib.sha256(text).hexdigest() == (
        "9b1e15d89382eed135042b7fc38108f82b4fa2b504adde57705e5ac46fe8a253"
    )


@given(st.sampled_from([*FILES, MANIFEST]), st.data())
def test_no_byte_can_change_unnoticed(pristine: Path, name: str, data: st.DataObject) -> None:
    file = pristine / name
    content = file.read_bytes()
    offset = data.draw(st.integers(0, len(content) - 1), label="offset")
    flip = data.draw(st.integers(1, 255), label="flip")
    try:
        file.write_bytes(content[:offset] + bytes([content[offset] ^ flip]) + content[offset + 1 :])
        error = refusal(pristine)
        assert error.field == name or name == MANIFEST
    finally:
        file.write_bytes(content)
    open_bundle(pristine, host=HOST)


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_a_missing_or_shortened_file_is_named(bundle: Path, name: str) -> None:
    content = (bundle / name).read_bytes()
    (bundle / name).write_bytes(content[:-1])
    assert refusal(bundle).field == name
    (bundle / name).unlink()
    assert refusal(bundle).field == name


@pytest.mark.parametrize(
    ("host", "field", "found"),
    [
        (Host(CPU, "2026.5.0"), "backend.version", "2026.5.0"),
        (Host(CPU, "not installed"), "backend.version", "not installed"),
        (Host(CPU.model_copy(update={"vendor": "AuthenticAMD"}), "2026.4.1"), "cpu.vendor", "AuthenticAMD"),
        (Host(CPU.model_copy(update={"model_name": "EPYC"}), "2026.4.1"), "cpu.model_name", "EPYC"),
        (Host(CPU.model_copy(update={"architecture": "aarch64"}), "2026.4.1"), "cpu.architecture", "aarch64"),
        (Host(CPU.model_copy(update={"isa": ("avx2",)}), "2026.4.1"), "cpu.isa", "avx2"),
    ],
)
def test_another_machine_or_library_is_refused_by_field(
    bundle: Path, host: Host, field: str, found: str
) -> None:
    error = refusal(bundle, host)
    assert error.field == field
    assert error.found == found


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda data: data.update(schema_version=2), "schema_version"),
        (lambda data: data.pop("schema_version"), "schema_version"),
        (lambda data: data.update(colour="red"), "colour"),
        (lambda data: data["cpu"].update(socket="LGA"), "cpu.socket"),
        (lambda data: data["cost"]["model"].update(delta=1.0), "cost.model"),
        (lambda data: data["profiles"].update(shape="round"), "profiles"),
        (lambda data: data["cost"]["model"].update(beta=-1.0), "cost.model"),
        (lambda data: data["profiles"].update(t_classes=[64, 1]), "profiles"),
        (lambda data: data["text"].pop("eos_id"), "text.eos_id"),
        (lambda data: data["backend"].update(threads="many"), "backend.threads"),
        (lambda data: data["backend"].update(name="abacus"), "backend.name"),
        (lambda data: data["backend"].update(version="2020.1"), "backend.version"),
        (lambda data: data["cpu"].update(model_name="Z80"), "cpu.model_name"),
        (lambda data: data["files"][0].update(name="../passwd"), "files.0.name"),
        (lambda data: data["cost"].update(knee_tokens=1), "bundle_id"),
        (lambda data: data.update(bundle_id="0" * 64), "bundle_id"),
    ],
)
def test_an_edited_manifest_is_refused_by_field(
    bundle: Path, change: Callable[[dict[str, Any]], None], field: str
) -> None:
    edit(bundle, change)
    assert refusal(bundle).field == field


def test_the_engine_files_must_be_listed(tmp_path: Path) -> None:
    def unlist(manifest: Manifest) -> Manifest:
        kept = tuple(file for file in manifest.files if file.name != "model.bin")
        return manifest.model_copy(update={"files": kept}).sealed()

    assert refusal(write(tmp_path / "bundle", unlist)).field == "files"


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b"null", b'"x"'])
def test_garbage_instead_of_a_manifest_is_refused(bundle: Path, content: bytes) -> None:
    (bundle / MANIFEST).write_bytes(content)
    assert refusal(bundle).field in (MANIFEST, "schema_version")


def test_no_bundle_at_all_says_how_to_make_one(tmp_path: Path) -> None:
    assert refusal(tmp_path / "absent").field == MANIFEST


def test_the_content_decides_the_id(tmp_path: Path) -> None:
    first = open_bundle(write(tmp_path / "a"), host=HOST).manifest
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert open_bundle(tmp_path / "b", host=HOST).manifest.bundle_id == first.bundle_id
    other = first.model_copy(update={"steps": {"fetch": "b"}}).sealed()
    assert other.bundle_id != first.bundle_id


def test_checking_a_bundle_imports_no_engine_library(bundle: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from engines.bundle import open_bundle, BundleMismatch\n"
        f"try: open_bundle(Path({str(bundle)!r}))\n"
        "except BundleMismatch as error: print(error.field)\n"
        "assert not {'openvino', 'numpy', 'scipy', 'tokenizers'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()  # this is not the machine that the bundle names


def test_the_cpu_is_told_from_cpuinfo(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC 9755\n"
        "flags\t\t: fpu avx2 avx512f avx512_bf16 hypervisor\n\nprocessor\t: 1\nmodel name\t: other\n"
    )
    cpu = cpu_identity(cpuinfo)
    assert (cpu.vendor, cpu.model_name) == ("AuthenticAMD", "AMD EPYC 9755")
    assert cpu.isa == ("avx2", "avx512f", "avx512_bf16")
    assert cpu_identity() == cpu_identity()
    assert cpu_identity(tmp_path / "absent").isa == ()
