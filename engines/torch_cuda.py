"""The torch engine: the Llama and Qwen2 family on CUDA without TensorRT-LLM, or on a CPU to be tested.

It packs: a pass is one row of tokens of several requests, prefill chunks with or without history or one token
each for decode. The scheduler chunks long prompts and alternates prefill with decode passes. A prefill pass
can stop between layers (`layer_blocks`) and let other passes run: what it holds until then is one tensor.

Two ways to run, by its profiles:

    padding nothing   eager: every kernel is launched anew, for exactly the tokens of the pass
    padding class     T goes up to its class, and the pass is a CUDA graph of that class and its class of
                      summed history, captured at load (`engines.torch_cuda_graphs`). In groups of layers a
                      pass runs eager. Without CUDA the same buffers run uncaptured.

Weights are given by name or random: the second is for timing, where only sizes matter. `engines` can be
imported without torch; it is needed from `load` on. Not measured on a GPU yet.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from engines.base import EngineError, PassError
from engines.packed_requests import PackedRequests, Step, sampled
from engines.profiles import Profiles
from engines.torch_cuda_batch import PackedBatch, Piece, Slots, pack, probe_batch
from engines.types import (
    Capabilities,
    Chunking,
    DecodeMode,
    EngineRequest,
    EngineStats,
    ItemResult,
    KvEvent,
    Layout,
    Padding,
    Pass,
    PassResult,
)

if TYPE_CHECKING:
    from engines.torch_cuda_graphs import FixedPass
    from engines.torch_cuda_model import DecoderConfig, State, TorchModel, Weights

BLOCK_TOKENS = 32
REQUESTS_MAX = 64
KV_CAPACITY_TOKENS = 65_536
EAGER_PROFILES = Profiles(Layout.PACKED, Padding.NOTHING, (8192,))
CLASS_PROFILES = Profiles(
    Layout.PACKED, Padding.CLASS, (16, 32, 64, 128, 256, 512, 1024, 2048), (0, 4096, 32_768)
)


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """How an engine is loaded.

    dtype: bf16 or f32. graphs: capture the classes where there is CUDA. layer_blocks_max: groups of layers
    that a prefill pass may come in; None: one a layer.
    """

    device: str = "cuda"
    dtype: str = "bf16"
    profiles: Profiles = EAGER_PROFILES
    kv_capacity_tokens: int = KV_CAPACITY_TOKENS
    block_tokens: int = BLOCK_TOKENS
    requests_max: int = REQUESTS_MAX
    graphs: bool = True
    layer_blocks_max: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in ("bf16", "f32"):
            raise ValueError(f"dtype {self.dtype!r} is not known; use bf16 or f32")
        for name in ("block_tokens", "requests_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.kv_capacity_tokens < self.block_tokens:
            raise ValueError(
                f"kv_capacity_tokens must be at least {self.block_tokens}, got {self.kv_capacity_tokens}"
            )
        profiles = self.profiles
        if profiles.layout is not Layout.PACKED or profiles.padding is Padding.CELL or profiles.block_mask:
            raise ValueError(
                "profiles: this engine packs, keeps requests apart, and pads to nothing or classes"
            )
        if profiles.captured:
            raise ValueError("profiles: captured cells are not supported; use padding 'class'")
        if profiles.padding is Padding.CLASS and not profiles.h_classes:
            raise ValueError("profiles: h_classes is empty; padding 'class' needs them, 0 for no history")


class TorchCudaEngine:
    """Implements `engines.base.Engine`; see the module text. Build it with `load`."""

    def __init__(self, model: TorchModel, options: TorchOptions) -> None:
        config, profiles = model.config, options.profiles
        blocks = model.slots.blocks
        limits = [config.context_tokens, blocks * options.block_tokens]
        if profiles.history_max is not None:
            limits.append(max(1, profiles.history_max))
        layers = config.shape.layers
        self._capabilities = Capabilities(
            layout=Layout.PACKED,
            padding=profiles.padding,
            chunking=Chunking.EXTERNAL,
            merges_lanes=False,
            decode=DecodeMode.ALTERNATES,
            requests_max=options.requests_max,
            context_tokens_max=min(limits),
            block_tokens=options.block_tokens,
            kv_blocks_total=blocks,
            layer_blocks_max=min(layers, options.layer_blocks_max or layers),
        )
        self._profiles = profiles
        self._requests = PackedRequests(self._capabilities, profiles, config.shape.vocab, config.eos_id)
        self._model: TorchModel | None = model
        self._fixed: dict[tuple[int, int], FixedPass] = {}
        # Passes between two groups of layers, by the requests that are left of them.
        self._halted: dict[tuple[str, ...], tuple[State, PackedBatch]] = {}
        if profiles.padding is Padding.CLASS:
            self._fixed = _fixed_passes(model, options)

    @classmethod
    def load(
        cls,
        config: DecoderConfig,
        options: TorchOptions | None = None,
        weights: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> Self:
        """Put weights on the device and capture the classes.

        weights: arrays by the names of `torch_cuda_model.weight_shapes`; None makes random ones. Raises
        ValueError naming the option or tensor that can't be used, RuntimeError where CUDA is asked for and
        absent, or the memory does not suffice.
        """
        from engines.torch_cuda_model import TorchModel, given_weights, random_weights

        options = options or TorchOptions()
        made: Weights
        if weights is None:
            made = random_weights(config, options.device, options.dtype, seed)
        else:
            made = given_weights(config, weights, options.device, options.dtype)
        blocks = options.kv_capacity_tokens // options.block_tokens
        slots = Slots(blocks, options.block_tokens, scratch=options.profiles.tokens_max)
        return cls(TorchModel(config, made, slots), options)

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def profiles(self) -> Profiles:
        return self._profiles

    @property
    def model(self) -> TorchModel:
        """The forward below this engine, for measurements. Raises EngineError once closed."""
        if self._model is None:
            raise EngineError("the engine is closed")
        return self._model

    def submit(self, request: EngineRequest) -> None:
        _ = self.model
        self._requests.submit(request)

    def execute(self, pass_: Pass) -> PassResult:
        start_s = time.perf_counter()
        model, requests = self.model, self._requests
        steps, shape = requests.begin(pass_)
        ids = tuple(step.request_id for step in steps)
        if pass_.layer_block > 0 and ids not in self._halted:
            raise ValueError(f"pass {pass_.pass_id}: no pass of {ids}, in this order, stopped between layers")
        running = [step for step in steps if step.error is None]
        requests.passes_done += 1
        tokens: dict[str, int] = {}
        if shape is not None:
            try:
                tokens = self._run(model, pass_, running)
            except RuntimeError as error:
                raise self._failed(pass_, error) from error
        pairs = zip(steps, pass_.items, strict=True)
        items: tuple[ItemResult, ...]
        if pass_.completes:
            items = tuple([requests.advance(step, tokens.get(step.request_id)) for step in steps])
        else:
            items = tuple([requests.between(step, pass_, item) for step, item in pairs])
        executed = (0, 0) if shape is None else (shape.tokens, shape.history)
        return PassResult(pass_.pass_id, pass_.kind, items, *executed, time.perf_counter() - start_s)

    def cancel(self, request_id: str) -> None:
        self._requests.cancel(request_id)
        for ids in [ids for ids in self._halted if request_id in ids]:
            self._drop(ids, request_id)

    def stats(self) -> EngineStats:
        return self._requests.stats()

    def kv_events(self) -> tuple[KvEvent, ...]:
        return self._requests.kv_events()

    def measure(self, tokens: int, history: int, batch: int = 1) -> float:
        """Seconds of a pass of `batch` requests of `tokens` new tokens over `history` each, to the tokens.

        No request changes. Raises ValueError for a shape that no profile or the pool does not take.
        """
        model, sizes = self.model, [(tokens, history)] * batch
        if batch > self._capabilities.requests_max or self._profiles.executed(sizes) is None:
            raise ValueError(f"{batch} x {tokens} over {history} is no pass of this engine: {self._profiles}")
        made = probe_batch(sizes, model.slots, model.config.shape.vocab)
        start_s = time.perf_counter()
        self._forward(model, made).argmax(dim=-1).tolist()
        return time.perf_counter() - start_s

    def close(self) -> None:
        self._requests.cancel_all()
        self._halted.clear()
        self._fixed.clear()
        self._model = None

    # --- a pass ---

    def _failed(self, pass_: Pass, error: RuntimeError) -> PassError | EngineError:
        """Out of memory ends a pass. Any other error of a kernel leaves CUDA unusable: the engine is lost."""
        lost = tuple(item.request_id for item in pass_.items)
        what = f"pass {pass_.pass_id} failed: {error}"
        if self.model.device.type == "cuda" and type(error).__name__ != "OutOfMemoryError":
            self.close()
            return EngineError(what)
        for request_id in lost:
            self.cancel(request_id)
        return PassError(what, lost)

    def _run(self, model: TorchModel, pass_: Pass, steps: Sequence[Step]) -> dict[str, int]:
        """The token of each request that has one now."""
        if pass_.layer_blocks == 1:
            return _sampled(steps, self._forward(model, pack(_pieces(steps), model.slots)))
        ids = tuple(step.request_id for step in steps)
        state = self._layers(model, pass_, steps, ids)
        if not pass_.completes:
            return {}
        import torch

        with torch.inference_mode():
            return _sampled(steps, model.head(state))

    def _forward(self, model: TorchModel, batch: PackedBatch) -> Any:
        """Logits of the rows that want them, [rows, vocab]."""
        if not self._fixed:
            return model.forward(batch)
        history = sum(batch.k_lens) - batch.tokens
        t_class, h_class = self._profiles.t_class(batch.tokens), self._profiles.h_class(history)
        assert t_class is not None  # checked when the pass began
        assert h_class is not None
        return self._fixed[t_class, h_class].run(batch)

    def _layers(self, model: TorchModel, pass_: Pass, steps: Sequence[Step], ids: tuple[str, ...]) -> State:
        """Run one group of layers."""
        import torch

        with torch.inference_mode():
            if pass_.layer_block == 0:
                batch = pack(_pieces(steps), model.slots)
                state = model.begin(model.upload(batch))
            else:
                state, batch = self._halted.pop(ids)
            layers, blocks = model.config.shape.layers, pass_.layer_blocks
            first, stop = layers * pass_.layer_block // blocks, layers * (pass_.layer_block + 1) // blocks
            model.layers(state, first, stop, model.attention)
            if model.device.type == "cuda":  # the pass has ended when its layers have
                torch.cuda.current_stream().synchronize()
        if not pass_.completes:
            self._halted[ids] = state, batch
        return state

    def _drop(self, ids: tuple[str, ...], request_id: str) -> None:
        """Take a request out of a halted pass: its blocks are gone and must not be written any more."""
        state, batch = self._halted.pop(ids)
        left = [number for number, other in enumerate(ids) if other != request_id]
        if left and self._model is not None:
            import torch

            with torch.inference_mode():
                kept = self._model.keep(state, batch, left)
            self._halted[tuple(ids[number] for number in left)] = kept


def _pieces(steps: Sequence[Step]) -> list[Piece]:
    return [Piece(step.new_ids, step.blocks, step.start, logits=step.samples) for step in steps]


def _sampled(steps: Sequence[Step], logits: Any) -> dict[str, int]:
    """logits: a row for each step that samples. Greedy tokens are found on the device."""
    wanting = [step for step in steps if step.samples]
    if all(step.live.request.sampling.temperature == 0.0 for step in wanting):
        best: list[int] = logits.argmax(dim=-1).tolist()
        return {step.request_id: token for step, token in zip(wanting, best, strict=True)}
    return sampled(steps, logits.float().cpu().numpy())


def _fixed_passes(model: TorchModel, options: TorchOptions) -> dict[tuple[int, int], FixedPass]:
    """A fixed pass for every (T, H) class, the largest first."""
    import torch

    from engines.torch_cuda_graphs import FixedPass, FixedShape

    capture = options.graphs and model.device.type == "cuda"
    attention = model.choose(captured=True)[0] if capture else model.attention
    pool = torch.cuda.graph_pool_handle() if capture else None
    made: dict[tuple[int, int], FixedPass] = {}
    for h_class in reversed(options.profiles.h_classes):
        for t_class in reversed(options.profiles.t_classes):
            shape = FixedShape(t_class, t_class + h_class, options.requests_max)
            made[t_class, h_class] = FixedPass(model, shape, attention, pool)
            made[t_class, h_class].prepare(capture=capture)
    return made
