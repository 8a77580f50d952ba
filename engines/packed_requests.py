"""What a packing engine that owns tensors keeps of its requests: tokens, blocks, positions.

For engines that are told every pass and chunk by the scheduler (`Chunking.EXTERNAL`) and keep KV in blocks
(`engines.blocks`): full blocks are published under their chain hash after each pass, prompt and answer
alike, and the first pass of a request starts after what the cache holds of its prompt, but always computes
the last prompt token, whose logits it needs. A request that finds no block fails alone.

What the cache really holds is known only when the pass begins. The budget of an item is counted from there,
so a request gets further than the scheduler thought when more is cached, and less far when blocks were
evicted. Where the profiles have no room for the additional history, no more is taken than was planned for.

A prefill pass may come in groups of layers. Blocks are claimed at the first, positions move at the last. A
request in between goes on with the next group of the same pass, or is cancelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engines.base import check_pass
from engines.blocks import BlockPool, BlockTable, OutOfBlocks, chain_hashes
from engines.cost_model import PassShape
from engines.profiles import Profiles
from engines.sampling import check_sampling, sample
from engines.types import (
    Capabilities,
    EngineRequest,
    EngineStats,
    FinishReason,
    ItemResult,
    KvEvent,
    Pass,
    PassItem,
    PassKind,
)


@dataclass(slots=True, eq=False)
class Live:
    """A request that the engine holds.

    tokens: prompt and answer; the KV of the first `position` exists. hashes: of the full blocks of the
    prompt, later of the answer too. table: None until the first pass.
    """

    request: EngineRequest
    tokens: list[int]
    rng: np.random.Generator
    hashes: tuple[int, ...]
    table: BlockTable | None = None
    position: int = 0
    published_blocks: int = 0

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.token_ids)

    @property
    def answer_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens


@dataclass(slots=True, eq=False)
class Step:
    """One request's part of a pass: `new` tokens after `start`, of which `reused` come from the cache."""

    live: Live
    start: int
    new: int
    reused: int = 0
    error: str | None = None

    @property
    def request_id(self) -> str:
        return self.live.request.request_id

    @property
    def samples(self) -> bool:
        return self.start + self.new == len(self.live.tokens)

    @property
    def new_ids(self) -> list[int]:
        return self.live.tokens[self.start : self.start + self.new]

    @property
    def blocks(self) -> list[int]:
        assert self.live.table is not None
        return self.live.table.blocks


@dataclass(frozen=True, slots=True)
class _Layers:
    """A request between two groups of layers: the first `done` of `blocks` of the pass that `item` was in."""

    done: int
    blocks: int
    item: PassItem
    step: Step


def sampled(steps: Sequence[Step], logits: npt.NDArray[np.float32]) -> dict[str, int]:
    """The token of each request that has one now. logits: [n, vocab], a row for each step that samples."""
    lives = [step.live for step in steps if step.samples]
    return {
        live.request.request_id: sample(row, live.request.sampling, live.rng)
        for live, row in zip(lives, logits, strict=True)
    }


class PackedRequests:
    """The requests of one engine. vocab: ids that a prompt may hold. eos_id: None ends by length alone."""

    def __init__(
        self, capabilities: Capabilities, profiles: Profiles, vocab: int, eos_id: int | None
    ) -> None:
        self._limits, self._profiles = capabilities, profiles
        self._vocab, self._eos_id = vocab, eos_id
        self._block = capabilities.block_tokens
        self._pool = BlockPool(capabilities.kv_blocks_total, capabilities.block_tokens)
        self._live: dict[str, Live] = {}
        self._layers: dict[str, _Layers] = {}  # requests between two groups of layers
        self.passes_done = 0

    def submit(self, request: EngineRequest) -> None:
        """As `Engine.submit`."""
        if request.request_id in self._live:
            raise ValueError(f"request_id: {request.request_id} is already known")
        if not request.token_ids:
            raise ValueError("token_ids: the prompt is empty")
        if not 0 <= min(request.token_ids) <= max(request.token_ids) < self._vocab:
            raise ValueError(f"token_ids: ids must be in [0, {self._vocab})")
        if request.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {request.max_new_tokens}")
        total, total_max = len(request.token_ids) + request.max_new_tokens, self._limits.context_tokens_max
        if total > total_max:
            raise ValueError(f"prompt and max_new_tokens need {total} tokens; this engine holds {total_max}")
        check_sampling(request.sampling)
        self._live[request.request_id] = Live(
            request=request,
            tokens=list(request.token_ids),
            rng=np.random.default_rng(request.sampling.seed),
            hashes=chain_hashes(request.token_ids, self._block),
        )

    def cancel(self, request_id: str) -> None:
        live = self._live.pop(request_id, None)
        self._layers.pop(request_id, None)
        if live is not None and live.table is not None:
            self._pool.release(live.table)

    def cancel_all(self) -> None:
        for request_id in list(self._live):
            self.cancel(request_id)

    def stats(self) -> EngineStats:
        pool = self._pool
        return EngineStats(
            pool.blocks_total, pool.blocks_free, pool.blocks_cached, len(self._live), self.passes_done
        )

    def kv_events(self) -> tuple[KvEvent, ...]:
        return self._pool.take_events()

    def check(self) -> None:
        """Raise AssertionError when the block accounts don't add up (tests)."""
        self._pool.check()

    # --- the begin of a pass ---

    def begin(self, pass_: Pass) -> tuple[list[Step], PassShape | None]:
        """The steps of `pass_`, with their blocks, and the shape that runs of them.

        A step without memory has its error set and its request is forgotten; where no other is left there
        is no shape. Raises KeyError and ValueError as `Engine.execute`; then nothing has changed.
        """
        check_pass(pass_, self._limits, self._answered)
        if self._layers or pass_.layer_block > 0:
            for item in pass_.items:
                if item.request_id in self._layers or pass_.layer_block > 0:
                    self._check_layers(pass_, item)
        if pass_.layer_block > 0:
            steps = [self._layers[item.request_id].step for item in pass_.items]
            return steps, self._shape(steps)
        for capped in (False, True):
            steps = [self._step(item, pass_.kind, capped) for item in pass_.items]
            shape = self._shape(steps)
            if shape is not None:
                if self._claim(steps):
                    return steps, shape
                running = [step for step in steps if step.error is None]
                shape = self._shape(running) if running else None
                assert shape is not None or not running  # fewer steps take no larger profile
                return steps, shape
        tokens, history = sum(step.new for step in steps), sum(step.start for step in steps)
        raise ValueError(
            f"pass {pass_.pass_id}: no profile takes {tokens} new tokens over {history} of history; "
            f"the largest are {self._profiles.tokens_max} and {self._profiles.history_max}"
        )

    def _shape(self, steps: Sequence[Step]) -> PassShape | None:
        """None where no profile takes `steps`."""
        return self._profiles.executed([(step.new, step.start) for step in steps])

    def _answered(self, request_id: str) -> bool | None:
        live = self._live.get(request_id)
        return None if live is None else live.answer_tokens > 0

    def _check_layers(self, pass_: Pass, item: PassItem) -> None:
        layers = self._layers.get(item.request_id)
        asked = (pass_.layer_block, pass_.layer_blocks, item.new_tokens, item.history)
        at = "has done no block"
        if layers is not None:
            done = (layers.done, layers.blocks, layers.item.new_tokens, layers.item.history)
            if asked == done:
                return
            at = "has done {} of {} blocks of {} tokens over {}".format(*done)
        what = "block {} of {}, {} tokens over {}".format(*asked)
        raise ValueError(f"pass {pass_.pass_id}: {item.request_id} {at}; it can't run {what}")

    def _step(self, item: PassItem, kind: PassKind, capped: bool) -> Step:
        """What `item` comes to. capped: take no more from the cache than the scheduler counted on."""
        live = self._live[item.request_id]
        if live.table is not None:
            start, reused = live.position, 0
        else:
            usable = min(item.history, live.prompt_tokens - 1) if capped else live.prompt_tokens - 1
            start = reused = self._pool.lookup(live.hashes[: usable // self._block]) * self._block
        new = 1 if kind is PassKind.DECODE else min(item.new_tokens, live.prompt_tokens - start)
        return Step(live, start, new, reused)

    def _claim(self, steps: Sequence[Step]) -> bool:
        """Take the blocks of all steps: cached ones first, so that none is evicted for another step.

        Returns whether every step got its blocks.
        """
        complete = True
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
                self.cancel(step.request_id)
                complete = False
        return complete

    # --- the end of a pass ---

    def between(self, step: Step, pass_: Pass, item: PassItem) -> ItemResult:
        """After a group of layers that is not the last: the position is where it was before the pass."""
        if step.error is None:
            done = _Layers(pass_.layer_block + 1, pass_.layer_blocks, item, step)
            self._layers[step.request_id] = done
        return ItemResult(step.request_id, step.start - step.reused, 0, error=step.error)

    def advance(self, step: Step, token: int | None) -> ItemResult:
        """After the whole pass. token: of a step that samples."""
        live, request_id = step.live, step.request_id
        if step.error is not None:
            return ItemResult(request_id, live.position, 0, error=step.error)
        if self._layers:
            self._layers.pop(request_id, None)
        live.position = step.start + step.new
        self._publish(live)
        finish = None
        if token is not None:
            live.tokens.append(token)
            finish = self._finish_reason(live, token)
        if finish is not None:
            self.cancel(request_id)
        return ItemResult(request_id, live.position, step.new, step.reused, token, finish)

    def _publish(self, live: Live) -> None:
        """Make the full blocks of `live` reusable."""
        full = live.position // self._block
        if full == live.published_blocks:
            return
        if full > len(live.hashes):
            live.hashes = chain_hashes(live.tokens[: live.position], self._block)
        assert live.table is not None
        self._pool.publish(live.table, live.hashes[:full])
        live.published_blocks = full

    def _finish_reason(self, live: Live, token: int) -> FinishReason | None:
        if token == self._eos_id and not live.request.sampling.ignore_eos:
            return FinishReason.STOP
        return FinishReason.LENGTH if live.answer_tokens >= live.request.max_new_tokens else None
