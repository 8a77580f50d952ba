"""A Llama forward in plain numpy, written from the architecture and not from the graph that it checks.

One request at a time, no cache, no padding, no packing: every token attends to all before it. Float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from build_scripts.gguf_model import LlamaConfig, Weights, weight_shapes
from engines.openvino_model import MODEL_XML

Array = npt.NDArray[np.float32]

TINY = LlamaConfig(
    layers=2,
    hidden=24,
    ff=40,
    heads=6,
    kv_heads=2,
    head_dim=8,
    vocab=61,
    context_tokens=256,
    rope_base=1e4,
    norm_eps=1e-5,
)


def random_model(config: LlamaConfig, seed: int = 0) -> Weights:
    """Weights that float16 holds exactly, so that a saved model has the very same.

    Some matrices are made larger, so that the next token depends on the whole context, not on the last token.
    """
    rng = np.random.default_rng(seed)
    weights: Weights = {}
    for name, shape in weight_shapes(config).items():
        values = rng.normal(1.0, 0.1, shape) if len(shape) == 1 else rng.normal(0.0, shape[1] ** -0.5, shape)
        gain = 3.0 if name.split(".")[-2] in ("attn_q", "attn_output", "ffn_down") else 1.0
        weights[name] = (gain * values).astype(np.float16).astype(np.float32)
    return weights


def write_model(directory: Path, config: LlamaConfig, weights: Weights) -> Path:
    """Build the graph of `weights` into `directory`, as a bundle has it."""
    from build_scripts.graph import build_graph, save_graph

    path = directory / MODEL_XML
    save_graph(build_graph(config, weights), path)
    return path


def logits(config: LlamaConfig, weights: Weights, token_ids: Sequence[int]) -> Array:
    """Logits after each token, [tokens, vocab]."""
    x = weights["token_embd.weight"][np.asarray(token_ids)]
    for layer in range(config.layers):
        part = {name: weights[f"blk.{layer}.{name}.weight"] for name in _NAMES}
        x = x + _attention(config, part, _norm(config, x, part["attn_norm"]))
        h = _norm(config, x, part["ffn_norm"])
        gate = h @ part["ffn_gate"].T
        x = x + (gate / (1.0 + np.exp(-gate)) * (h @ part["ffn_up"].T)) @ part["ffn_down"].T
    result: Array = _norm(config, x, weights["output_norm.weight"]) @ weights["token_embd.weight"].T
    return result


def greedy(
    config: LlamaConfig, weights: Weights, prompt: Sequence[int], count: int
) -> list[tuple[int, float]]:
    """`count` greedy tokens after `prompt`, each with its lead over the second best logit."""
    tokens, answer = list(prompt), []
    for _ in range(count):
        last = logits(config, weights, tokens)[-1]
        second, best = np.sort(last)[-2:]
        answer.append((int(last.argmax()), float(best - second)))
        tokens.append(answer[-1][0])
    return answer


_NAMES = (
    "attn_norm",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_norm",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
)


def _norm(config: LlamaConfig, x: Array, weight: Array) -> Array:
    scaled: Array = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(config.norm_eps)) * weight
    return scaled


def _attention(config: LlamaConfig, weights: Weights, x: Array) -> Array:
    tokens = len(x)
    q = _rotate(config, (x @ weights["attn_q"].T).reshape(tokens, config.heads, config.head_dim))
    k = _rotate(config, (x @ weights["attn_k"].T).reshape(tokens, config.kv_heads, config.head_dim))
    v = (x @ weights["attn_v"].T).reshape(tokens, config.kv_heads, config.head_dim)
    repeat = config.heads // config.kv_heads
    k, v = k.repeat(repeat, axis=1), v.repeat(repeat, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) / np.float32(np.sqrt(config.head_dim))
    scores = np.where(np.tri(tokens, dtype=bool), scores, -np.inf)
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    scores /= scores.sum(axis=-1, keepdims=True)
    out: Array = np.einsum("hqk,khd->qhd", scores, v).reshape(tokens, -1) @ weights["attn_output"].T
    return out


def _rotate(config: LlamaConfig, x: Array) -> Array:
    """RoPE: pair i of a head, (x[i], x[i + dim/2]), turns by position * base^(-2i/dim)."""
    half = config.head_dim // 2
    angle = np.arange(len(x))[:, None] * config.rope_base ** (-2.0 * np.arange(half) / config.head_dim)
    turn = np.exp(1j * angle)[:, None, :]
    turned = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([turned.real, turned.imag], axis=-1).astype(np.float32)
