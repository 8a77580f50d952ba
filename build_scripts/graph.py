"""The Llama forward of one packed pass as an OpenVINO graph.

Prefill with and without history and decode are the same thing: T new tokens of several requests in a row and
H history tokens of the same requests, in any order. So one graph serves all three.

    tok, pos, q_seg   i32 [T]  token id, position in its request, which request ("segment")
    kv                [blocks * rows * BLOCK_TOKENS, head_dim], bf16 or f32: the whole KV pool by blocks, in
                      each the rows (rows = layers * 2 * kv_heads, K before V), in each row the tokens
    h_slot            i32 [H]  where row 0 of each history token lies in `kv`
    h_seg, h_pos      i32 [H]  its segment and position
    last              i32 [S]  rows of T to compute logits for
 -> logits            f32 [S, vocab]
    kv_new            [rows, T, head_dim], type of `kv`

A query sees the keys of its own segment that are not later than itself. That mask, [T, H + T], is computed
once for all layers. Padding is a segment of its own, -1 on both sides, so that no row of the mask is empty.

Three choices come from measurements (docs/engines.md). The pool itself is an input and each layer gathers
the rows that it needs, so history is read once, where it lies: copying the past of a pass together outside
costs more than attending to it. A pool row is one head of one token, which makes the gathered past the very
layout that attention wants. The query heads of one KV head are folded into rows, so K and V are not repeated.

Weights go in as float32 constants. `save_graph` compresses them to float16 and marks the conversion, which
the plugin then folds away; converting them by hand would keep a float32 copy of everything.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from build_scripts.gguf_model import LlamaConfig, Weights, check_weights
from engines.openvino_model import BLOCK_TOKENS, GRAPH_VERSION, MODEL_FACTS_KEY, ModelFacts

if TYPE_CHECKING:
    from openvino import Model, Node

_FIXED_POINT_ONE = 2.0**30
_MASKED = -1e9  # finite, and in the range of bfloat16
_TOKEN_INPUTS = ("tok", "pos", "q_seg")
_HISTORY_INPUTS = ("h_slot", "h_seg", "h_pos")


def build_graph(config: LlamaConfig, weights: Weights) -> Model:
    """The packed forward of `config`; `kv` is bf16 (the loader may retype it). See the module text."""
    import openvino as ov
    from openvino import opset15 as ops

    check_weights(config, weights)
    graph = _Graph(ops, config)
    inputs = {name: ops.parameter([-1], np.int32, name=name) for name in (*_TOKEN_INPUTS, *_HISTORY_INPUTS)}
    inputs["kv"] = ops.parameter([-1, config.head_dim], ov.Type.bf16, name="kv")
    inputs["last"] = ops.parameter([-1], np.int32, name="last")
    shared = _shared(graph, inputs)

    embedding = ops.constant(weights["token_embd.weight"])
    x = ops.gather(embedding, inputs["tok"], graph.ints(0))
    new_rows: list[Node] = []
    for layer in range(config.layers):
        part = {name: weights[f"blk.{layer}.{name}.weight"] for name in _LAYER_WEIGHTS}
        attended, rows = _attention(graph, shared, layer, graph.norm(x, part["attn_norm"]), part)
        x = ops.add(x, attended)
        x = ops.add(x, _mlp(graph, graph.norm(x, part["ffn_norm"]), part))
        new_rows += rows
    x = graph.norm(ops.gather(x, inputs["last"], graph.ints(0)), weights["output_norm.weight"])
    results = {"logits": ops.matmul(x, embedding, False, True), "kv_new": ops.concat(new_rows, 0)}

    model = ov.Model([_named_result(ops, name, node) for name, node in results.items()], [*inputs.values()])
    facts = ModelFacts(GRAPH_VERSION, config.context_tokens, config.vocab, config.eos_id)
    model.set_rt_info(json.dumps(asdict(facts)), [MODEL_FACTS_KEY])
    return model


def save_graph(model: Model, path: Path) -> None:
    """Write `model` to `path` (.xml, with the weights beside it in .bin), weights as float16."""
    import openvino as ov

    ov.save_model(model, path, compress_to_fp16=True)


_LAYER_WEIGHTS = (
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


@dataclass(frozen=True, slots=True)
class _Graph:
    """Short forms of operations that occur in many places."""

    ops: Any
    config: LlamaConfig

    def ints(self, value: npt.ArrayLike) -> Node:
        return self.ops.constant(np.asarray(value, dtype=np.int32))

    def float(self, value: float) -> Node:
        return self.ops.constant(np.asarray(value, dtype=np.float32))

    def reshape(self, x: Node, *shape: int) -> Node:
        """To `shape`; one entry may be -1."""
        return self.ops.reshape(x, self.ints(shape), False)

    def transpose(self, x: Node, *order: int) -> Node:
        return self.ops.transpose(x, self.ints(order))

    def unsqueeze(self, x: Node, *axes: int) -> Node:
        return self.ops.unsqueeze(x, self.ints(axes))

    def linear(self, x: Node, weight: npt.NDArray[np.float32]) -> Node:
        """x [.., in] times weight [out, in]."""
        return self.ops.matmul(x, self.ops.constant(weight), False, True)

    def norm(self, x: Node, weight: npt.NDArray[np.float32]) -> Node:
        """RMSNorm over the last axis."""
        ops = self.ops
        mean = ops.reduce_mean(ops.power(x, self.float(2.0)), self.ints([-1]), keep_dims=True)
        root = ops.sqrt(ops.add(mean, self.float(self.config.norm_eps)))
        return ops.multiply(ops.multiply(x, ops.divide(self.float(1.0), root)), ops.constant(weight))


@dataclass(frozen=True, slots=True)
class _Shared:
    """What all layers use. `g` is query heads per KV head.

    mask: f32 [1, 1, g * T, H + T], 0 or _MASKED. cos, sin: f32 [T, 1, head_dim / 2].
    head_slots: i32 [kv_heads, H], where the K heads of layer 0 of the history lie in the pool.
    """

    kv: Node
    mask: Node
    cos: Node
    sin: Node
    head_slots: Node


def _shared(graph: _Graph, inputs: dict[str, Node]) -> _Shared:
    ops, config = graph.ops, graph.config
    heads = graph.ints(np.arange(config.kv_heads)[:, None] * BLOCK_TOKENS)
    cos, sin = (_rope_table(graph, function, inputs["pos"]) for function in (np.cos, np.sin))
    return _Shared(
        kv=inputs["kv"],
        mask=_mask(graph, inputs),
        cos=cos,
        sin=sin,
        head_slots=ops.add(heads, graph.unsqueeze(inputs["h_slot"], 0)),
    )


def _mask(graph: _Graph, inputs: dict[str, Node]) -> Node:
    ops = graph.ops
    k_seg = ops.concat([inputs["h_seg"], inputs["q_seg"]], 0)
    k_pos = ops.concat([inputs["h_pos"], inputs["pos"]], 0)
    same = ops.equal(graph.unsqueeze(inputs["q_seg"], 1), graph.unsqueeze(k_seg, 0))
    earlier = ops.less_equal(graph.unsqueeze(k_pos, 0), graph.unsqueeze(inputs["pos"], 1))
    mask = ops.select(ops.logical_and(same, earlier), graph.float(0.0), graph.float(_MASKED))
    group = graph.config.heads // graph.config.kv_heads
    return ops.tile(graph.unsqueeze(mask, 0, 1), graph.ints([1, 1, group, 1]))


def _rope_table(graph: _Graph, function: Any, pos: Node) -> Node:
    """cos or sin of position * base^(-2i / head_dim), from a table: bfloat16 can't hold large positions.

    The table is fixed-point, because a float32 one would be rounded to float16 in the file.
    """
    ops, config = graph.ops, graph.config
    frequency = config.rope_base ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    table = function(np.arange(config.context_tokens)[:, None] * frequency) * _FIXED_POINT_ONE
    rows = ops.convert(ops.gather(graph.ints(np.rint(table)), pos, graph.ints(0)), "f32")
    return graph.unsqueeze(ops.multiply(rows, graph.float(1.0 / _FIXED_POINT_ONE)), 1)


def _rope(graph: _Graph, shared: _Shared, x: Node) -> Node:
    """Rotate x [T, heads, head_dim]: (a, b) -> (a cos - b sin, b cos + a sin), a and b the halves."""
    ops = graph.ops
    a, b = ops.split(x, graph.ints(2), 2).outputs()
    first = ops.subtract(ops.multiply(a, shared.cos), ops.multiply(b, shared.sin))
    second = ops.add(ops.multiply(b, shared.cos), ops.multiply(a, shared.sin))
    return ops.concat([first, second], 2)


def _attention(
    graph: _Graph, shared: _Shared, layer: int, x: Node, weights: Weights
) -> tuple[Node, tuple[Node, Node]]:
    """Output of the attention block and the new (K, V) rows, each [kv_heads, T, head_dim]."""
    ops, config = graph.ops, graph.config
    kv_heads, dim, group = config.kv_heads, config.head_dim, config.heads // config.kv_heads
    q = _rope(graph, shared, graph.reshape(graph.linear(x, weights["attn_q"]), -1, config.heads, dim))
    k = _rope(graph, shared, graph.reshape(graph.linear(x, weights["attn_k"]), -1, kv_heads, dim))
    v = graph.reshape(graph.linear(x, weights["attn_v"]), -1, kv_heads, dim)
    k_new, v_new = (ops.convert_like(graph.transpose(new, 1, 0, 2), shared.kv) for new in (k, v))
    keys = _with_past(graph, shared, 2 * layer * kv_heads, k_new)
    values = _with_past(graph, shared, (2 * layer + 1) * kv_heads, v_new)
    # The scale goes to q, which is small; left to the attention op it is applied to all keys.
    q = graph.reshape(ops.multiply(q, graph.float(dim**-0.5)), -1, kv_heads, group, dim)
    folded = graph.reshape(graph.transpose(q, 1, 2, 0, 3), 1, kv_heads, -1, dim)
    out = ops.scaled_dot_product_attention(folded, keys, values, shared.mask, graph.float(1.0))
    out = graph.transpose(graph.reshape(out, kv_heads, group, -1, dim), 2, 0, 1, 3)
    return graph.linear(graph.reshape(out, -1, config.heads * dim), weights["attn_output"]), (k_new, v_new)


def _with_past(graph: _Graph, shared: _Shared, row: int, new: Node) -> Node:
    """[1, kv_heads, H + T, head_dim] f32: the history out of the pool, then `new`."""
    ops = graph.ops
    past = ops.gather(shared.kv, ops.add(shared.head_slots, graph.ints(row * BLOCK_TOKENS)), graph.ints(0))
    return graph.unsqueeze(ops.convert(ops.concat([past, new], 1), "f32"), 0)


def _mlp(graph: _Graph, x: Node, weights: Weights) -> Node:
    ops = graph.ops
    gate = graph.linear(x, weights["ffn_gate"])
    gated = ops.multiply(ops.multiply(gate, ops.sigmoid(gate)), graph.linear(x, weights["ffn_up"]))
    return graph.linear(gated, weights["ffn_down"])


def _named_result(ops: Any, name: str, node: Node) -> Node:
    result = ops.result(node)
    result.output(0).set_names({name})
    return result
