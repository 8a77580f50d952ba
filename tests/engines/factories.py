"""Engines under the contract: the simulated one with several capabilities, OpenVINO with a tiny random model,
and those over executors, with fakes of these.

All are small alike, so that one suite can fill them: passes of at most 64 new tokens, contexts of 192 tokens,
24 blocks of 8 tokens or 40 of 32.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from engines import trtllm
from engines import trtllm_torch as trtllm_torch_adapter
from engines.base import Engine
from engines.cost_model import CostModel
from engines.executor.engine import ExecutorEngine
from engines.executor.types import ExecutorRole
from engines.profiles import Profiles
from engines.simulated import SimulatedEngine, SimulatedModel
from engines.trtllm_child.config import ChildConfig, Driver
from engines.trtllm_link import ChildLink
from engines.trtllm_process import ChildSettings
from engines.types import Capabilities, Chunking, DecodeMode, EngineRequest, Layout, Padding, Sampling
from tests.executor_fakes.link import InProcessLink, small_executor
from tests.executor_fakes.package import environment, write_engine, write_package
from tests.executor_fakes.shared_link import SharedLink
from tests.executor_fakes.vices import VIRTUOUS, Vices

if TYPE_CHECKING:
    from engines.openvino_model import PackedModel

VOCABULARY = 97  # of the tiny model; prompts of the suite stay inside it
_OPENVINO_BLOCKS = 40
_T_CLASSES = (8, 16, 32, 64)
_shared: list[SharedLink] = []
_COST = CostModel(1e-5, 1e-5, 1e-9, 1e-6, 0.0, 1e-8, origin="made up: quick to sleep through")


def simulated(
    profiles: Profiles,
    *,
    chunking: Chunking = Chunking.EXTERNAL,
    decode: DecodeMode = DecodeMode.ALTERNATES,
    layer_blocks_max: int = 1,
) -> Engine:
    capabilities = _capabilities(profiles, chunking, decode, layer_blocks_max)
    return SimulatedEngine(SimulatedModel(capabilities, profiles, _COST), sleep=lambda seconds: None)


def _capabilities(
    profiles: Profiles, chunking: Chunking, decode: DecodeMode, layer_blocks_max: int = 1
) -> Capabilities:
    return Capabilities(
        layout=profiles.layout,
        padding=profiles.padding,
        chunking=chunking,
        merges_lanes=chunking is Chunking.PREFIX_REUSE,
        decode=decode,
        requests_max=4,
        context_tokens_max=192,
        block_tokens=8,
        kv_blocks_total=24,
        layer_blocks_max=layer_blocks_max,
    )


def packed_unpadded(directory: Path) -> Engine:
    return simulated(Profiles(Layout.PACKED, Padding.NOTHING, _T_CLASSES))


def packed_in_layer_blocks(directory: Path) -> Engine:
    return simulated(Profiles(Layout.PACKED, Padding.NOTHING, _T_CLASSES), layer_blocks_max=4)


def trtllm_like(directory: Path) -> Engine:
    profiles = Profiles(Layout.PACKED, Padding.NOTHING, _T_CLASSES)
    return simulated(profiles, chunking=Chunking.PREFIX_REUSE, decode=DecodeMode.BESIDE)


def packed_classes(directory: Path) -> Engine:
    return simulated(Profiles(Layout.PACKED, Padding.CLASS, _T_CLASSES, (0, 64, 192, 768), block_mask=True))


def rectangular_cells(directory: Path) -> Engine:
    cells = tuple((length, rows) for length in _T_CLASSES for rows in (1, 2, 4) if length * rows <= 64)
    return simulated(Profiles(Layout.RECTANGULAR, Padding.CELL, _T_CLASSES, cells=cells))


def rectangular_classes(directory: Path) -> Engine:
    return simulated(Profiles(Layout.RECTANGULAR, Padding.CLASS, _T_CLASSES))


def openvino(directory: Path) -> Engine:
    """A random two-layer Llama. It is built and compiled once a directory, each engine has its own blocks."""
    pytest.importorskip("openvino")
    from engines.openvino_cpu import BLOCK_TOKENS, OpenVinoCpuEngine

    profiles = Profiles(Layout.PACKED, Padding.CLASS, (16, 64), (0, 192, 768), block_mask=True)
    return OpenVinoCpuEngine(_compiled(directory), profiles, _OPENVINO_BLOCKS * BLOCK_TOKENS)


def executor(directory: Path, vices: Vices = VIRTUOUS) -> Engine:
    """The engine over executors, over one in this process. Clock and iterations stand still between calls."""
    profiles = Profiles(Layout.PACKED, Padding.NOTHING, _T_CLASSES)
    capabilities = _capabilities(profiles, Chunking.PREFIX_REUSE, DecodeMode.BESIDE)
    link = InProcessLink(partial(small_executor, vices))
    made = ExecutorEngine(link, capabilities, profiles, fingerprint="fake-bundle", clock=link.clock)
    made.start()
    return made


def triton_server(directory: Path) -> Engine:
    """The same executor behind a Triton server on this machine, as still between calls."""
    pytest.importorskip("tritonclient.grpc")
    from tests.executor_fakes.triton_small import stepped_engine

    return stepped_engine(directory, Profiles(Layout.PACKED, Padding.NOTHING, _T_CLASSES))


def executor_counting(directory: Path) -> Engine:
    """The same, where cached tokens fill an iteration as new ones do, and reuse is told last."""
    return executor(directory, Vices(counts_cached=True, late_perf_metrics=True))


def trtllm_s1(directory: Path) -> Engine:
    return _over_a_child(directory, "S1", Driver.ENGINE)


def trtllm_s2(directory: Path) -> Engine:
    return _over_a_child(directory, "S2", Driver.ENGINE)


def trtllm_s3(directory: Path) -> Engine:
    return _over_a_child(directory, "S3", Driver.ENGINE)


def trtllm_torch(directory: Path) -> Engine:
    return _over_a_child(directory, "S3", Driver.TORCH)


def _over_a_child(directory: Path, stratum: str, driver: Driver) -> Engine:
    """The adapter and its child process, over a fake tensorrt_llm with the interface of `stratum`."""
    link, config = _shared_link(directory, stratum, driver)
    adapter = trtllm if driver is Driver.ENGINE else trtllm_torch_adapter
    made = ExecutorEngine(link, adapter.capabilities(config), adapter.profiles(config))
    made.start()
    return made


@cache
def _shared_link(directory: Path, stratum: str, driver: Driver) -> tuple[SharedLink, ChildConfig]:
    package = write_package(directory / "package", stratum)
    engine = write_engine(
        directory / "engine", block_tokens=8, requests=4, pass_tokens=64, context_tokens=192
    )
    config = ChildConfig(
        driver,
        str(engine),
        "1.2.1",
        ExecutorRole.BOTH,
        requests_max=4,
        pass_tokens_max=64,
        context_tokens_max=192,
        block_tokens=8,
        kv_blocks=24,
    )
    settings = ChildSettings(environment=environment(package))
    link = SharedLink(lambda: ChildLink(config, Path(sys.executable), settings))
    _shared.append(link)
    return link, config


def end_shared() -> None:
    """End the processes that engines shared."""
    while _shared:
        _shared.pop().end()
    _shared_link.cache_clear()


@cache
def _compiled(directory: Path) -> PackedModel:
    from engines.openvino_cpu import REQUESTS_MAX
    from engines.openvino_model import MODEL_XML, PackedModel

    path = directory / MODEL_XML
    _write_tiny_model(path)
    return PackedModel(path, blocks=_OPENVINO_BLOCKS, rows_max=REQUESTS_MAX, threads=1, precision="f32")


def _write_tiny_model(path: Path) -> None:
    import numpy as np

    from build_scripts.gguf_model import LlamaConfig, weight_shapes
    from build_scripts.graph import build_graph, save_graph

    config = LlamaConfig(
        layers=2,
        hidden=16,
        ff=32,
        heads=4,
        kv_heads=2,
        head_dim=4,
        vocab=VOCABULARY,
        context_tokens=192,
        rope_base=1e4,
        norm_eps=1e-5,
    )
    rng = np.random.default_rng(0)
    weights = {
        name: rng.normal(0.0, 0.3, shape).astype(np.float32) for name, shape in weight_shapes(config).items()
    }
    save_graph(build_graph(config, weights), path)


def torch_cuda(directory: Path) -> Engine:
    """A random two-layer Llama in f32 on the CPU, every pass of exactly its tokens, in groups of layers."""
    return tiny_torch(Profiles(Layout.PACKED, Padding.NOTHING, _T_CLASSES))


def torch_cuda_classes(directory: Path) -> Engine:
    """The same in the buffers of its classes, as they are captured on a GPU."""
    return tiny_torch(Profiles(Layout.PACKED, Padding.CLASS, (8, 64), (0, 192, 768)))


def tiny_torch(profiles: Profiles, device: str = "cpu", dtype: str = "f32", *, graphs: bool = True) -> Engine:
    pytest.importorskip("torch")
    from engines.models import ModelShape
    from engines.torch_cuda import TorchCudaEngine, TorchOptions
    from engines.torch_cuda_model import DecoderConfig

    shape = ModelShape("tiny", 2, 64, 48, 4, 2, 16, VOCABULARY)
    options = TorchOptions(
        device, dtype, profiles, kv_capacity_tokens=24 * 8, block_tokens=8, requests_max=4, graphs=graphs
    )
    return TorchCudaEngine.load(DecoderConfig(shape, 192, qkv_bias=True), options)


FACTORIES: Mapping[str, Callable[[Path], Engine]] = {
    "packed_unpadded": packed_unpadded,
    "packed_in_layer_blocks": packed_in_layer_blocks,
    "trtllm_like": trtllm_like,
    "packed_classes": packed_classes,
    "rectangular_cells": rectangular_cells,
    "rectangular_classes": rectangular_classes,
    "openvino": openvino,
    "executor": executor,
    "executor_counting": executor_counting,
    "trtllm_s1": trtllm_s1,
    "trtllm_s2": trtllm_s2,
    "trtllm_s3": trtllm_s3,
    "trtllm_torch": trtllm_torch,
    "triton_server": triton_server,
    # Where torch is absent, test_torch_cuda.py says so once; here it would be a line a test.
    **({"torch_cuda": torch_cuda, "torch_cuda_classes": torch_cuda_classes} if find_spec("torch") else {}),
}


def prompt(tokens: int, family: int = 0) -> tuple[int, ...]:
    """Prompts of one family begin alike."""
    return tuple((family * 31 + position * 7 + position // 5) % VOCABULARY for position in range(tokens))


def asked(request_id: str, tokens: int, max_new_tokens: int = 1, family: int = 0) -> EngineRequest:
    return EngineRequest(request_id, prompt(tokens, family), max_new_tokens, Sampling(ignore_eos=True))


def parts_are_requests(engine: Engine) -> bool:
    """Whether a part of a prompt that does not end it must end with a block."""
    return engine.capabilities.chunking is Chunking.PREFIX_REUSE


def batches_by_itself(engine: Engine) -> bool:
    """Whether an executor decides when what runs: a pass may run in several iterations, the tokens of what
    decodes beside it come when they come, and what a part left in the cache may go within the pass."""
    return isinstance(engine, ExecutorEngine)


def part_tokens(engine: Engine, tokens: int, history: int, prompt_tokens: int) -> int:
    """About `tokens` new tokens after `history`, as the engine takes them."""
    end, block = history + tokens, engine.capabilities.block_tokens
    if parts_are_requests(engine) and end < prompt_tokens:
        end = max(end // block, history // block + 1) * block
    return min(end, prompt_tokens) - history


def held_blocks(engine: Engine) -> int:
    stats = engine.stats()
    return stats.kv_blocks_total - stats.kv_blocks_free - stats.kv_blocks_cached
