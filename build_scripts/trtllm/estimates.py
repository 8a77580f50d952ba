"""What a build takes before anything was built: memory on the GPU, sizes on disk, times, graphs.

Each figure carries its basis, and none of them was measured here. Weights and KV follow from the shape of
the model and are exact. Activations are an estimate: the widest pair of tensors of a layer, for the largest
pass. Times are guesses for orientation.

The PyTorch backend has the weights as the checkpoint has them, and a graph for every captured size. What
those take is not known before they are captured: a figure of LAPS for whole prefill graphs stands for each.

An engine's plan holds its weights once, however many profiles it has. Where the GEMMs are TensorRT's, it may
keep a layout of its own for each profile, so the upper end is one more copy of the matmul weights per
profile; how much it really is, only a build tells.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from build_scripts.spec import BuildError
from build_scripts.trtllm.recipe import pass_classes, pass_tokens
from build_scripts.trtllm.spec import GemmChoice, Quantisation, TrtLlmSpec, shape_of

RESERVE_BYTES = 2_000_000_000  # CUDA context, library workspaces, the executor's own buffers: assumed
_VALUE_BYTES = 2  # bfloat16 and float16

# LAPS: megabytes of one captured prefill graph, by model.
_GRAPH_MB = {"qwen2.5-7b": 228.0, "qwen2.5-14b": 240.0, "qwen2.5-32b": 277.0}
_GRAPH_S = (8.0, 12.0)  # seconds to capture one


@dataclass(frozen=True, slots=True)
class Figure:
    """A size in bytes. at_most_bytes: its upper end where it is not known. basis: where it comes from."""

    name: str
    size_bytes: int
    basis: str
    at_most_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of the GPU when the engines are loaded.

    usable_bytes: the share of the GPU that the spec allows. figures: what takes it, the KV pool last.
    kv_tokens: what the pool holds, in whole blocks; kv_tokens_min: of the longest request, which must fit.
    kv_tokens_worst: what is left if the plan has its upper size; None where that does not fit at all.
    """

    usable_bytes: int
    figures: tuple[Figure, ...]
    kv_bytes_per_token: int
    kv_tokens: int
    kv_tokens_min: int
    kv_tokens_worst: int | None

    def bytes_of(self, name: str) -> int:
        return next(figure.size_bytes for figure in self.figures if figure.name == name)


@dataclass(frozen=True, slots=True)
class GraphComparison:
    """The same grid as captured CUDA graphs, and as one engine a cell.

    capture_s: (least, most) seconds at every start. graph_bytes: of all cells. estimated: whether the size of
    a graph was interpolated over parameters and not published for this model. engine_per_cell_bytes: weights
    alone. profiles: in one engine, with one set of weights; or sizes that the PyTorch backend captures.
    """

    cells: int
    graph_bytes_each: int
    graph_bytes: int
    capture_s: tuple[float, float]
    estimated: bool
    engine_per_cell_bytes: int
    profiles: int
    weights_bytes: int

    @property
    def captured_bytes(self) -> int:
        """Of graphs of the captured sizes, were each as large as the paper's; not measured."""
        return self.profiles * self.graph_bytes_each

    @property
    def captured_s(self) -> tuple[float, float]:
        """(least, most) seconds to capture those, at the paper's rate; not measured."""
        return self.profiles * _GRAPH_S[0], self.profiles * _GRAPH_S[1]


def weight_bytes(spec: TrtLlmSpec) -> int:
    """Of one copy. FP8 keeps embedding and LM head in 16 bits."""
    shape = spec.shape
    if spec.quantisation is Quantisation.NONE:
        return _VALUE_BYTES * shape.parameters
    return shape.block_parameters + _VALUE_BYTES * (shape.parameters - shape.block_parameters)


def kv_bytes_per_token(spec: TrtLlmSpec) -> int:
    per_token = spec.shape.kv_bytes_per_token
    return per_token // 2 if spec.quantisation is Quantisation.FP8 else per_token


def activation_bytes(spec: TrtLlmSpec) -> int:
    """Of the largest pass: gate and up of the MLP, or Q, K, V, beside input and residual; and its logits."""
    shape = spec.shape
    widest = max(2 * shape.ffn, (shape.heads + 2 * shape.kv_heads) * shape.head_dim) + 2 * shape.hidden
    return pass_tokens(spec) * widest * _VALUE_BYTES + spec.requests_max * shape.vocab * 4


def plan_bytes(spec: TrtLlmSpec, *, gemm_plugin: bool, profiles: int) -> tuple[int, int]:
    """(least, most) bytes of a plan; see the module text."""
    weights = weight_bytes(spec)
    if gemm_plugin:
        return weights, weights
    layout = spec.shape.block_parameters * (1 if spec.quantisation is Quantisation.FP8 else _VALUE_BYTES)
    return weights, weights + (profiles - 1) * layout


def beside_weights(spec: TrtLlmSpec) -> tuple[Figure, ...]:
    """What one executor takes beside its weights, its pool and the reserve."""
    activations = Figure(
        "activations",
        activation_bytes(spec),
        f"estimated: {pass_tokens(spec):,} tokens x the widest tensors of a layer, and logits",
    )
    if not spec.torch:
        return (activations,)
    graphs = graph_comparison(spec)
    basis = (
        f"assumed: {graphs.profiles} captured sizes x {graphs.graph_bytes_each / 1e6:.0f} MB, what LAPS says "
        "of whole prefill graphs; piecewise ones are not measured here"
    )
    return activations, Figure("graphs", graphs.captured_bytes, basis)


def memory(spec: TrtLlmSpec) -> Memory:
    """Raises BuildError naming what to change where weights and the longest request don't fit the GPU."""
    engines = len(spec.engine_names)
    profiles = len(pass_classes(spec))
    tensorrt = spec.gemm is not GemmChoice.PLUGIN and not spec.torch
    low, high = plan_bytes(spec, gemm_plugin=not tensorrt, profiles=profiles)
    usable = int(spec.memory_share * spec.gpu_memory_bytes)
    per_token = kv_bytes_per_token(spec)
    fixed = (
        Figure(
            "weights",
            engines * low,
            f"{spec.shape.parameters / 1e9:.2f}G parameters, {_precision(spec)}"
            + (
                ", one copy an engine" if engines > 1 else "" if spec.torch else ", one copy for all profiles"
            ),
            engines * low + high - low if high > low else None,
        ),
        *(replace(figure, size_bytes=engines * figure.size_bytes) for figure in beside_weights(spec)),
        Figure("reserve", engines * RESERVE_BYTES, "assumed: CUDA context, workspaces, executor buffers"),
    )
    kv_bytes = usable - sum(figure.size_bytes for figure in fixed)
    kv_min = -(-spec.context_tokens_max // spec.block_tokens) * spec.block_tokens
    if kv_bytes < engines * kv_min * per_token:
        raise BuildError(_does_not_fit(spec, fixed, engines * kv_min * per_token, usable))
    _check_quantising(spec)
    kv_tokens = kv_bytes // (spec.block_tokens * per_token) * spec.block_tokens
    worst_bytes = kv_bytes - (high - low)
    worst = worst_bytes // (spec.block_tokens * per_token) * spec.block_tokens if worst_bytes > 0 else 0
    pool = Figure(
        "KV pool",
        kv_tokens * per_token,
        f"what is left of {spec.memory_share:.0%} of the GPU: {kv_tokens:,} tokens, "
        f"{per_token / 1024:.0f} KiB each" + (", two pools" if engines > 1 else ""),
    )
    return Memory(
        usable, (*fixed, pool), per_token, kv_tokens, kv_min, worst if worst >= engines * kv_min else None
    )


def _check_quantising(spec: TrtLlmSpec) -> None:
    """Scales are measured on the GPU by the model in 16 bits. Raises BuildError where that does not fit."""
    needed = _VALUE_BYTES * spec.shape.parameters + RESERVE_BYTES
    if spec.quantisation is Quantisation.FP8 and needed > spec.gpu_memory_bytes:
        raise BuildError(
            f"{spec.model} can't be quantised on {spec.gpu}: its weights in 16 bits, by which scales are "
            f"measured, take {needed / 1e9:.1f} GB with buffers, the GPU has "
            f"{spec.gpu_memory_bytes / 1e9:.0f} GB; use a larger gpu"
        )


def _does_not_fit(spec: TrtLlmSpec, fixed: Iterable[Figure], kv_bytes: int, usable: int) -> str:
    parts = [f"{figure.name} {figure.size_bytes / 1e9:.1f} GB" for figure in fixed]
    parts.append(f"KV of one request of {spec.context_tokens_max:,} tokens {kv_bytes / 1e9:.1f} GB")
    ways = []
    if spec.separate_lp:
        ways.append("leave out separate_lp, which is a second copy of the weights")
    if spec.quantisation is Quantisation.NONE and not spec.torch:
        ways.append("quantisation fp8")
    ways += ["a smaller context_tokens_max or pass_tokens_max", "a larger gpu"]
    return (
        f"{spec.model} does not fit {spec.gpu}: {', '.join(parts)}, but {usable / 1e9:.1f} GB may be used "
        f"({spec.memory_share:.0%} of {spec.gpu_memory_bytes / 1e9:.0f} GB); change one of: {'; '.join(ways)}"
    )


def graph_price(parameters: int) -> tuple[int, float]:
    """(bytes, most seconds) of one more captured prefill graph of a model of so many weights. The figures of
    LAPS, between the models they are published for by parameters."""
    return int(_graph_megabytes(parameters) * 1e6), _GRAPH_S[1]


def graph_comparison(spec: TrtLlmSpec) -> GraphComparison:
    """The grid as LAPS captures it, against the profiles of one engine. The paper's figures, not ours."""
    each, _ = graph_price(spec.shape.parameters)
    cells = len(spec.lengths) * len(spec.batches)
    weights = weight_bytes(spec)
    return GraphComparison(
        cells=cells,
        graph_bytes_each=each,
        graph_bytes=cells * each,
        capture_s=(cells * _GRAPH_S[0], cells * _GRAPH_S[1]),
        estimated=spec.shape.name not in _GRAPH_MB or spec.quantisation is not Quantisation.NONE,
        engine_per_cell_bytes=cells * weights,
        profiles=len(pass_classes(spec)),
        weights_bytes=weights,
    )


def _graph_megabytes(parameters: int) -> float:
    """Between the published models by parameters; outside them, the nearest."""
    points = sorted((shape_of(name).parameters, size) for name, size in _GRAPH_MB.items())
    if parameters <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if parameters <= x1:
            return y0 + (y1 - y0) * (parameters - x0) / (x1 - x0)
    return points[-1][1]


def _precision(spec: TrtLlmSpec) -> str:
    return "FP8, embedding and head 16 bit" if spec.quantisation is Quantisation.FP8 else spec.dtype


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds of a step, and what the figure rests on."""

    seconds: float
    basis: str


def fetch_time(spec: TrtLlmSpec) -> Time:
    if spec.checkpoint is not None:
        return Time(spec.shape.weight_bytes / 1e9, "reading it once to hash it, at 1 GB/s")
    return Time(spec.shape.weight_bytes / 200e6, "download at 200 MB/s")


def convert_time(spec: TrtLlmSpec) -> Time:
    moved_s = (spec.shape.weight_bytes + weight_bytes(spec)) / 1e9
    if spec.quantisation is Quantisation.NONE:
        return Time(60 + moved_s, "guess: 1 min to start, weights read and written at 1 GB/s")
    return Time(360 + moved_s, "guess: 1 min to start, 5 min for 512 texts, weights at 1 GB/s")


def build_time(spec: TrtLlmSpec, *, gemm_plugin: bool, profiles: int) -> Time:
    each_s = 20 if gemm_plugin else 90
    return Time(
        120 + each_s * profiles + weight_bytes(spec) / 0.5e9,
        f"guess: 2 min, {each_s} s a profile for timing kernels, weights at 0.5 GB/s",
    )


def start_time(spec: TrtLlmSpec, measuring_s: float, what: str) -> Time:
    """A step that starts the PyTorch backend, which captures its graphs, and measures."""
    graphs = graph_comparison(spec)
    return Time(
        30 + weight_bytes(spec) / 1e9 + graphs.captured_s[1] + measuring_s,
        f"guess: 30 s, weights at 1 GB/s, {graphs.profiles} captures at LAPS's {_GRAPH_S[1]:.0f} s, {what}",
    )


def load_time(spec: TrtLlmSpec, engines: int, measuring_s: float, what: str) -> Time:
    """A step that loads `engines` engines, one after the other, and measures."""
    return Time(
        engines * (30 + weight_bytes(spec) / 1e9) + measuring_s,
        f"guess: {engines} x (30 s, weights at 1 GB/s), {what}",
    )


def copy_time(size_bytes: int) -> Time:
    return Time(2 + size_bytes / 0.5e9, "guess: 0.5 GB/s")
