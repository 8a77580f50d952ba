"""One compiled OpenVINO model, its KV pool, and the packing of requests into its inputs.

`PackedModel` runs the graph of `build_scripts.graph` (inputs and outputs are described there) and nothing
else: which requests go into a pass, and which slots they own, is decided by the engine above it.

The model is compiled once with dynamic shapes, but runs only the (T, H) shapes it is asked to by the engine's
profiles: every new shape costs a compilation of kernels at first use (30 to 300 ms), so shapes are padded to
classes and warmed at load, as a TensorRT engine with several optimisation profiles does.

The KV pool is one array [blocks, rows, BLOCK_TOKENS, head_dim] that the graph reads in place; a row is one
head of K or V of one layer. A block is contiguous, so memory is touched only as blocks come into use. bf16
has no numpy type: those arrays hold the bit patterns as uint16, which is enough to move them. New K and V
come out of the graph and are copied into their blocks afterwards, so a failed pass leaves the pool as it was.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

MODEL_XML = "model.xml"
BLOCK_TOKENS = 32
GRAPH_VERSION = 1  # of the inputs, outputs and pool layout that builder and engine agree on
MODEL_FACTS_KEY = "plaserve"  # rt_info of the model: ModelFacts as JSON

_PADDING_SEGMENT = -1
_NUMPY_TYPE = {"bf16": np.uint16, "f32": np.float32}

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the builder wrote into the model."""

    graph_version: int
    context_tokens: int
    vocab: int
    eos_id: int | None


@dataclass(frozen=True, slots=True)
class Segment:
    """One request's part of a pass.

    token_ids: the new tokens. blocks: the pool blocks of the request, from its first token on, with room for
    the new tokens. history: tokens before the new ones. logits: whether the last new token wants them.
    """

    token_ids: Sequence[int]
    blocks: Sequence[int]
    history: int
    logits: bool


class PackedModel:
    """See the module text. `rows_max` is the most rows the LM head computes logits for."""

    def __init__(self, path: Path, *, blocks: int, rows_max: int, threads: int, precision: str) -> None:
        self._ov = _openvino()
        core = self._ov.Core()
        model = _read(core, path)
        self.facts = _facts(model, path)
        if precision == "f32":
            model.input("kv").get_node().set_element_type(self._ov.Type.f32)
            model.validate_nodes_and_infer_types()
        _keep_logits_exact(model)
        options = {
            "INFERENCE_PRECISION_HINT": _compute_precision(core, precision),
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            # Pinned threads of two processes on one machine would meet on the same core.
            "ENABLE_CPU_PINNING": False,
        }
        self._request = core.compile_model(model, "CPU", options).create_infer_request()
        rows = model.output("kv_new").partial_shape[0].get_length()
        head_dim = model.input("kv").partial_shape[1].get_length()
        self._rows_max = rows_max
        self._numpy_type = _NUMPY_TYPE[precision]
        self._pool = np.zeros((blocks, rows, BLOCK_TOKENS, head_dim), dtype=self._numpy_type)
        kv_type = self._ov.Type.f32 if precision == "f32" else self._ov.Type.bf16
        flat = self._pool.reshape(-1, head_dim)
        self._request.set_tensor("kv", self._ov.Tensor(flat, list(flat.shape), kv_type))

    def forward(self, segments: Sequence[Segment], shape: tuple[int, int]) -> npt.NDArray[np.float32]:
        """Run one pass padded to `shape` = (T, H) and store its K and V.

        Returns f32 [n, vocab], a row for each segment that wants logits, valid until the next call.
        """
        tokens, history = shape
        new = [len(segment.token_ids) for segment in segments]
        past = [segment.history for segment in segments]
        ends = np.cumsum(new)
        wanted = [end - 1 for segment, end in zip(segments, ends, strict=True) if segment.logits]
        self._infer(
            {
                "tok": _padded([segment.token_ids for segment in segments], tokens, 0),
                "pos": _padded([np.arange(h, h + n) for h, n in zip(past, new, strict=True)], tokens, 0),
                "q_seg": _padded([np.repeat(np.arange(len(new)), new)], tokens, _PADDING_SEGMENT),
                "h_slot": _padded([self._pool_slots(s.blocks, s.history) for s in segments], history, 0),
                "h_pos": _padded([np.arange(h) for h in past], history, 0),
                "h_seg": _padded([np.repeat(np.arange(len(past)), past)], history, _PADDING_SEGMENT),
                "last": _padded([wanted], min(tokens, self._rows_max), 0),
            }
        )
        self._store(segments)
        logits: npt.NDArray[np.float32] = self._request.get_tensor("logits").data
        return logits[: len(wanted)]

    def probe(self, shape: tuple[int, int]) -> float:
        """Seconds of a pass of `shape` with made-up tokens and nothing masked.

        Does the work of `forward` over the first blocks of the pool, but K and V go to a scratch array.
        """
        tokens, history = shape
        past = np.resize(np.arange(len(self._pool)), -(-history // BLOCK_TOKENS))
        rows = min(tokens, self._rows_max)
        start_s = time.perf_counter()
        self._infer(
            {
                "tok": np.zeros(tokens, np.int32),
                "pos": np.zeros(tokens, np.int32),
                "q_seg": np.zeros(tokens, np.int32),
                "h_slot": self._pool_slots(past, history),
                "h_pos": np.zeros(history, np.int32),
                "h_seg": np.zeros(history, np.int32),
                "last": np.arange(tokens - rows, tokens, dtype=np.int32),
            }
        )
        self._kv_new().copy()
        self._request.get_tensor("logits").data.argmax(axis=1)
        return time.perf_counter() - start_s

    def commit(self, tokens: int) -> None:
        """Back the pool's first `tokens` by memory, so that `probe` reads it and not the shared zero page."""
        self._pool[: -(-tokens // BLOCK_TOKENS)] = 0

    def _pool_slots(self, blocks: npt.ArrayLike, tokens: int) -> Ints:
        """Where row 0 of each of the first `tokens` tokens in `blocks` lies in the flat pool."""
        used = np.asarray(blocks, dtype=np.int32)[: -(-tokens // BLOCK_TOKENS)]
        first = used * np.int32(self._pool.shape[1] * BLOCK_TOKENS)
        slots: Ints = np.add.outer(first, np.arange(BLOCK_TOKENS, dtype=np.int32)).reshape(-1)
        return slots[:tokens]

    def _store(self, segments: Sequence[Segment]) -> None:
        """Copy the new K and V of the pass into the blocks, block by block."""
        new, source = self._kv_new(), 0
        for segment in segments:
            position, end = segment.history, segment.history + len(segment.token_ids)
            while position < end:
                offset = position % BLOCK_TOKENS
                count = min(BLOCK_TOKENS - offset, end - position)
                block = self._pool[segment.blocks[position // BLOCK_TOKENS]]
                block[:, offset : offset + count] = new[:, source : source + count]
                position, source = position + count, source + count

    def _infer(self, inputs: dict[str, Ints]) -> None:
        for name, values in inputs.items():
            tensor = self._ov.Tensor(values, shared_memory=True) if values.size else self._empty()
            self._request.set_tensor(name, tensor)
        self._request.infer()

    def _empty(self) -> Any:
        """A tensor of no elements; one that shares an empty array would have no memory to point to."""
        return self._ov.Tensor(self._ov.Type.i32, [0])

    def _kv_new(self) -> npt.NDArray[Any]:
        """[rows, T, head_dim]. The library shows bf16 as float16, so only the bits mean anything."""
        values: npt.NDArray[Any] = self._request.get_tensor("kv_new").data
        return values.view(self._numpy_type)


def _padded(parts: Sequence[npt.ArrayLike], size: int, fill: int) -> Ints:
    """`parts` one after the other in an i32 array of `size`, the rest `fill`."""
    out = np.full(size, fill, dtype=np.int32)
    joined = np.concatenate([np.asarray(part, dtype=np.int32) for part in parts])
    out[: len(joined)] = joined
    return out


def _openvino() -> Any:
    try:
        import openvino
    except ImportError as error:
        raise ValueError(
            "openvino is not installed: install the extra, pip install 'plaserve[cpu]'"
        ) from error
    return openvino


def _read(core: Any, path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"{path}: no such file; build the bundle with `plaserve build`")
    try:
        return core.read_model(path)
    except RuntimeError as error:
        raise ValueError(f"{path} is not a model that OpenVINO reads; build the bundle again") from error


def _compute_precision(core: Any, precision: str) -> str:
    """`precision` where the CPU has instructions for it, else f32. KV is kept in `precision` all the same."""
    capabilities: list[str] = core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return precision if precision == "f32" or precision.upper() in capabilities else "f32"


def _keep_logits_exact(model: Any) -> None:
    """Give the LM head its weights as a float32 constant instead of a decompressed float16 one.

    The plugin then writes logits as float32 at the same speed. Otherwise bf16 rounds them to steps of 1/16 to
    1/8, which turns close calls between two tokens into ties.
    """
    from openvino import opset15 as ops

    head = model.output("logits").get_node().input_value(0).get_node()
    weight = head.input_value(1).get_node()
    if weight.get_type_name() == "Convert":
        values = weight.input_value(0).get_node().data.astype(np.float32)
        head.input(1).replace_source_output(ops.constant(values).output(0))


def _facts(model: Any, path: Path) -> ModelFacts:
    if not model.has_rt_info([MODEL_FACTS_KEY]):
        raise ValueError(f"{path} was not built by plaserve: rt_info {MODEL_FACTS_KEY!r} is missing")
    facts: dict[str, Any] = json.loads(model.get_rt_info([MODEL_FACTS_KEY]).astype(str))
    if (version := facts.get("graph_version")) != GRAPH_VERSION:
        raise ValueError(
            f"{path} has graph_version {version}, this engine needs {GRAPH_VERSION}: run `plaserve build`"
        )
    return ModelFacts(**facts)
