"""An engine made of a cost model: real block accounting and prefix reuse, no tensors, time by prediction.

`SimulatedModel` is the engine without a clock. A pass is two calls, `begin` (what it will hold and how long
it takes) and `finish` (what it did), and the caller puts the time between them: the virtual-time kernel
jumps, the asyncio runner sets a timer, `SimulatedEngine` sleeps and so is an ordinary `engines.base.Engine`.
One model under every clock: what holds in the simulator holds in the running service.

Blocks are claimed at the begin and become reusable at the finish, because their content exists only then. A
request is known by its token ids, or by sizes and block hashes alone (`submit_sizes`): traces have no text.
Its hashes may run on into the answer; those are published when the answer is complete.

What the capabilities change:

* `layer_blocks_max` > 1: a prefill pass may come in groups of layers, with other passes in between. Each
  takes its share of the time. Blocks are claimed at the first, positions move at the last; a request in
  between goes on with the next group of the same pass, or is cancelled.
* chunking `prefix_reuse`: a part of a prompt is a request of its own. It ends with a full block, costs
  `CostModel.part_s`, and leaves its blocks in the cache, evicted last. Where some were evicted all the same,
  the next part starts from what is left, keeps to its budget, and the position falls back.
* decode `beside`: the next token of every decoding request rides in each prefill pass, on top of its limits,
  and is priced and answered with it.
* decode `none`: prefill only; a request ends with its first token and may ask for no more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from engines.base import EngineError, PassError, check_pass
from engines.cost_model import CostModel, PassShape
from engines.profiles import Profiles
from engines.simulated_requests import EOS_TOKEN, Layers, Live, RequestBook, Step
from engines.simulated_settings import Behaviour, Fault
from engines.types import (
    Capabilities,
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


@dataclass(frozen=True, slots=True)
class _Open:
    """The pass that runs. steps: those of its items, then those of requests that decode beside them."""

    pass_: Pass
    steps: Sequence[Step]
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
        self._rides = capabilities.decode is DecodeMode.BESIDE
        padded = profiles.padding is not Padding.NOTHING or profiles.h_classes or profiles.captured
        if self._rides and (padded or profiles.layout is not Layout.PACKED):
            raise ValueError("decode: 'beside' is simulated for packed passes without padding only")
        self.capabilities = capabilities
        self.profiles = profiles
        self.cost = cost
        self._behaviour = behaviour or Behaviour()
        self._noise = noise
        self._book = RequestBook(capabilities)
        self._open: _Open | None = None
        self._cancelled: set[str] = set()  # in the running pass
        self._passes_done = 0
        self._lost: str | None = None  # why the engine can't go on

    def submit(self, request: EngineRequest) -> None:
        """As `Engine.submit`."""
        self._check_usable()
        self._book.add(Live.of(request, self.capabilities.block_tokens))

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
        self._check_usable()
        self._book.add(Live(request_id, prompt_tokens, max_new_tokens, block_hashes, retain))

    def begin(self, pass_: Pass) -> float:
        """Start a pass and return its seconds. Raises as `Engine.execute`, but never PassError."""
        self._check_usable()
        if self._open is not None:
            raise RuntimeError(f"pass {pass_.pass_id}: pass {self._open.pass_.pass_id} still runs")
        steps, shape = self._fitting_steps(pass_)
        if pass_.layer_block == 0 and not self._book.claim(steps):
            shape = self._shape(steps)
        duration_s, tokens, history = self.cost.launch_s, 0, 0
        if shape is not None:
            tokens, history = shape.tokens, shape.history
            duration_s = self.cost.pass_s(shape, self._parts(steps)) / pass_.layer_blocks
        duration_s *= self._behaviour.slow_factor * (next(self._noise) if self._noise else 1.0)
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
        if ran.pass_.completes:
            items = tuple([self._advance(step) for step in ran.steps])
        else:
            pairs = zip(ran.steps, ran.pass_.items, strict=True)  # nothing rides in a group of layers
            items = tuple([self._between(step, item, ran.pass_) for step, item in pairs])
        if self._cancelled:
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
        if self._open is not None and any(s.live.request_id == request_id for s in self._open.steps):
            self._cancelled.add(request_id)
        else:
            self._book.forget(request_id)

    def stats(self) -> EngineStats:
        pool, live = self._book.pool, len(self._book.live)
        return EngineStats(pool.blocks_total, pool.blocks_free, pool.blocks_cached, live, self._passes_done)

    def kv_events(self) -> tuple[KvEvent, ...]:
        return self._book.pool.take_events()

    def close(self) -> None:
        self._open = None
        for request_id in list(self._book.live):
            self._book.forget(request_id)
        self._lost = "the engine is closed"

    def check(self) -> None:
        """Raise AssertionError when the block accounts don't add up (tests)."""
        self._book.pool.check()

    # --- the begin of a pass ---

    def _fitting_steps(self, pass_: Pass) -> tuple[list[Step], PassShape | None]:
        """The steps of `pass_` and its shape; nothing changes yet. Raises KeyError, ValueError.

        The cache may hold more of a prompt than the scheduler thought. All of it is taken where a profile
        has room for that much history, and else no more than was planned for.
        """
        check_pass(pass_, self.capabilities, self._book.answered, self._book.prompt_tokens)
        for item in pass_.items:
            if self._book.live[item.request_id].layers is not None or pass_.layer_block > 0:
                self._check_layers(pass_, item)
        if pass_.layer_block > 0:
            begun = [self._book.live[item.request_id].layers for item in pass_.items]
            steps = [layers.step for layers in begun if layers is not None]
            return steps, self._shape(steps)
        for capped in (False, True):
            steps = [self._step(item, pass_.kind, capped) for item in pass_.items]
            sizes = [(step.new, step.start) for step in steps if step.new]
            shape = self.profiles.executed(sizes) if sizes else None
            if shape is not None or not sizes:
                return self._with_riders(pass_, steps, shape)
        raise ValueError(f"pass {pass_.pass_id}: no profile takes {[(s.new, s.start) for s in steps]}")

    def _check_layers(self, pass_: Pass, item: PassItem) -> None:
        layers = self._book.live[item.request_id].layers
        asked = (pass_.layer_block, pass_.layer_blocks, item.new_tokens, item.history)
        if layers is None:
            at = "has done no block"
        else:
            done = (layers.done, layers.blocks, layers.item.new_tokens, layers.item.history)
            if asked == done:
                return
            at = "has done {} of {} blocks of {} tokens over {}".format(*done)
        what = "block {} of {}, {} tokens over {}".format(*asked)
        raise ValueError(f"pass {pass_.pass_id}: {item.request_id} {at}; it can't run {what}")

    def _step(self, item: PassItem, kind: PassKind, capped: bool) -> Step:
        live, block = self._book.live[item.request_id], self.capabilities.block_tokens
        if live.table is not None:
            start, reused = live.position, 0
        else:
            start = self._book.cached_tokens(live, item.history if capped else live.prompt_tokens)
            reused = max(0, start - live.position)  # of a part's blocks, those that others computed
        new = 1 if kind is PassKind.DECODE else min(item.new_tokens, live.prompt_tokens - start)
        if self._book.parts_are_requests and start + new < live.prompt_tokens:
            new = max(0, (start + new) // block * block - start)
        return Step(live, start, new, reused, first=live.table is None)

    def _with_riders(
        self, pass_: Pass, steps: list[Step], shape: PassShape | None
    ) -> tuple[list[Step], PassShape | None]:
        """`steps`, and the next token of all that decodes, in the same iteration."""
        if not self._rides or pass_.kind is PassKind.DECODE or pass_.layer_blocks > 1:
            return steps, shape
        steps += [Step(live, live.position, 1, 0, first=False) for live in self._book.decoding.values()]
        return steps, self._shape(steps)

    def _shape(self, steps: Sequence[Step]) -> PassShape | None:
        """What really runs of `steps`; None for nothing."""
        ran = [(step.new, step.start) for step in steps if step.new and step.error is None]
        if self._rides:  # unpadded, and what rides comes on top of the largest pass of prompts
            return PassShape.of(ran) if ran else None
        return self.profiles.executed(ran) if ran else None

    def _parts(self, steps: Sequence[Step]) -> int:
        """How many of them end before their prompts do; not counted where that costs nothing."""
        return sum(s.is_part for s in steps if s.new and s.error is None) if self.cost.part_s else 0

    # --- the end of a pass ---

    def _between(self, step: Step, item: PassItem, pass_: Pass) -> ItemResult:
        """After a group of layers that is not the last."""
        live = step.live
        if step.error is None:
            live.layers = Layers(pass_.layer_block + 1, pass_.layer_blocks, item, step)
        return ItemResult(live.request_id, live.position, 0, error=step.error)

    def _advance(self, step: Step) -> ItemResult:
        live = step.live
        if step.error is not None:
            return ItemResult(live.request_id, live.position, 0, error=step.error)
        live.layers = None
        live.position = step.start + step.new
        if live.position < live.prompt_tokens:
            self._book.end_chunk(live)
            return ItemResult(live.request_id, live.position, step.new, step.reused)
        assert live.table is not None
        token = live.next_token(self._behaviour.stop_after.get(live.request_id))
        live.generated.append(token)
        finish = self._finish_reason(live, token)
        self._book.publish_prompt(live)
        if finish is not None:
            if len(live.generated) > 1:
                self._book.publish(live, live.all_hashes(self.capabilities.block_tokens), live.position)
            self._book.forget(live.request_id)
        elif self._rides:
            self._book.decoding[live.request_id] = live
        return ItemResult(live.request_id, live.position, step.new, step.reused, token, finish)

    def _finish_reason(self, live: Live, token: int) -> FinishReason | None:
        if token == EOS_TOKEN:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(live.generated) >= live.max_new_tokens else None

    def _fail(self, ran: _Open, fault: Fault) -> Exception:
        """Undo the pass as the fault says, a group of layers back to before the first; the error to raise."""
        what = f"pass {ran.pass_.pass_id} failed, as planned"
        if fault.fatal:
            self._lost = what
            return EngineError(what)
        in_pass = tuple(step.live.request_id for step in ran.steps)
        out_of_blocks = {step.live.request_id for step in ran.steps if step.error is not None}
        lost = in_pass if fault.lost is None else fault.lost
        lost = tuple(i for i in dict.fromkeys((*lost, *in_pass)) if i in lost or i in out_of_blocks)
        for request_id in lost:
            self._book.forget(request_id)
        for step in ran.steps:
            if step.live.request_id not in lost:
                self._book.undo(step)
        self._cancel_late()
        return PassError(what, lost)

    def _cancel_late(self) -> None:
        for request_id in self._cancelled:
            self._book.forget(request_id)
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
