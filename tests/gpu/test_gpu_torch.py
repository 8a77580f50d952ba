"""The torch engine on CUDA: kernels against attention one by one, graphs against eager, CPU against GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.models import ModelShape
from engines.torch_cuda import TorchCudaEngine, TorchOptions
from engines.torch_cuda_batch import Piece, Slots, pack
from engines.types import EngineRequest, Pass, PassItem, PassKind

pytestmark = pytest.mark.gpu

SHAPE = ModelShape("small", 3, 256, 512, 8, 2, 64, 1009)
SLOTS = Slots(blocks=64, block_tokens=16, scratch=512)
REQUESTS = ((40, 0), (1, 90), (17, 33), (64, 0))  # (new, history)


def model(device: str, dtype: str, arrays: dict[str, Any] | None = None) -> Any:
    from engines.torch_cuda_model import DecoderConfig, TorchModel, given_weights, random_weights

    config = DecoderConfig(SHAPE, 512, qkv_bias=True)
    weights = (
        given_weights(config, arrays, device, dtype) if arrays else random_weights(config, device, dtype)
    )
    return TorchModel(config, weights, SLOTS)


def random_arrays() -> dict[str, Any]:
    from engines.torch_cuda_model import DecoderConfig, weight_shapes

    rng = np.random.default_rng(3)
    return {
        name: rng.normal(1.0 if "norm" in name else 0.0, size[-1] ** -0.5, size).astype(np.float32)
        for name, size in weight_shapes(DecoderConfig(SHAPE, 512, qkv_bias=True)).items()
    }


def batch(made: Any, seed: int) -> Any:
    """Requests with the history computed, blocks interleaved."""
    rng, pieces = np.random.default_rng(seed), []
    for index, (new, past) in enumerate(REQUESTS):
        tokens = rng.integers(0, SHAPE.vocab, new + past).tolist()
        own = list(range(index, 64, len(REQUESTS)))
        if past:
            made.forward(pack([Piece(tokens[:past], own, 0, logits=False)], SLOTS))
        pieces.append(Piece(tokens[past:], own, past, logits=True))
    return pack(pieces, SLOTS)


def test_the_kernel_for_packed_rows_is_there(device: str) -> None:
    """Where it is not, passes are launched request by request, and every figure would be of that."""
    if device == "cpu":
        pytest.skip("of CUDA")
    for captured in (False, True):
        chosen, refused = model(device, "bf16").choose(captured=captured)
        assert chosen.name in ("flash", "varlen"), refused


def test_f32_logits_are_those_of_the_cpu(device: str) -> None:
    arrays = random_arrays()
    here, there = model("cpu", "f32", arrays), model(device, "f32", arrays)
    expected = here.forward(batch(here, 1)).numpy()
    found = there.forward(batch(there, 1)).cpu().numpy()
    np.testing.assert_allclose(found, expected, atol=1e-3, rtol=1e-3)


def test_bf16_logits_are_near_those_of_f32(device: str) -> None:
    arrays = random_arrays()
    exact, near = model(device, "f32", arrays), model(device, "bf16", arrays)
    expected = exact.forward(batch(exact, 1)).float().cpu().numpy()
    found = near.forward(batch(near, 1)).float().cpu().numpy()
    assert 0.0 < np.abs(found - expected).max() < 0.1 * np.abs(expected).max()


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_a_replayed_graph_gives_the_logits_of_an_eager_pass(device: str, dtype: str) -> None:
    from engines.torch_cuda_graphs import FixedPass, FixedShape

    cuda, made = device.startswith("cuda"), model(device, dtype)
    attention = made.choose(captured=cuda)[0]
    fixed = FixedPass(made, FixedShape(160, 512, 6), attention)
    fixed.prepare(capture=cuda)
    assert fixed.captured is cuda
    for seed in range(3):  # a graph that held on to its first inputs would fail at the second
        inputs = batch(made, seed)
        eager = made.forward(inputs).float().cpu().numpy()
        replayed = fixed.run(inputs).float().cpu().numpy()
        close = 0.03 * np.abs(eager).max() if dtype == "bf16" else 1e-3
        np.testing.assert_allclose(replayed, eager, atol=close)


def test_graphs_of_all_classes_live_beside_each_other(device: str) -> None:
    """They share memory: replaying one must not spoil what another gives afterwards."""
    from engines.profiles import Profiles
    from engines.torch_cuda_model import DecoderConfig
    from engines.types import Layout, Padding

    answers = {}
    eager = Profiles(Layout.PACKED, Padding.NOTHING, (128,))
    classes = Profiles(Layout.PACKED, Padding.CLASS, (8, 32, 128), (0, 256))
    for name, profiles in (("eager", eager), ("graphs", classes)):
        options = TorchOptions(device, "f32", profiles, kv_capacity_tokens=2048, block_tokens=16)
        engine = TorchCudaEngine.load(DecoderConfig(SHAPE, 256), options, random_arrays_without_biases())
        tokens = []
        for number, length in enumerate((5, 100, 20, 7)):
            request = tuple(np.random.default_rng(number).integers(0, SHAPE.vocab, length).tolist())
            engine.submit(EngineRequest(f"r{number}", request, 4))
            kind, new, past = PassKind.PREFILL, length, 0
            for step in range(4):
                item = PassItem(f"r{number}", new, past)
                tokens.append(engine.execute(Pass(10 * number + step, kind, (item,))).items[0].token)
                kind, new, past = PassKind.DECODE, 1, length + step
        answers[name] = tokens
        engine.close()
    assert answers["graphs"] == answers["eager"]


def random_arrays_without_biases() -> dict[str, Any]:
    return {name: array for name, array in random_arrays().items() if not name.endswith(".bias")}


def test_a_measurement_runs(device: str, tmp_path: Path) -> None:
    from build_scripts.gpu.measure import measure
    from build_scripts.gpu.summary import read_rows, summarize

    measure(tmp_path / "run", ["qwen2.5-7b"], 1.0, device, "tiny")
    print(summarize(tmp_path / "run"))
    for part in ("prefill", "launch", "graphs", "interference", "kernels"):
        assert read_rows(tmp_path / "run" / f"{part}.csv"), part
    if device.startswith("cuda"):
        assert read_rows(tmp_path / "run" / "sm_split.csv")  # two streams at least
