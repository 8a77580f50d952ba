"""A decoder of the Llama and Qwen2 family on torch: weights, KV pool, one packed forward on any device.

RMSNorm, RoPE (rotate-half), grouped-query attention, SwiGLU, biases of Q, K and V where the model has them.
Weights of Q, K, V and of gate and up lie together, so a layer is about 14 kernels: a small pass costs
mostly their launches, which `build_scripts.gpu` measures. The LM head runs on last tokens only.

The forward is three calls, `begin`, `layers` and `head`: a prefill pass can so stop between layers and let
another pass run. K and V go into the pool of `engines.torch_cuda_batch`, [2, slots, kv heads, head_dim] a
layer. bf16 rounds the tables of RoPE as well, as common implementations do.

Imported only where torch is used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812 - its usual name

from engines.models import ModelShape
from engines.torch_cuda_attention import Attention, Runs, block_mask, choose_attention
from engines.torch_cuda_batch import PackedBatch, Slots

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes of the model, and what shapes don't tell. qkv_bias: Qwen2. eos_id: None ends by length alone."""

    shape: ModelShape
    context_tokens: int = 32_768
    rope_base: float = 1e6
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    eos_id: int | None = None

    def __post_init__(self) -> None:
        shape = self.shape
        if shape.heads % shape.kv_heads:
            raise ValueError(f"heads ({shape.heads}) must be a multiple of kv_heads ({shape.kv_heads})")
        if shape.head_dim % 2:
            raise ValueError(f"head_dim must be even for RoPE, got {shape.head_dim}")
        if self.context_tokens < 1:
            raise ValueError(f"context_tokens must be at least 1, got {self.context_tokens}")

    @classmethod
    def of_shape(cls, shape: ModelShape, context_tokens: int = 32_768) -> DecoderConfig:
        """For a shipped shape: Qwen2 has biases, Llama 3.1 another RoPE base and norm."""
        if shape.name.startswith("qwen2"):
            return cls(shape, context_tokens, qkv_bias=True)
        return cls(shape, context_tokens, rope_base=5e5, norm_eps=1e-5)


def weight_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name (as in llama.cpp) and shape (out, in) of every tensor that `given_weights` takes."""
    s = config.shape
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (s.hidden,),
        "attn_q.weight": (q, s.hidden),
        "attn_k.weight": (kv, s.hidden),
        "attn_v.weight": (kv, s.hidden),
        "attn_output.weight": (s.hidden, q),
        "ffn_norm.weight": (s.hidden,),
        "ffn_gate.weight": (s.ffn, s.hidden),
        "ffn_up.weight": (s.ffn, s.hidden),
        "ffn_down.weight": (s.hidden, s.ffn),
    }
    if config.qkv_bias:
        layer |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    shapes = {"token_embd.weight": (s.vocab, s.hidden), "output_norm.weight": (s.hidden,)}
    if not s.tied:
        shapes["output.weight"] = (s.vocab, s.hidden)
    for index in range(s.layers):
        shapes.update({f"blk.{index}.{name}": size for name, size in layer.items()})
    return shapes


@dataclass(slots=True)
class _Layer:
    """qkv: [(heads + 2 kv heads) x d, hidden]. gate_up: [2 ffn, hidden]. out, down: as they are used."""

    norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    ffn_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(slots=True)
class Weights:
    embedding: Tensor
    layers: list[_Layer]
    norm: Tensor
    head: Tensor

    @property
    def device(self) -> torch.device:
        device: torch.device = self.embedding.device
        return device


def random_weights(config: DecoderConfig, device: str, dtype: str = "bf16", seed: int = 0) -> Weights:
    """Made on the device, scaled so that activations stay in range; never on the host."""
    s, kind = config.shape, DTYPES[dtype]
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        made = torch.empty(size, device=device, dtype=kind)
        return made.normal_(0.0, size[-1] ** -0.5 if len(size) > 1 else 0.02, generator=generator)

    def ones() -> Tensor:
        return torch.ones(s.hidden, device=device, dtype=kind)

    width = (s.heads + 2 * s.kv_heads) * s.head_dim
    layers = [
        _Layer(
            ones(),
            normal(width, s.hidden),
            normal(width) if config.qkv_bias else None,
            normal(s.hidden, s.heads * s.head_dim),
            ones(),
            normal(2 * s.ffn, s.hidden),
            normal(s.hidden, s.ffn),
        )
        for _ in range(s.layers)
    ]
    embedding = normal(s.vocab, s.hidden)
    return Weights(embedding, layers, ones(), embedding if s.tied else normal(s.vocab, s.hidden))


def given_weights(
    config: DecoderConfig, arrays: Mapping[str, Any], device: str, dtype: str = "bf16"
) -> Weights:
    """From float arrays by the names of `weight_shapes`. Raises ValueError naming a tensor that is wrong."""
    expected = weight_shapes(config)
    for name in sorted(expected.keys() ^ arrays.keys()):
        raise ValueError(f"weights: {name} is {'missing' if name in expected else 'not known'}")
    for name, size in expected.items():
        if tuple(arrays[name].shape) != size:
            raise ValueError(f"weights: {name} has shape {tuple(arrays[name].shape)}, expected {size}")

    def put(*names: str) -> Tensor:
        parts = [torch.from_numpy(np.ascontiguousarray(arrays[name], dtype=np.float32)) for name in names]
        return torch.cat(parts).to(device, DTYPES[dtype])

    def layer(index: int) -> _Layer:
        at = f"blk.{index}."
        sides = [f"{at}attn_{side}" for side in "qkv"]
        return _Layer(
            put(f"{at}attn_norm.weight"),
            put(*(f"{side}.weight" for side in sides)),
            put(*(f"{side}.bias" for side in sides)) if config.qkv_bias else None,
            put(f"{at}attn_output.weight"),
            put(f"{at}ffn_norm.weight"),
            put(f"{at}ffn_gate.weight", f"{at}ffn_up.weight"),
            put(f"{at}ffn_down.weight"),
        )

    embedding = put("token_embd.weight")
    head = embedding if config.shape.tied else put("output.weight")
    return Weights(embedding, [layer(i) for i in range(config.shape.layers)], put("output_norm.weight"), head)


@dataclass(slots=True)
class DeviceBatch:
    """A `PackedBatch` on the device: int64 but for `runs`. reads: [K] slots, or a run of slots, or None."""

    token_ids: Tensor
    positions: Tensor
    writes: Tensor
    reads: Tensor | tuple[int, int] | None
    last: Tensor
    runs: Runs


@dataclass(slots=True)
class State:
    """A forward between two groups of layers. x: [T, hidden]; cos, sin: [T, 1, head_dim]."""

    batch: DeviceBatch
    x: Tensor
    cos: Tensor
    sin: Tensor


class TorchModel:
    """See the module text. attention: of passes that are not captured; None chooses one by a check."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        slots: Slots,
        *,
        attention: Attention | None = None,
    ) -> None:
        shape = config.shape
        self.config, self.weights, self.slots = config, weights, slots
        self.device, self.dtype = weights.device, weights.embedding.dtype
        self.attention_refused: dict[str, str] = {}
        if attention is None:
            attention, self.attention_refused = self.choose(captured=False)
        self.attention = attention
        size = (2, slots.total, shape.kv_heads, shape.head_dim)
        self.pool = [torch.zeros(size, device=self.device, dtype=self.dtype) for _ in range(shape.layers)]
        self._cos, self._sin = _rope_tables(config, self.device, self.dtype)

    def choose(self, *, captured: bool) -> tuple[Attention, dict[str, str]]:
        s = self.config.shape
        return choose_attention(s.heads, s.kv_heads, s.head_dim, self.device, self.dtype, captured=captured)

    def upload(self, batch: PackedBatch) -> DeviceBatch:
        """Two copies to the device: the int64 inputs in one, where requests begin in the other."""
        listed = batch.reads if isinstance(batch.reads, np.ndarray) else np.zeros(0, np.int64)
        parts = (batch.token_ids, batch.positions, batch.writes, batch.last, listed)
        ints = torch.from_numpy(np.concatenate(parts)).to(self.device)
        token_ids, positions, writes, last, reads = ints.split([len(part) for part in parts])
        q_starts, k_starts = torch.from_numpy(starts(batch.q_lens, batch.k_lens)).to(self.device)
        mask = None
        if self.attention.masked:
            mask = block_mask(q_starts, k_starts, batch.tokens, sum(batch.k_lens))
        q_max, k_max = max(batch.q_lens), max(batch.k_lens)
        runs = Runs(q_starts, k_starts, batch.q_lens, batch.k_lens, q_max, k_max, mask)
        kept = reads if isinstance(batch.reads, np.ndarray) else batch.reads
        return DeviceBatch(token_ids, positions, writes, kept, last, runs)

    def forward(self, batch: PackedBatch) -> Tensor:
        """Logits [rows in batch.last, vocab] of one pass, in the type of the weights."""
        with torch.inference_mode():
            state = self.begin(self.upload(batch))
            self.layers(state, 0, self.config.shape.layers, self.attention)
            return self.head(state)

    def begin(self, batch: DeviceBatch) -> State:
        x = F.embedding(batch.token_ids, self.weights.embedding)
        cos, sin = self._cos[batch.positions][:, None], self._sin[batch.positions][:, None]
        return State(batch, x, cos, sin)

    def layers(self, state: State, first: int, stop: int, attention: Attention) -> None:
        """Run the layers `first` to `stop` - 1 on `state`."""
        shape, eps, batch = self.config.shape, self.config.norm_eps, state.batch
        heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
        x, tokens = state.x, state.x.shape[0]
        for layer, pool in zip(self.weights.layers[first:stop], self.pool[first:stop], strict=True):
            h = F.rms_norm(x, (shape.hidden,), layer.norm, eps)
            qkv = F.linear(h, layer.qkv, layer.qkv_bias).view(tokens, heads + 2 * kv_heads, dim)
            turned = _rotate(qkv[:, : heads + kv_heads], state.cos, state.sin)
            q, k, v = turned[:, :heads], turned[:, heads:], qkv[:, heads + kv_heads :]
            pool[0].index_copy_(0, batch.writes, k)
            pool[1].index_copy_(0, batch.writes, v)
            if batch.reads is not None:
                k, v = _read(pool, batch.reads)
            attended = attention.attend(q, k, v, batch.runs).reshape(tokens, heads * dim)
            x = torch.addmm(x, attended, layer.out.t())
            h = F.rms_norm(x, (shape.hidden,), layer.ffn_norm, eps)
            gate, up = F.linear(h, layer.gate_up).chunk(2, dim=-1)
            x = torch.addmm(x, F.silu(gate) * up, layer.down.t())
        state.x = x

    def head(self, state: State) -> Tensor:
        x = state.x[state.batch.last]
        x = F.rms_norm(x, (self.config.shape.hidden,), self.weights.norm, self.config.norm_eps)
        logits: Tensor = F.linear(x, self.weights.head)
        return logits

    def keep(self, state: State, batch: PackedBatch, requests: Sequence[int]) -> tuple[State, PackedBatch]:
        """`state` of some of the requests of `batch` only, by number: the others ended between two groups."""
        kept, rows = batch.kept(requests)
        index = torch.from_numpy(rows).to(self.device)
        made = replace(state, batch=self.upload(kept))
        made.x, made.cos, made.sin = state.x[index], state.cos[index], state.sin[index]
        return made, kept


def starts(q_lens: Sequence[int], k_lens: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """[2, requests + 1]: where each request begins in the row of new tokens and in the K rows."""
    lens = np.asarray([q_lens, k_lens], dtype=np.int32)
    return np.concatenate([np.zeros((2, 1), np.int32), np.cumsum(lens, axis=1, dtype=np.int32)], axis=1)


def _read(pool: Tensor, reads: Tensor | tuple[int, int]) -> tuple[Tensor, Tensor]:
    if isinstance(reads, tuple):
        return pool[0, reads[0] : reads[1]], pool[1, reads[0] : reads[1]]
    return pool[0].index_select(0, reads), pool[1].index_select(0, reads)


def _rope_tables(config: DecoderConfig, device: Any, dtype: Any) -> tuple[Tensor, Tensor]:
    """[context, head_dim] each; the sign of rotate-half is in the second."""
    half = config.shape.head_dim // 2
    powers = torch.arange(half, dtype=torch.float64) * (-math.log(config.rope_base) / half)
    angles = torch.arange(config.context_tokens, dtype=torch.float64)[:, None] * powers.exp()
    cos, sin = angles.cos(), angles.sin()
    tables = torch.cat([cos, cos], dim=1), torch.cat([-sin, sin], dim=1)
    return tables[0].to(device, dtype), tables[1].to(device, dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    turned: Tensor = torch.addcmul(x * cos, torch.cat([second, first], dim=-1), sin)
    return turned
