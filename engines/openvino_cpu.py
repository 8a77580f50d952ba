"""The embedded engine: a small Llama on OpenVINO, on the CPU.

It packs: a pass is one row of tokens of several requests, prefill chunks with or without history or one token
each for decode, kept apart by a mask (`engines.openvino_model`). It pads T and the summed history to the
classes of its profiles, warms them at load and runs no other shape. The scheduler chunks long
prompts and alternates prefill with decode passes; the engine merges nothing by itself.

Requests and the blocks of their KV are kept by `engines.packed_requests`: what is cached, what a pass comes
to when it begins, and which request fails alone for want of a block.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from engines.base import EngineError, PassError
from engines.openvino_model import BLOCK_TOKENS, MODEL_XML, PackedModel, Segment
from engines.packed_requests import PackedRequests, Step, sampled
from engines.profiles import Profiles
from engines.types import (
    Capabilities,
    Chunking,
    DecodeMode,
    EngineRequest,
    EngineStats,
    KvEvent,
    Layout,
    Padding,
    Pass,
    PassResult,
)

REQUESTS_MAX = 32  # also the most rows that the LM head computes
KV_CAPACITY_TOKENS = 32_768  # 23 kB a token for SmolLM2-135M in bf16: 755 MB, touched as it fills
PRECISIONS = ("bf16", "f32")
WARM_TOKENS = 512  # above it a pass takes so long that only kernels for T itself are worth warming

# Passes below 16 tokens take other kernels, whose bf16 logits differ enough to turn a close call. Decode
# steps of few requests cost 4 to 20 % more at 16, and answers don't depend on how a pass was made up.
DEFAULT_PROFILES = Profiles(
    layout=Layout.PACKED,
    padding=Padding.CLASS,
    t_classes=(16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048),
    h_classes=(0, 256, 512, 1024, 2048, 4096),
    block_mask=True,
)


def default_threads() -> int:
    """All cores that this process may use but one, which is left to the service's event loop."""
    return max(1, len(os.sched_getaffinity(0)) - 1)


class OpenVinoCpuEngine:
    """Implements `engines.base.Engine`; see the module text. Build it with `load`."""

    def __init__(self, model: PackedModel, profiles: Profiles, kv_capacity_tokens: int) -> None:
        _check_profiles(profiles)
        self._model: PackedModel | None = model
        self._profiles = profiles
        blocks = kv_capacity_tokens // BLOCK_TOKENS
        limits = (model.facts.context_tokens, blocks * BLOCK_TOKENS, profiles.h_classes[-1])
        self._capabilities = Capabilities(
            layout=Layout.PACKED,
            padding=Padding.CLASS,
            chunking=Chunking.EXTERNAL,
            merges_lanes=False,
            decode=DecodeMode.ALTERNATES,
            requests_max=REQUESTS_MAX,
            context_tokens_max=min(limits),
            block_tokens=BLOCK_TOKENS,
            kv_blocks_total=blocks,
        )
        facts = model.facts
        self._requests = PackedRequests(self._capabilities, profiles, facts.vocab, facts.eos_id)

    @classmethod
    def load(
        cls,
        bundle_dir: Path,
        profiles: Profiles = DEFAULT_PROFILES,
        *,
        threads: int | None = None,
        precision: str = "bf16",
        kv_capacity_tokens: int = KV_CAPACITY_TOKENS,
        progress: Callable[[int, int], None] | None = None,
    ) -> Self:
        """Compile `bundle_dir`/model.xml and warm its profiles.

        threads: of the forward; default all cores but one. precision: bf16 computes and stores KV in
        bfloat16 (on a CPU without it the plugin computes in float32); f32 is for exactness. progress is
        called with (profiles warmed, profiles in all). Raises ValueError naming the option that can't be
        used or the file that can't be read.
        """
        if precision not in PRECISIONS:
            raise ValueError(f"precision {precision!r} is not known; use {' or '.join(PRECISIONS)}")
        if threads is not None and threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        if kv_capacity_tokens < BLOCK_TOKENS:
            raise ValueError(f"kv_capacity_tokens must be at least {BLOCK_TOKENS}, got {kv_capacity_tokens}")
        _check_profiles(profiles)
        model = PackedModel(
            bundle_dir / MODEL_XML,
            blocks=kv_capacity_tokens // BLOCK_TOKENS,
            rows_max=REQUESTS_MAX,
            threads=threads or default_threads(),
            precision=precision,
        )
        engine = cls(model, profiles, kv_capacity_tokens)
        model.commit(profiles.h_classes[-1])
        shapes = warmed_shapes(profiles)
        for done, shape in enumerate(shapes, start=1):
            model.probe(shape)
            if progress is not None:
                progress(done, len(shapes))
        return engine

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def profiles(self) -> Profiles:
        return self._profiles

    def submit(self, request: EngineRequest) -> None:
        self._usable()
        self._requests.submit(request)

    def execute(self, pass_: Pass) -> PassResult:
        start_s = time.perf_counter()
        model, requests = self._usable(), self._requests
        steps, shape = requests.begin(pass_)
        executed, tokens = (0, 0), {}
        if shape is not None:
            executed = (shape.tokens, shape.history)
            running = [step for step in steps if step.error is None]
            tokens = self._forward(model, pass_, running, executed)
        requests.passes_done += 1
        items = tuple([requests.advance(step, tokens.get(step.request_id)) for step in steps])
        elapsed_s = time.perf_counter() - start_s
        return PassResult(pass_.pass_id, pass_.kind, items, *executed, elapsed_s)

    def cancel(self, request_id: str) -> None:
        self._requests.cancel(request_id)

    def stats(self) -> EngineStats:
        return self._requests.stats()

    def kv_events(self) -> tuple[KvEvent, ...]:
        return self._requests.kv_events()

    def measure(self, tokens: int, history: int) -> float:
        """Seconds of a pass of exactly the profile (tokens, history), for calibration. No request changes.

        Raises ValueError for a shape that is no profile.
        """
        model = self._usable()
        if tokens not in self._profiles.t_classes or history not in self._profiles.h_classes:
            raise ValueError(f"({tokens}, {history}) is no profile of this engine: {self._profiles}")
        return model.probe((tokens, history))

    def close(self) -> None:
        self._requests.cancel_all()
        self._model = None

    def _usable(self) -> PackedModel:
        if self._model is None:
            raise EngineError("the engine is closed")
        return self._model

    def _forward(
        self, model: PackedModel, pass_: Pass, steps: Sequence[Step], shape: tuple[int, int]
    ) -> dict[str, int]:
        """Run the model; the sampled token of each request that has one now."""
        try:
            logits = model.forward([_segment(step) for step in steps], shape)
        except RuntimeError as error:
            lost = tuple(item.request_id for item in pass_.items)
            for request_id in lost:
                self.cancel(request_id)
            raise PassError(f"pass {pass_.pass_id} of shape {shape} failed: {error}", lost) from error
        return sampled(steps, logits)


def _segment(step: Step) -> Segment:
    return Segment(step.new_ids, step.blocks, step.start, logits=step.samples)


def warmed_shapes(profiles: Profiles) -> list[tuple[int, int]]:
    """The profiles that are run once at load: all, but above WARM_TOKENS only those of the first H-class."""
    first = profiles.h_classes[0]
    return [(t, h) for t in profiles.t_classes for h in profiles.h_classes if t <= WARM_TOKENS or h == first]


def _check_profiles(profiles: Profiles) -> None:
    """Raise ValueError naming what this engine can't do."""
    if (profiles.layout, profiles.padding, profiles.block_mask) != (Layout.PACKED, Padding.CLASS, True):
        raise ValueError("profiles: this engine packs under a block mask and pads to classes")
    if not profiles.h_classes or profiles.t_classes[0] < 1:
        raise ValueError("profiles: h_classes must not be empty and t_classes at least 1")
