"""The torch engine against the numpy oracle: packing, padding, chunks, groups of layers leave tokens be."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from engines.base import EngineError, PassError
from engines.models import ModelShape
from engines.profiles import Profiles
from engines.torch_cuda import CLASS_PROFILES, TorchCudaEngine, TorchOptions
from engines.torch_cuda_attention import check, make_runs, ways
from engines.torch_cuda_batch import Piece, Slots, pack
from engines.torch_cuda_graphs import FixedPass, FixedShape
from engines.torch_cuda_model import DecoderConfig, TorchModel, given_weights, weight_shapes
from engines.types import EngineRequest, Layout, Padding, Pass, PassItem, PassKind, Sampling
from tests.engines import oracle

TINY = oracle.TINY
WEIGHTS = oracle.random_model(TINY)
SHAPE = ModelShape(
    "tiny", TINY.layers, TINY.hidden, TINY.ff, TINY.heads, TINY.kv_heads, TINY.head_dim, TINY.vocab, tied=True
)
CONFIG = DecoderConfig(SHAPE, TINY.context_tokens, TINY.rope_base, TINY.norm_eps)
SLOTS = Slots(blocks=64, block_tokens=4, scratch=256)
EAGER = Profiles(Layout.PACKED, Padding.NOTHING, (128,))
CLASSES = Profiles(Layout.PACKED, Padding.CLASS, (16, 128), (0, 200))
BLOCKS_EACH = 16
_pass_ids = itertools.count()


def model(attention: str | None = None, arrays: Mapping[str, Any] = WEIGHTS) -> TorchModel:
    chosen = next((way for way in ways() if way.name == attention), None)
    return TorchModel(CONFIG, given_weights(CONFIG, arrays, "cpu", "f32"), SLOTS, attention=chosen)


@st.composite
def packs(draw: st.DrawFn) -> list[tuple[list[int], int]]:
    """Requests as (token ids, how many of them are history)."""
    requests = []
    for _ in range(draw(st.integers(1, 4))):
        tokens = draw(st.lists(st.integers(0, TINY.vocab - 1), min_size=1, max_size=40))
        requests.append((tokens, draw(st.integers(0, len(tokens) - 1))))
    return requests


def blocks_of(index: int, *, apart: bool) -> list[int]:
    """The blocks of request `index`: spread over the pool, or one after the other."""
    if apart:
        return list(range(index, 4 * BLOCKS_EACH, 4))
    return list(range(index * BLOCKS_EACH, (index + 1) * BLOCKS_EACH))


@pytest.mark.parametrize("way", ["each", "mask"])
@settings(max_examples=20)
@given(requests=packs(), apart=st.booleans(), fixed=st.booleans())
def test_packed_logits_are_those_of_each_request_alone(
    way: str, requests: list[tuple[list[int], int]], apart: bool, fixed: bool
) -> None:
    made = model(way)
    pieces = []
    for index, (tokens, history) in enumerate(requests):
        own = blocks_of(index, apart=apart)
        if history:
            made.forward(pack([Piece(tokens[:history], own, 0, logits=False)], SLOTS))
        pieces.append(Piece(tokens[history:], own, history, logits=True))
    batch = pack(pieces, SLOTS)
    if fixed:
        runner = FixedPass(made, FixedShape(160, 400, 4), made.attention)
        runner.prepare(capture=False)
        found = runner.run(batch).numpy()
    else:
        found = made.forward(batch).numpy()
    for (tokens, _), row in zip(requests, found, strict=True):
        np.testing.assert_allclose(row, oracle.logits(TINY, WEIGHTS, tokens)[-1], atol=2e-4, rtol=1e-4)


def test_history_in_one_run_of_slots_is_read_in_place() -> None:
    fresh, chunk = Piece([1, 2, 3, 4], [2], 0, logits=True), Piece([5, 6], [3, 4], 4, logits=True)
    assert pack([fresh], SLOTS).reads is None
    assert pack([chunk], SLOTS).reads == (12, 18)
    assert pack([fresh, chunk], SLOTS).reads == (8, 18)
    assert isinstance(pack([chunk, fresh], SLOTS).reads, np.ndarray)


@pytest.mark.parametrize("way", ["each", "mask"])
def test_ways_to_attend_agree(way: str) -> None:
    chosen = next(w for w in ways() if w.name == way)
    assert check(chosen, 6, 2, 8, torch.device("cpu"), torch.float32) < 1e-5


def test_a_mask_aligned_to_the_upper_left_is_caught() -> None:
    """The check must tell a kernel that aligns causality otherwise; here `each` without the history."""
    from engines.torch_cuda_attention import Attention, Runs

    each = next(w for w in ways() if w.name == "each")

    def upper_left(q: Any, k: Any, v: Any, runs: Runs) -> Any:
        out, q_end, k_end = torch.zeros_like(q), 0, 0
        for new, rows in zip(runs.q_lens, runs.k_lens, strict=True):
            if new:
                part = make_runs([new], [new], q.device)
                k_rows = slice(k_end, k_end + new)
                out[q_end : q_end + new] = each.attend(q[q_end : q_end + new], k[k_rows], v[k_rows], part)
            q_end, k_end = q_end + new, k_end + rows
        return out

    assert check(Attention("wrong", upper_left, True), 6, 2, 8, torch.device("cpu"), torch.float32) > 0.1


def test_variable_length_kernels_get_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """`flash` and `varlen` run on CUDA only; here `each` plays their operator."""
    each = next(w for w in ways() if w.name == "each")

    def played(
        q: Any, k: Any, v: Any, q_starts: Any, k_starts: Any, q_max: int, k_max: int, *rest: Any
    ) -> Any:
        assert rest == (0.0, True)  # no dropout, causal
        assert q_starts.dtype == k_starts.dtype == torch.int32
        q_lens, k_lens = q_starts.diff().tolist(), k_starts.diff().tolist()
        assert (q_max, k_max) >= (max(q_lens), max(k_lens))
        return each.attend(q, k, v, make_runs(q_lens, k_lens, q.device))

    class Aten:
        @staticmethod
        def _flash_attention_forward(*args: Any, return_debug_mask: bool) -> tuple[Any]:
            return (played(*args),)

    monkeypatch.setattr(torch.ops, "aten", Aten, raising=False)
    flash = next(w for w in ways() if w.name == "flash")
    assert check(flash, 6, 2, 8, torch.device("cpu"), torch.float32) < 1e-6
    monkeypatch.undo()

    if find_spec("triton") is None or find_spec("triton.language") is None:
        monkeypatch.setitem(sys.modules, "triton", None)  # a folder of tests here is no compiler
    import torch.nn.attention.varlen as public

    def varlen_attn(*args: Any, window_size: tuple[int, int], enable_gqa: bool) -> Any:
        assert window_size == (-1, 0)
        assert enable_gqa
        return played(*args, 0.0, True)

    monkeypatch.setattr(public, "varlen_attn", varlen_attn)
    varlen = next(w for w in ways() if w.name == "varlen")
    assert check(varlen, 6, 2, 8, torch.device("cpu"), torch.float32) < 1e-6


# --- the engine ---


def engine(profiles: Profiles = EAGER, arrays: Mapping[str, Any] | None = WEIGHTS) -> TorchCudaEngine:
    options = TorchOptions("cpu", "f32", profiles, kv_capacity_tokens=1024, block_tokens=8, requests_max=4)
    return TorchCudaEngine.load(CONFIG, options, arrays)


def run(
    made: TorchCudaEngine, kind: PassKind, *items: tuple[str, int, int], layers: int = 1
) -> list[int | None]:
    for block in range(layers):
        parts = tuple(PassItem(*item) for item in items)
        result = made.execute(Pass(next(_pass_ids), kind, parts, block, layers))
    return [item.token for item in result.items]


@pytest.mark.parametrize("profiles", [EAGER, CLASSES], ids=["eager", "classes"])
@pytest.mark.parametrize("layers", [1, 2])
def test_greedy_tokens_are_the_oracles(profiles: Profiles, layers: int) -> None:
    made = engine(profiles)
    prompts = {
        name: np.random.default_rng(len(name)).integers(0, 61, 9 * len(name)).tolist() for name in ("a", "bb")
    }
    answers: dict[str, list[int | None]] = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        made.submit(EngineRequest(name, tuple(prompt), 5, Sampling(ignore_eos=True)))
    run(made, PassKind.PREFILL, ("bb", 7, 0), layers=layers)  # a chunk first
    first = run(made, PassKind.PREFILL, ("a", 64, 0), ("bb", 64, 7), layers=layers)
    for step in range(5):
        tokens = (
            first
            if step == 0
            else run(made, PassKind.DECODE, *((name, 1, len(prompts[name]) + step - 1) for name in prompts))
        )
        for name, token in zip(prompts, tokens, strict=True):
            answers[name].append(token)
    for name, prompt in prompts.items():
        for found, (expected, lead) in zip(
            answers[name], oracle.greedy(TINY, WEIGHTS, prompt, 5), strict=True
        ):
            if lead < 1e-3:
                break
            assert found == expected


def test_other_passes_run_between_two_groups_of_layers_and_a_cancelled_request_writes_no_more() -> None:
    """Its blocks go to another request at once; a late write would change that one's tokens."""
    prompts = {
        name: tuple(np.random.default_rng(i).integers(0, 61, 30).tolist()) for i, name in enumerate("abc")
    }
    alone = {}
    for name, prompt in prompts.items():
        made = engine()
        made.submit(EngineRequest(name, prompt, 2))
        run(made, PassKind.PREFILL, (name, 30, 0))
        alone[name] = run(made, PassKind.DECODE, (name, 1, 30))
    made = engine()
    for name, prompt in prompts.items():
        made.submit(EngineRequest(name, prompt, 2))
    made.execute(Pass(next(_pass_ids), PassKind.PREFILL, (PassItem("a", 30, 0), PassItem("b", 30, 0)), 0, 2))
    made.cancel("a")
    run(made, PassKind.PREFILL, ("c", 30, 0))
    made.execute(Pass(next(_pass_ids), PassKind.PREFILL, (PassItem("b", 30, 0),), 1, 2))
    assert run(made, PassKind.DECODE, ("b", 1, 30), ("c", 1, 30)) == alone["b"] + alone["c"]


def test_a_group_of_layers_that_another_order_would_mix_up_is_refused() -> None:
    made = engine()
    for name in "ab":
        made.submit(EngineRequest(name, (1, 2, 3), 2))
    items = (PassItem("a", 3, 0), PassItem("b", 3, 0))
    made.execute(Pass(next(_pass_ids), PassKind.PREFILL, items, 0, 2))
    with pytest.raises(ValueError, match="in this order"):
        made.execute(Pass(next(_pass_ids), PassKind.PREFILL, items[::-1], 1, 2))
    assert made.execute(Pass(next(_pass_ids), PassKind.PREFILL, items, 1, 2)).items[0].position == 3


@pytest.mark.parametrize("profiles", [EAGER, CLASSES], ids=["eager", "classes"])
def test_measuring_changes_nothing(profiles: Profiles) -> None:
    made = engine(profiles)
    made.submit(EngineRequest("a", tuple(range(20)), 2))
    run(made, PassKind.PREFILL, ("a", 20, 0))
    before = made.stats()
    assert made.measure(8, 40, 2) > 0.0
    assert made.measure(16, 0) > 0.0
    assert made.stats() == before
    token = run(made, PassKind.DECODE, ("a", 1, 20))
    other = engine(profiles)
    other.submit(EngineRequest("a", tuple(range(20)), 2))
    run(other, PassKind.PREFILL, ("a", 20, 0))
    assert token == run(other, PassKind.DECODE, ("a", 1, 20))
    for shape in ((200, 0, 1), (8, 0, 9)):
        with pytest.raises(ValueError, match="no pass of this engine"):
            made.measure(*shape)
    with pytest.raises(ValueError, match="kv_capacity_tokens"):
        engine().measure(8, 2000)


def test_a_pass_without_memory_fails_alone_and_another_error_of_cuda_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(error: RuntimeError) -> Any:
        def forward(batch: Any) -> Any:
            raise error

        return forward

    made = engine()
    items = (PassItem("a", 30, 0),)
    for name in "ab":
        made.submit(EngineRequest(name, tuple(range(30)), 2))
    monkeypatch.setattr(made.model, "device", torch.device("cuda"))
    monkeypatch.setattr(made.model, "forward", fails(torch.OutOfMemoryError("none left")))
    with pytest.raises(PassError, match="none left") as caught:
        made.execute(Pass(next(_pass_ids), PassKind.PREFILL, items))
    assert caught.value.request_ids == ("a",)
    assert made.stats().requests_live == 1
    assert made.stats().kv_blocks_free == made.stats().kv_blocks_total
    monkeypatch.setattr(made.model, "forward", fails(RuntimeError("illegal memory access")))
    with pytest.raises(EngineError, match="illegal"):
        made.execute(Pass(next(_pass_ids), PassKind.PREFILL, (PassItem("b", 30, 0),)))
    assert made.stats().requests_live == 0
    with pytest.raises(EngineError, match="closed"):
        made.submit(EngineRequest("c", (1,), 1))


def test_biases_count() -> None:
    """Biases of zero change nothing; one on V moves the logits."""
    config = DecoderConfig(SHAPE, 256, TINY.rope_base, TINY.norm_eps, qkv_bias=True)
    rng = np.random.default_rng(0)
    arrays = {**WEIGHTS}
    for name, size in weight_shapes(config).items():
        if name.endswith(".bias"):
            arrays[name] = np.zeros(size, np.float32)
    logits = {}
    for case in ("zero", "v"):
        if case == "v":
            arrays["blk.0.attn_v.bias"] = rng.normal(0.0, 1.0, arrays["blk.0.attn_v.bias"].shape)
        made = TorchModel(config, given_weights(config, arrays, "cpu", "f32"), SLOTS)
        logits[case] = made.forward(pack([Piece([1, 2, 3], [0], 0, logits=True)], SLOTS)).numpy()[0]
    np.testing.assert_allclose(logits["zero"], oracle.logits(TINY, WEIGHTS, [1, 2, 3])[-1], atol=2e-4)
    assert np.abs(logits["v"] - logits["zero"]).max() > 0.1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"output_norm.weight": None}, "missing"),
        ({"extra": np.zeros(1)}, "extra"),
        ({"blk.0.attn_q.weight": np.zeros((2, 2))}, "shape"),
    ],
)
def test_wrong_weights_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    arrays = {name: array for name, array in {**WEIGHTS, **change}.items() if array is not None}
    with pytest.raises(ValueError, match=named):
        engine(arrays=arrays)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"dtype": "int4"}, "dtype"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"kv_capacity_tokens": 1}, "kv_capacity_tokens"),
        ({"profiles": Profiles(Layout.RECTANGULAR, Padding.CLASS, (8,))}, "packs"),
        ({"profiles": Profiles(Layout.PACKED, Padding.CLASS, (8,))}, "h_classes"),
        ({"profiles": Profiles(Layout.PACKED, Padding.NOTHING, (64,), captured=((8, 8),))}, "captured"),
    ],
)
def test_wrong_options_are_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        TorchOptions("cpu", **options)


def test_the_shipped_profiles_are_taken() -> None:
    assert TorchOptions("cpu", profiles=CLASS_PROFILES).profiles.history_max == 32_768
