"""Which machine a GPU bundle opens on, and that finding out loads nothing of CUDA."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engines.bundle_base import CALIBRATION, TOKENIZER, BundleMismatch
from engines.gpu_bundle import check_gpu_bundle_content, gpu_identity, open_gpu_bundle
from engines.gpu_host import Gpu, GpuHost
from tests.engines.gpu_bundles import (
    COST,
    GPU,
    HOST,
    TENSORRT,
    VERSION,
    edit,
    engine_bundle,
    put,
    refusal,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return engine_bundle(tmp_path / "bundle")


def gpu(**changes: Any) -> Gpu:
    return dataclasses.replace(GPU, **changes)


def host(**changes: Any) -> GpuHost:
    return dataclasses.replace(HOST, **changes)


@pytest.mark.parametrize(
    ("here", "field", "found"),
    [
        (host(tensorrt_llm="1.2.0"), "backend.tensorrt_llm", "1.2.0"),
        (host(tensorrt_llm=None, no_versions="no python"), "backend.tensorrt_llm", "no python"),
        (host(tensorrt="10.13.3.9"), "backend.tensorrt", "10.13.3.9"),
        (host(tensorrt=None), "backend.tensorrt", "not installed"),
        (host(gpus=(), no_gpus="nvidia-smi is not installed"), "gpu.name", "nvidia-smi is not installed"),
        (host(gpus=(gpu(name="NVIDIA H100 80GB HBM3"),)), "gpu.name", "H100"),
        (host(gpus=(GPU, gpu(name="NVIDIA T400"))), "gpu.name", "T400"),
        (host(gpus=(gpu(compute_capability="8.9"),)), "gpu.compute_capability", "8.9"),
        (host(gpus=(gpu(memory_bytes=10**8),)), "gpu.memory_bytes", "100000000"),
    ],
)
def test_another_machine_is_refused_by_field(bundle: Path, here: GpuHost, field: str, found: str) -> None:
    error = refusal(bundle, here)
    assert error.field == field
    assert found in str(error.found)


def test_refusals_come_in_order(bundle: Path) -> None:
    """Everything is wrong: mended one by one from the top, the refusals follow the documented order."""
    worst = Gpu("NVIDIA H100", "8.9", 1, "1.1")
    named = dataclasses.replace(worst, name=GPU.name)
    capable = dataclasses.replace(named, compute_capability=GPU.compute_capability)
    mends: tuple[tuple[str, dict[str, Any]], ...] = (
        ("backend.tensorrt_llm", {"tensorrt_llm": VERSION}),
        ("backend.tensorrt", {"tensorrt": TENSORRT}),
        ("gpu.name", {"gpus": (named,)}),
        ("gpu.compute_capability", {"gpus": (capable,)}),
        ("gpu.memory_bytes", {"gpus": (GPU,)}),
    )
    here = GpuHost((worst,), "1.2.0", "9", Path("python"))
    knee = COST.knee_tokens()
    edit(bundle, lambda data: put(data, "cost.knee_tokens", knee + 1), seal=False)
    (bundle / TOKENIZER).write_bytes(b"[]")
    for field, mended in mends:
        assert refusal(bundle, here).field == field
        here = dataclasses.replace(here, **mended)
    assert refusal(bundle, here).field == "bundle_id"
    edit(bundle, lambda data: None, seal=True)
    assert refusal(bundle, here).field == "cost.knee_tokens"
    edit(bundle, lambda data: put(data, "cost.knee_tokens", knee), seal=True)
    assert refusal(bundle, here).field == TOKENIZER
    (bundle / TOKENIZER).write_bytes(b"{}")
    open_gpu_bundle(bundle, host=here)


@pytest.mark.parametrize(("driver", "warns"), [("570.999", False), ("575.1", True), ("57.0", True)])
def test_a_driver_of_another_branch_is_a_warning(bundle: Path, driver: str, warns: bool) -> None:
    opened = open_gpu_bundle(bundle, host=host(gpus=(gpu(driver=driver),)))
    assert opened.reverify is warns
    assert [str(warning) for warning in opened.warnings if driver not in str(warning)] == []
    assert bool(opened.warnings) is warns


@pytest.mark.parametrize(
    "version", ["0.17.0", "1.1.0", "1.3.0rc11", "1.4.0", "1.20.0", "1.2", "1.2.1rc1", ""]
)
def test_a_release_that_is_not_of_the_line_is_refused_wherever_it_is(bundle: Path, version: str) -> None:
    edit(bundle, lambda data: put(data, "backend.tensorrt_llm", version), seal=True)
    error = refusal(bundle, host(tensorrt_llm=version))
    assert error.field == "backend.tensorrt_llm"
    assert "1.2" in error.remedy


def test_a_repackaged_tensorrt_is_the_same(bundle: Path) -> None:
    open_gpu_bundle(bundle, host=host(tensorrt=f"{TENSORRT}.post1"))


def test_two_gpus_are_needed_where_the_model_is_split(bundle: Path) -> None:
    edit(bundle, lambda data: put(data, "backend.tp", 2), seal=True)
    assert "2 GPUs" in str(refusal(bundle).expected)
    # With two, the next refusal: this bundle has no second rank.
    assert refusal(bundle, host(gpus=(GPU, GPU))).field == "engines.sp.directory"


# ----------------------------------------------------------------- no CUDA


BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "tensorrt_llm", "tensorrt", "cuda", "pynvml", "numpy", "fsspec"}:
            raise AssertionError(f"{name} was imported")
sys.meta_path.insert(0, Block())
from pathlib import Path
from engines.bundle_base import BundleMismatch
from engines.gpu_bundle import open_gpu_bundle
from engines.gpu_host import Gpu, GpuHost
"""


def test_neither_opening_nor_refusing_imports_what_loads_cuda(bundle: Path) -> None:
    script = f"""{BLOCK}
path = Path({str(bundle)!r})
here = GpuHost((Gpu({GPU.name!r}, "9.0", {GPU.memory_bytes}, "1.0"),), {VERSION!r}, {TENSORRT!r}, Path("p"))
assert open_gpu_bundle(path, host=here).reverify
try: open_gpu_bundle(path)
except BundleMismatch as error: print(error.field)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("backend.tensorrt_llm", "gpu.name")  # this machine has neither


# ----------------------------------------------------------------- the host


def fake_smi(tmp_path: Path, output: str, status: int = 0) -> str:
    script = tmp_path / "nvidia-smi"
    script.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\nexit {status}\n")
    script.chmod(0o755)
    return str(script)


ROWS = "\n".join(f"{index}, GPU-{index}{index}aa, NVIDIA H200, 9.0, 143771, 570.124.06" for index in range(3))


def test_the_gpus_are_those_of_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    here = GpuHost.current(Path(sys.executable), smi=fake_smi(tmp_path, ROWS))
    assert len(here.gpus) == 3
    assert here.no_gpus == ""
    assert here.gpus[0] == Gpu("NVIDIA H200", "9.0", 143771 * 2**20, "570.124.06", "GPU-00aa")
    assert gpu_identity(here.gpus[0]).memory_bytes == 143771 * 2**20
    assert here.tensorrt_llm is None  # not in this environment


@pytest.mark.parametrize(
    ("visible", "chosen"),
    [
        ("0", [0]),
        ("2,1", [2, 1]),
        ("GPU-11", [1]),
        ("1,-1,0", [1]),
        ("1,7,0", [1]),
        ("", []),
        ("-1", []),
        ("MIG-1", []),
        ("GPU-", []),
    ],
)
def test_visible_devices_are_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str, chosen: list[int]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    here = GpuHost.current(Path(sys.executable), smi=fake_smi(tmp_path, ROWS))
    assert [gpu.uuid for gpu in here.gpus] == [f"GPU-{i}{i}aa" for i in chosen]
    assert ("CUDA_VISIBLE_DEVICES" in here.no_gpus) is not bool(chosen)


@pytest.mark.parametrize(
    ("output", "status"),
    [
        ("Failed to initialize NVML: Driver/library version mismatch", 18),
        ("No devices were found", 6),
        ("0, GPU-1, NVIDIA H200, 9.0, [N/A], 570.1", 0),
        ("something else", 0),
        ("", 0),
    ],
)
def test_no_gpu_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, status: int) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    here = GpuHost.current(tmp_path / "no-python", smi=fake_smi(tmp_path, output, status))
    assert here.gpus == ()
    assert "nvidia-smi" in here.no_gpus
    assert "no-python" in here.no_versions


def test_a_machine_without_a_driver_is_refused_by_name(bundle: Path, tmp_path: Path) -> None:
    here = GpuHost.current(smi=str(tmp_path / "absent"))
    error = refusal(bundle, dataclasses.replace(here, tensorrt_llm=VERSION, tensorrt=TENSORRT))
    assert error.field == "gpu.name"
    assert "not installed" in str(error.found)


def test_a_store_needs_no_machine(bundle: Path) -> None:
    assert check_gpu_bundle_content(bundle).bundle_id
    (bundle / CALIBRATION).write_bytes(b"tokens,mS\n")
    with pytest.raises(BundleMismatch, match=CALIBRATION):
        check_gpu_bundle_content(bundle)
