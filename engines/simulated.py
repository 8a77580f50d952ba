"""An engine made of a cost model: real block accounting and prefix reuse, no tensors, time by prediction.

`SimulatedModel` is the engine without a clock. A pass is two calls, `begin` (what it will hold and how long
it takes) and `finish` (what it did), and the caller puts the time between them: the virtual-time kernel
jumps, the asyncio runner sets a timer, `SimulatedEngine` sleeps and so is an ordinary `engines.base.Engine`.
One model under every clock: what holds in the simulator holds in the running service.

Blocks are claimed at the begin and become reusable at the finish, because their content exists only then.
Tokens are a hash of prompt and position, so a request repeats itself however it is batched, chunked or
reused; the end-of-sequence token appears only where `Behaviour.stop_after` asks for it.

A request is known by its token ids, or by sizes and block hashes alone (`submit_sizes`): traces have no text.
Its hashes may run on into the answer; those are published when the answer is complete.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from engines.base import EngineError, PassError, check_pass
from engines.blocks import BlockPool, BlockTable, OutOfBlocks, chain_hashes
from engines.cost_model import CostModel
from engines.profiles import Profiles
from engines.simulated_settings import Behaviour, Fault
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
    PassResult,
)

EOS_TOKEN = 2
_TOKEN_FIRST, _TOKEN_COUNT = 256, 32_000  # clear of the special tokens of common vocabularies


@dataclass(slots=True, eq=False)
class _Live:
    """A request that the engine holds. `table` is None until its first pass."""

    request_id: str
    prompt_tokens: int
    max_new_tokens: int
    hashes: tuple[int, ...]
    key: bytes  # what its tokens are derived from
    retain: bool = False
    ignore_eos: bool = False
    token_ids: tuple[int, ...] | None = None
    table: BlockTable | None = None
    position: int = 0
    generated: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Step:
    """One request's part of the pass that runs: `new` tokens after `start`, of which `reused` are cached."""

    live: _Live
    start: int
    new: int
    reused: int
    first: bool
    error: str | None = None


@dataclass(frozen=True, slots=True)
class _Open:
    """The pass that runs."""

    pass_: Pass
    steps: Sequence[_Step]
    executed_tokens: int
    executed_history: int
    duration_s: float


class SimulatedModel:
    """See the module text. `noise` yields factors on the time of each pass, from a seeded stream."""

    def __init__(
        self,
        capabilities: Capabilities,
        profiles: Profiles,
        cost: CostModel,
        behaviour: Behaviour | None = None,
        noise: Iterator[float] | None = None,
    ) -> None:
        if (capabilities.layout, capabilities.padding) != (profiles.layout, profiles.padding):
            raise ValueError("profiles: layout and padding must be those of the capabilities")
        self.capabilities = capabilities
        self.profiles = profiles
        self.cost = cost
        self._behaviour = behaviour or Behaviour()
        self._noise = noise
        self._pool = BlockPool(capabilities.kv_blocks_total, capabilities.block_tokens)
        self._live: dict[str, _Live] = {}
        self._open: _Open | None = None
        self._cancelled: set[str] = set()  # in the running pass
        self._passes_done = 0
        self._lost: str | None = None  # why the engine can't go on

    def submit(self, request: EngineRequest) -> None:
        """As `Engine.submit`."""
        ids = request.token_ids
        key = blake2b(struct.pack(f"<{len(ids)}I", *ids), digest_size=16).digest()
        hashes = chain_hashes(ids, self.capabilities.block_tokens)
        live = _Live(request.request_id, len(ids), request.max_new_tokens, hashes, key, request.retain)
        live.ignore_eos, live.token_ids = request.sampling.ignore_eos, ids
        self._add(live)

    def submit_sizes(
        self,
        request_id: str,
        prompt_tokens: int,
        max_new_tokens: int,
        block_hashes: tuple[int, ...] = (),
        *,
        retain: bool = False,
    ) -> None:
        """As `submit`, for a request without text; `block_hashes` name its full blocks."""
        key = blake2b(request_id.encode(), digest_size=16).digest()
        self._add(_Live(request_id, prompt_tokens, max_new_tokens, block_hashes, key, retain))

    def begin(self, pass_: Pass) -> float:
        """Start a pass and return its seconds. Raises as `Engine.execute`, but never PassError."""
        self._check_usable()
        if self._open is not None:
            raise RuntimeError(f"pass {pass_.pass_id}: pass {self._open.pass_.pass_id} still runs")
        steps = self._fitting_steps(pass_)
        self._claim(steps)
        ran = [(step.new, step.start) for step in steps if step.error is None]
        shape = self.profiles.executed(ran) if ran else None
        duration_s = self.cost.launch_s if shape is None else self.cost.pass_s(shape)
        duration_s *= self._behaviour.slow_factor * (next(self._noise) if self._noise else 1.0)
        tokens, history = (0, 0) if shape is None else (shape.tokens, shape.history)
        self._open = _Open(pass_, steps, tokens, history, duration_s)
        return duration_s

    def finish(self) -> PassResult:
        """End the pass that runs. Raises PassError and EngineError as the behaviour says."""
        self._check_usable()
        if self._open is None:
            raise RuntimeError("finish: no pass runs")
        ran, self._open = self._open, None
        self._passes_done += 1
        fault = self._behaviour.faults.get(self._passes_done)
        if fault is not None:
            raise self._fail(ran, fault)
        items = tuple(self._advance(step, ran.pass_.kind) for step in ran.steps)
        self._cancel_late()
        return PassResult(
            ran.pass_.pass_id,
            ran.pass_.kind,
            items,
            ran.executed_tokens,
            ran.executed_history,
            ran.duration_s,
        )

    def cancel(self, request_id: str) -> None:
        """As `Engine.cancel`. A request of the running pass is forgotten when the pass ends."""
        if self._open is not None and any(i.request_id == request_id for i in self._open.pass_.items):
            self._cancelled.add(request_id)
        else:
            self._forget(request_id)

    def stats(self) -> EngineStats:
        pool = self._pool
        return EngineStats(
            pool.blocks_total, pool.blocks_free, pool.blocks_cached, len(self._live), self._passes_done
        )

    def kv_events(self) -> tuple[KvEvent, ...]:
        return self._pool.take_events()

    def close(self) -> None:
        self._open = None
        for request_id in list(self._live):
            self._forget(request_id)
        self._lost = "the engine is closed"

    def check(self) -> None:
        """Raise AssertionError when the block accounts don't add up (tests)."""
        self._pool.check()

    # --- requests ---

    def _add(self, live: _Live) -> None:
        self._check_usable()
        if live.request_id in self._live:
            raise ValueError(f"request_id: {live.request_id} is already known")
        if live.prompt_tokens < 1:
            raise ValueError("token_ids: the prompt is empty")
        if live.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {live.max_new_tokens}")
        tokens, limits = live.prompt_tokens + live.max_new_tokens, self.capabilities
        tokens_max = min(limits.context_tokens_max, limits.kv_blocks_total * limits.block_tokens)
        if tokens > tokens_max:
            raise ValueError(
                f"prompt and max_new_tokens need {tokens} tokens; this engine holds {tokens_max}"
            )
        self._live[live.request_id] = live

    def _forget(self, request_id: str) -> None:
        live = self._live.pop(request_id, None)
        if live is not None and live.table is not None:
            self._pool.release(live.table)

    # --- the begin of a pass ---

    def _fitting_steps(self, pass_: Pass) -> list[_Step]:
        """The steps of `pass_`; nothing changes yet. Raises KeyError, ValueError.

        The cache may hold more of a prompt than the scheduler thought. All of it is taken where a profile
        has room for that much history, and else no more than was planned for.
        """
        check_pass(pass_, self.capabilities, self._answered)
        for capped in (False, True):
            steps = [self._step(item, pass_.kind, capped) for item in pass_.items]
            if self.profiles.executed([(step.new, step.start) for step in steps]) is not None:
                return steps
        raise ValueError(f"pass {pass_.pass_id}: no profile takes {[(s.new, s.start) for s in steps]}")

    def _answered(self, request_id: str) -> bool | None:
        live = self._live.get(request_id)
        return None if live is None else bool(live.generated)

    def _step(self, item: PassItem, kind: PassKind, capped: bool) -> _Step:
        live = self._live[item.request_id]
        if live.table is not None:
            start, reused = live.position, 0
        else:
            usable = live.prompt_tokens - 1  # the last token is always computed: its logits are needed
            usable = min(usable, item.history) if capped else usable
            cached = self._pool.lookup(live.hashes[: usable // self.capabilities.block_tokens])
            start = reused = cached * self.capabilities.block_tokens
        new = 1 if kind is PassKind.DECODE else min(item.new_tokens, live.prompt_tokens - start)
        return _Step(live, start, new, reused, first=live.table is None)

    def _claim(self, steps: Sequence[_Step]) -> None:
        """Take the blocks of all steps: cached ones first, so that none is evicted for another step."""
        for step in steps:
            if step.first:
                step.live.table = self._pool.acquire(step.live.hashes, step.start, retain=step.live.retain)
        for step in steps:
            assert step.live.table is not None
            try:
                self._pool.extend(step.live.table, step.start + step.new)
            except OutOfBlocks as error:
                step.error = f"out of KV blocks: {error}"
                self._forget(step.live.request_id)

    # --- the end of a pass ---

    def _advance(self, step: _Step, kind: PassKind) -> ItemResult:
        live = step.live
        if step.error is not None:
            return ItemResult(live.request_id, live.position, 0, error=step.error)
        assert live.table is not None
        live.position = step.start + step.new
        if kind is PassKind.PREFILL:
            self._publish(live.table, live.hashes, min(live.position, live.prompt_tokens))
            if live.position < live.prompt_tokens:
                return ItemResult(live.request_id, live.position, step.new, step.reused)
        token = self._next_token(live)
        live.generated.append(token)
        finish = self._finish_reason(live, token)
        if finish is not None:
            self._publish(live.table, self._all_hashes(live), live.position)
            self._forget(live.request_id)
        return ItemResult(live.request_id, live.position, step.new, step.reused, token, finish)

    def _publish(self, table: BlockTable, hashes: tuple[int, ...], tokens: int) -> None:
        self._pool.publish(table, hashes[: tokens // self.capabilities.block_tokens])

    def _all_hashes(self, live: _Live) -> tuple[int, ...]:
        if live.token_ids is None:
            return live.hashes
        return chain_hashes((*live.token_ids, *live.generated), self.capabilities.block_tokens)

    def _next_token(self, live: _Live) -> int:
        if not live.ignore_eos and self._behaviour.stop_after.get(live.request_id) == len(live.generated) + 1:
            return EOS_TOKEN
        digest = blake2b(struct.pack("<I", live.position), key=live.key, digest_size=8).digest()
        return _TOKEN_FIRST + int.from_bytes(digest, "little") % _TOKEN_COUNT

    def _finish_reason(self, live: _Live, token: int) -> FinishReason | None:
        if token == EOS_TOKEN:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(live.generated) >= live.max_new_tokens else None

    def _fail(self, ran: _Open, fault: Fault) -> Exception:
        """Undo the pass as the fault says; the error to raise."""
        what = f"pass {ran.pass_.pass_id} failed, as planned"
        if fault.fatal:
            self._lost = what
            return EngineError(what)
        in_pass = tuple(item.request_id for item in ran.pass_.items)
        out_of_blocks = {step.live.request_id for step in ran.steps if step.error is not None}
        lost = in_pass if fault.lost is None else fault.lost
        lost = tuple(i for i in dict.fromkeys((*lost, *in_pass)) if i in lost or i in out_of_blocks)
        for request_id in lost:
            self._forget(request_id)
        for step in ran.steps:
            if step.first and step.live.table is not None and step.live.request_id not in lost:
                self._pool.release(step.live.table)
                step.live.table = None
        self._cancel_late()
        return PassError(what, lost)

    def _cancel_late(self) -> None:
        for request_id in self._cancelled:
            self._forget(request_id)
        self._cancelled.clear()

    def _check_usable(self) -> None:
        if self._lost is not None:
            raise EngineError(self._lost)


class SimulatedEngine:
    """`engines.base.Engine` in wall time: `execute` sleeps `time_scale` seconds for each predicted one.

    `elapsed_s` of its results is what was slept, so a scheduler that plans ahead needs a cost model to the
    same scale. `sleep` may be anything that waits.
    """

    def __init__(
        self, model: SimulatedModel, sleep: Callable[[float], None] = time.sleep, time_scale: float = 1.0
    ) -> None:
        self.model = model
        self._sleep = sleep
        self._time_scale = time_scale

    @property
    def capabilities(self) -> Capabilities:
        return self.model.capabilities

    @property
    def profiles(self) -> Profiles:
        return self.model.profiles

    def submit(self, request: EngineRequest) -> None:
        self.model.submit(request)

    def execute(self, pass_: Pass) -> PassResult:
        elapsed_s = self.model.begin(pass_) * self._time_scale
        self._sleep(elapsed_s)
        return replace(self.model.finish(), elapsed_s=elapsed_s)

    def cancel(self, request_id: str) -> None:
        self.model.cancel(request_id)

    def stats(self) -> EngineStats:
        return self.model.stats()

    def kv_events(self) -> tuple[KvEvent, ...]:
        return self.model.kv_events()

    def close(self) -> None:
        self.model.close()
