"""The embedded engine: a small Llama on OpenVINO, on the CPU.

It packs: a pass is one row of tokens of several requests, prefill chunks with or without history or one token
each for decode, kept apart by a mask (`engines.openvino_model`). It pads T and the summed history to the
classes of its profiles, warms them at load and runs no other shape. The scheduler chunks long
prompts and alternates prefill with decode passes; the engine merges nothing by itself.

KV lives in blocks (`engines.blocks`): full blocks are published under their chain hash after each pass,
prompt and answer alike, and the first pass of a request starts after what the cache holds of its prompt, but
always computes the last prompt token, whose logits it needs. A request that finds no block fails alone.

What the cache really holds is known only when the pass begins. The budget of an item is counted from there,
so a request gets further than the scheduler thought when more is cached, and less far when blocks were
evicted. Where the profiles have no room for the additional history, no more is taken than was planned for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from engines.base import EngineError, PassError, check_pass
from engines.blocks import BlockPool, BlockTable, OutOfBlocks, chain_hashes
from engines.openvino_model import BLOCK_TOKENS, MODEL_XML, PackedModel, Segment
from engines.profiles import Profiles
from engines.sampling import check_sampling, sample
from engines.types import (
    Capabilities,
    Chunking,
    DecodeMode,
    EngineRequest,
    EngineStats,
    FinishReason,
    ItemResult,
    KvEvent,
    Layout,
    Padding,
    Pass,
    PassItem,
    PassKind,
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


@dataclass(slots=True, eq=False)
class _Live:
    """A request that the engine holds.

    tokens: prompt and answer; the KV of the first `position` exists. table: None until the first pass.
    """

    request: EngineRequest
    tokens: list[int]
    rng: np.random.Generator
    hashes: tuple[int, ...]  # of the full blocks of the prompt, later of the answer too
    table: BlockTable | None = None
    position: int = 0
    published_blocks: int = 0

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.token_ids)

    @property
    def answer_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens


@dataclass(slots=True)
class _Step:
    """One request's part of a pass: `new` tokens after `start`, of which `reused` come from the cache."""

    live: _Live
    start: int
    new: int
    reused: int = 0
    error: str | None = None

    @property
    def samples(self) -> bool:
        return self.start + self.new == len(self.live.tokens)


class OpenVinoCpuEngine:
    """Implements `engines.base.Engine`; see the module text. Build it with `load`."""

    def __init__(self, model: PackedModel, profiles: Profiles, kv_capacity_tokens: int) -> None:
        _check_profiles(profiles)
        self._model: PackedModel | None = model
        self._profiles = profiles
        self._pool = BlockPool(kv_capacity_tokens // BLOCK_TOKENS, BLOCK_TOKENS)
        limits = (model.facts.context_tokens, self._pool.blocks_total * BLOCK_TOKENS, profiles.h_classes[-1])
        self._capabilities = Capabilities(
            layout=Layout.PACKED,
            padding=Padding.CLASS,
            chunking=Chunking.EXTERNAL,
            merges_lanes=False,
            decode=DecodeMode.ALTERNATES,
            requests_max=REQUESTS_MAX,
            context_tokens_max=min(limits),
            block_tokens=BLOCK_TOKENS,
            kv_blocks_total=self._pool.blocks_total,
        )
        self._facts = model.facts
        self._live: dict[str, _Live] = {}
        self._passes_done = 0

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
        if request.request_id in self._live:
            raise ValueError(f"request_id: {request.request_id} is already known")
        self._check_request(request)
        self._live[request.request_id] = _Live(
            request=request,
            tokens=list(request.token_ids),
            rng=np.random.default_rng(request.sampling.seed),
            hashes=chain_hashes(request.token_ids, BLOCK_TOKENS),
        )

    def execute(self, pass_: Pass) -> PassResult:
        start_s = time.perf_counter()
        model = self._usable()
        steps = self._steps(pass_)
        self._claim(steps)
        running = [step for step in steps if step.error is None]
        shape = self._shape(running) if running else (0, 0)
        assert shape is not None  # without the steps that failed it is no larger than what was checked
        tokens = self._forward(model, pass_, running, shape) if running else {}
        self._passes_done += 1
        items = tuple(self._finish(step, tokens.get(step.live.request.request_id)) for step in steps)
        elapsed_s = time.perf_counter() - start_s
        return PassResult(pass_.pass_id, pass_.kind, items, *shape, elapsed_s)

    def cancel(self, request_id: str) -> None:
        live = self._live.pop(request_id, None)
        if live is not None and live.table is not None:
            self._pool.release(live.table)

    def stats(self) -> EngineStats:
        pool = self._pool
        return EngineStats(
            pool.blocks_total, pool.blocks_free, pool.blocks_cached, len(self._live), self._passes_done
        )

    def kv_events(self) -> tuple[KvEvent, ...]:
        return self._pool.take_events()

    def measure(self, tokens: int, history: int) -> float:
        """Seconds of a pass of exactly the profile (tokens, history), for calibration. No request changes.

        Raises ValueError for a shape that is no profile.
        """
        model = self._usable()
        if tokens not in self._profiles.t_classes or history not in self._profiles.h_classes:
            raise ValueError(f"({tokens}, {history}) is no profile of this engine: {self._profiles}")
        return model.probe((tokens, history))

    def close(self) -> None:
        for request_id in list(self._live):
            self.cancel(request_id)
        self._model = None

    # --- requests ---

    def _usable(self) -> PackedModel:
        if self._model is None:
            raise EngineError("the engine is closed")
        return self._model

    def _check_request(self, request: EngineRequest) -> None:
        if not request.token_ids:
            raise ValueError("token_ids: the prompt is empty")
        if not 0 <= min(request.token_ids) <= max(request.token_ids) < self._facts.vocab:
            raise ValueError(f"token_ids: ids must be in [0, {self._facts.vocab})")
        if request.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {request.max_new_tokens}")
        total, total_max = (
            len(request.token_ids) + request.max_new_tokens,
            self._capabilities.context_tokens_max,
        )
        if total > total_max:
            raise ValueError(f"prompt and max_new_tokens need {total} tokens; this engine holds {total_max}")
        check_sampling(request.sampling)

    # --- a pass: what will run ---

    def _steps(self, pass_: Pass) -> list[_Step]:
        """The steps of `pass_`; nothing changes yet. Raises KeyError, ValueError."""
        check_pass(pass_, self._capabilities, self._answered)
        for capped in (False, True):
            steps = [self._step(item, pass_.kind, capped) for item in pass_.items]
            if self._shape(steps) is not None:
                return steps
        tokens, history = sum(step.new for step in steps), sum(step.start for step in steps)
        raise ValueError(
            f"pass {pass_.pass_id}: no profile takes {tokens} new tokens over {history} of history; "
            f"the largest are {self._profiles.tokens_max} and {self._profiles.history_max}"
        )

    def _answered(self, request_id: str) -> bool | None:
        live = self._live.get(request_id)
        return None if live is None else live.answer_tokens > 0

    def _step(self, item: PassItem, kind: PassKind, capped: bool) -> _Step:
        """What `item` comes to. capped: take no more from the cache than the scheduler counted on."""
        live = self._live[item.request_id]
        if live.table is not None:
            start, reused = live.position, 0
        else:
            usable = min(item.history, live.prompt_tokens - 1) if capped else live.prompt_tokens - 1
            cached = self._pool.lookup(live.hashes[: usable // BLOCK_TOKENS])
            start = reused = cached * BLOCK_TOKENS
        new = 1 if kind is PassKind.DECODE else min(item.new_tokens, live.prompt_tokens - start)
        return _Step(live, start, new, reused)

    def _shape(self, steps: Sequence[_Step]) -> tuple[int, int] | None:
        """(T-class, H-class) of the profile for `steps`; None where none fits."""
        shape = self._profiles.executed([(step.new, step.start) for step in steps])
        return None if shape is None else (shape.tokens, shape.history)

    def _claim(self, steps: Sequence[_Step]) -> None:
        """Take the blocks of all steps: cached ones first, so that none is evicted for another step."""
        for step in steps:
            live = step.live
            if live.table is None:
                live.table = self._pool.acquire(live.hashes, step.start, retain=live.request.retain)
                live.position = step.start
                live.published_blocks = len(live.table.blocks)
        for step in steps:
            assert step.live.table is not None
            try:
                self._pool.extend(step.live.table, step.start + step.new)
            except OutOfBlocks as error:
                step.error = f"out of KV blocks: {error}"
                self.cancel(step.live.request.request_id)

    # --- a pass: running it and what came of it ---

    def _forward(
        self, model: PackedModel, pass_: Pass, steps: Sequence[_Step], shape: tuple[int, int]
    ) -> dict[str, int]:
        """Run the model; the sampled token of each request that has one now."""
        try:
            logits = model.forward([_segment(step) for step in steps], shape)
        except RuntimeError as error:
            lost = tuple(item.request_id for item in pass_.items)
            for request_id in lost:
                self.cancel(request_id)
            raise PassError(f"pass {pass_.pass_id} of shape {shape} failed: {error}", lost) from error
        sampling = [step.live for step in steps if step.samples]
        return {
            live.request.request_id: sample(row, live.request.sampling, live.rng)
            for live, row in zip(sampling, logits, strict=True)
        }

    def _finish(self, step: _Step, token: int | None) -> ItemResult:
        live, request_id = step.live, step.live.request.request_id
        if step.error is not None:
            return ItemResult(request_id, live.position, 0, error=step.error)
        live.position = step.start + step.new
        self._publish(live)
        finish = None
        if token is not None:
            live.tokens.append(token)
            finish = self._finish_reason(live, token)
        if finish is not None:
            self.cancel(request_id)
        return ItemResult(request_id, live.position, step.new, step.reused, token, finish)

    def _publish(self, live: _Live) -> None:
        """Make the full blocks of `live` reusable."""
        full = live.position // BLOCK_TOKENS
        if full == live.published_blocks:
            return
        if full > len(live.hashes):
            live.hashes = chain_hashes(live.tokens[: live.position], BLOCK_TOKENS)
        assert live.table is not None
        self._pool.publish(live.table, live.hashes[:full])
        live.published_blocks = full

    def _finish_reason(self, live: _Live, token: int) -> FinishReason | None:
        if token == self._facts.eos_id and not live.request.sampling.ignore_eos:
            return FinishReason.STOP
        return FinishReason.LENGTH if live.answer_tokens >= live.request.max_new_tokens else None


def _segment(step: _Step) -> Segment:
    end = step.start + step.new
    assert step.live.table is not None
    return Segment(
        step.live.tokens[step.start : end], step.live.table.blocks, step.start, logits=step.samples
    )


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
