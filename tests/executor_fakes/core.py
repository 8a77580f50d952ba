"""The iterations of a fake executor: what waits, what runs, who holds which blocks. One thread, no waiting.

`step` is one iteration. It frees what was cancelled, fetches what was enqueued (a list is always seen
whole), lets waiting requests in first come first served while their whole need of blocks is to be had
(GUARANTEED_NO_EVICT) and runs: a token for every request that decodes, and prompts within max_num_tokens
and max_batch_size. A prompt begins with the blocks that are cached, never with its last token. Its full
blocks are named when it is computed, of all but its last token, those of the answer one token after they are
full, and what is left when the request ends: of all tokens but the last one of its output (read in a source
near 1.x, storeContextBlocks, storeNewBlock, releaseBlocks). A context-only request
keeps its blocks until `pull` or a cancel.

Decided here, since it is not known of the real one: cached tokens do not count against max_num_tokens (see
`Vices.counts_cached`), a context-only request makes one token whatever its max_tokens is, and max_tokens of
a generation-only request counts the tokens that the context side made.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from .iteration_stats import iteration_stats
from .live import ExecutorCrash, Limits, Live
from .messages import FakeRequest, FakeResponse, Finish, HandOver, Kind, ReuseMetrics, make_token
from .pool import Block, FakePool, block_hashes
from .vices import NEVER, Vices

_STATS_KEPT = 1000


class Core:
    """name: what hand-overs call this executor. pull_from: takes the KV that a hand-over names."""

    def __init__(
        self, name: str, pool: FakePool, limits: Limits, vices: Vices, pull_from: Callable[[HandOver], bool]
    ) -> None:
        self.name = name
        self.pool = pool
        self.limits = limits
        self.vices = vices
        self.iterations = 0
        self.completed = 0
        self.cancels: set[int] = set()
        self.kept: dict[int, Live] = {}  # context-only, until pulled
        self.ready: deque[FakeResponse] = deque()
        self.stats: deque[dict[str, Any]] = deque(maxlen=_STATS_KEPT)
        self._pull_from = pull_from
        self._ids = count(1)
        self._inbox: deque[Live] = deque()
        self._merged = False  # whether the inbox has waited its step
        self._waiting: deque[Live] = deque()
        self._active: dict[int, Live] = {}

    @property
    def live(self) -> int:
        """Requests that are not at their end."""
        return len(self._inbox) + len(self._waiting) + len(self._active) + len(self.kept)

    @property
    def has_work(self) -> bool:
        """Whether a step can bring anything on: not where it hangs or waits for KV that never comes."""
        moving = any(live.transfer_left != NEVER for live in self._active.values())
        return not self._hangs and bool(moving or self._inbox or self._waiting or self.cancels)

    @property
    def _hangs(self) -> bool:
        return bool(self.vices.hang) and self.iterations >= self.vices.hang

    def may_answer(self, request_id: int | None) -> bool:
        held = [*self._inbox, *self._waiting, *self._active.values()]
        return any(request_id in (None, live.request_id) for live in held)

    def pull(self, request_id: int) -> bool:
        live = self.kept.pop(request_id, None)
        if live is not None:
            self._give_back(live)
        return live is not None

    def reset(self) -> None:
        """Nothing waits, runs or is cached any more, and nobody is told but by events."""
        for live in [*self._active.values(), *self.kept.values()]:
            self.pool.release(live.table)
        for held in (
            self._active,
            self.kept,
            self._inbox,
            self._waiting,
            self.ready,
            self.cancels,
            self.stats,
        ):
            held.clear()
        self.pool.evict_idle()
        self.pool.reused = self.pool.missed = self.pool.allocated = 0

    def step(self) -> bool:
        """One iteration. False: nothing has changed, and nothing will without a new request or a cancel.

        Raises ExecutorCrash.
        """
        if not self.has_work:
            return False
        before = (len(self.ready), self.live, len(self.cancels), self._merged)
        self._end_cancelled()
        self._fetch()
        ran = self._run()
        self.pool.check()
        return ran or before != (len(self.ready), self.live, len(self.cancels), self._merged)

    def _fetch(self) -> None:
        if self.vices.merge and self._inbox and not self._merged:
            self._merged = True
            return
        self._merged = False
        self._waiting.extend(self._inbox)
        self._inbox.clear()

    def _run(self) -> bool:
        waited = self._advance_transfers()
        tokens, slots = self.limits.max_num_tokens, self.limits.max_batch_size
        decoding = [x for x in self._active.values() if not x.in_context and x.transfer_left is None]
        decoding = decoding[: min(slots, tokens)]
        contexts = self._choose_contexts(tokens - len(decoding), slots - len(decoding))
        admitted = [live for live in self._active.values() if live.transfer_left is not None]
        if not decoding and not contexts:
            return bool(waited or any(live.transfer_left != NEVER for live in admitted))
        self.iterations += 1
        for live, size in contexts:
            self._grow(live, live.position + size)
            live.position += size
            if not live.in_context:
                self._name_blocks(live, live.request.token_ids[:-1])
                self._answer(live)
        for live in decoding:
            self._grow(live, live.position + 1)
            self._name_blocks(live, (*live.request.token_ids, *live.outputs)[: live.position])
            live.position += 1
            self._answer(live)
        self._record(len(contexts), sum(size for _, size in contexts), len(decoding))
        return True

    def _choose_contexts(self, tokens: int, slots: int) -> list[tuple[Live, int]]:
        """Prompts of this iteration with the new tokens of each; those of a waiting one are let in."""
        if self.vices.split:
            slots = min(slots, self.vices.split)
        chosen: list[tuple[Live, int]] = []
        for live in [x for x in self._active.values() if x.in_context]:
            size = self._chunk(live.prompt_tokens - live.position, tokens)
            if len(chosen) >= slots or not size:
                return chosen
            chosen.append((live, size))
            tokens -= size
        skipped: list[Live] = []
        while self._waiting and len(chosen) < slots and len(self._active) < self.limits.max_batch_size:
            live = self._waiting[0]
            shared = self._cached(live)
            if not self._has_room(live):
                break
            if live.request.kind is Kind.GENERATION_ONLY:
                self._waiting.popleft()
                self._begin_transfer(live)
                continue
            if self.vices.delay_shared_prefix and self._is_computed_beside(live, len(shared), chosen):
                skipped.append(self._waiting.popleft())
                continue
            left = live.prompt_tokens - len(shared) * self.pool.block_tokens
            counted = live.prompt_tokens if self.vices.counts_cached else left
            size = self._chunk(counted, tokens)
            if counted > self.limits.max_num_tokens and not self.limits.chunked:
                self._refuse(self._waiting.popleft(), counted)
                continue
            if not size:
                break
            self._waiting.popleft()
            self._let_in(live, shared)
            chosen.append((live, min(size, left)))
            tokens -= size
        self._waiting.extendleft(reversed(skipped))
        return chosen

    def _chunk(self, left: int, tokens: int) -> int:
        """New tokens of a prompt with `left` to compute, 0 where it has to wait. Chunks end with a block."""
        if left <= tokens:
            return left
        return tokens // self.pool.block_tokens * self.pool.block_tokens if self.limits.chunked else 0

    # --- requests ---

    def enqueue(self, request: FakeRequest) -> int:
        size = self.pool.block_tokens
        tokens = len(request.token_ids) + request.max_tokens
        live = Live(next(self._ids), request, block_hashes(request.token_ids, size), -(-tokens // size))
        error = self._refusal(request, live)
        every = self.vices.error_response
        if error is None and every and live.request_id % every == 0:
            error = "the executor met an error in this request"
        if error is None:
            self._inbox.append(live)
        else:
            self.ready.append(FakeResponse(live.request_id, final=True, error=error))
        return live.request_id

    def _refusal(self, request: FakeRequest, live: Live) -> str | None:
        prompt = len(request.token_ids)
        if not prompt or request.max_tokens < 1:
            return f"a request of {prompt} prompt tokens and max_tokens {request.max_tokens}"
        if prompt + request.max_tokens > self.limits.max_seq_len:
            return (
                f"prompt length {prompt} + max_tokens {request.max_tokens} exceed {self.limits.max_seq_len}"
            )
        longest = self.limits.max_input_len
        if longest is not None and prompt > longest and request.kind is not Kind.GENERATION_ONLY:
            return f"Prompt length ({prompt}) exceeds maximum input length ({longest})"
        if live.need > self.pool.blocks_total:
            return f"{live.need} KV blocks needed, the pool has {self.pool.blocks_total}"
        if request.kind is Kind.GENERATION_ONLY and request.hand_over is None:
            return "context_phase_params are missing"
        return None

    def _cached(self, live: Live) -> list[Block]:
        if not self.limits.reuse or live.request.kind is Kind.GENERATION_ONLY:  # the KV comes whole
            return []
        return self.pool.match(live.hashes[: (live.prompt_tokens - 1) // self.pool.block_tokens])

    def _has_room(self, live: Live) -> bool:
        """What it could share with those that run is counted as its own need (read in a source near 1.x,
        getRemainingBlocksToCompletion; later ones give credit for it)."""
        promised = sum(other.need - len(other.table) for other in self._active.values())
        return live.need <= self.pool.takeable - promised

    def _is_computed_beside(self, live: Live, shared: int, chosen: Sequence[tuple[Live, int]]) -> bool:
        wanted = live.hashes[shared : shared + 1]
        return any(value in other.hashes for value in wanted for other, _ in chosen)

    def _let_in(self, live: Live, shared: Sequence[Block]) -> None:
        live.table = self.pool.hold(shared)
        for index, block in enumerate(shared):
            asked = live.request.asked_priority(index * self.pool.block_tokens)
            block.priority = block.priority if asked is None else asked
        live.reused_blocks = len(shared)
        live.position = len(shared) * self.pool.block_tokens
        self.pool.reused += len(shared)
        self.pool.missed += -(-live.prompt_tokens // self.pool.block_tokens) - len(shared)
        self._active[live.request_id] = live

    def _begin_transfer(self, live: Live) -> None:
        live.transfer_left = self.vices.late_transfer
        self._active[live.request_id] = live
        self._grow(live, live.prompt_tokens)

    def _advance_transfers(self) -> int:
        """KV of hand-overs that comes; how many requests came on by it."""
        moved = 0
        for live in list(self._active.values()):
            if live.transfer_left is None or live.transfer_left == NEVER:
                continue
            moved += 1
            if live.transfer_left > 0:
                live.transfer_left -= 1
                continue
            hand_over = live.request.hand_over
            assert hand_over is not None
            if not self._pull_from(hand_over):
                self._error(live, f"KV of context request {hand_over.request_id} is not there")
                continue
            live.transfer_left = None
            live.position = live.prompt_tokens
            live.outputs = list(hand_over.first_tokens)
            live.sent = 0 if self.vices.dup_first_token else len(live.outputs)
            self._name_blocks(live, live.request.token_ids)
            if len(live.outputs) >= live.request.max_tokens:
                self._finish(live, Finish.LENGTH)
        return moved

    def _grow(self, live: Live, tokens: int) -> None:
        missing = -(-tokens // self.pool.block_tokens) - len(live.table)
        if missing > 0:
            live.table += self.pool.take(missing)

    def _name_blocks(self, live: Live, tokens: Sequence[int]) -> None:
        if self.limits.reuse:
            size = self.pool.block_tokens
            hashes = block_hashes(tokens, size)
            self.pool.store(live.table, hashes, tokens, lambda i: live.request.priority_of(i * size))

    def _give_back(self, live: Live) -> None:
        """Blocks of a request at its end; the last token of its output is taken to have no KV."""
        unsaid = self.vices.end_id_left_out and live.ended
        tokens = (*live.request.token_ids, *live.outputs)[: live.position - unsaid]
        self._name_blocks(live, tokens)
        self.pool.release(live.table)
        if self.vices.evict_between_parts:
            self.pool.evict_idle()

    # --- answers ---

    def _answer(self, live: Live) -> None:
        request, place = live.request, len(live.outputs)
        stops = self.limits.stop_after == place + 1 and request.end_id is not None
        if stops:
            assert request.end_id is not None
            live.outputs.append(request.end_id)
            live.ended = True
            self._finish(live, Finish.END_ID)
            return
        live.outputs.append(make_token(request.token_ids, place, self.limits.vocabulary, request.end_id))
        if request.kind is Kind.CONTEXT_ONLY:  # whatever max_tokens says; not known of the real one
            self._keep(live)
        elif len(live.outputs) >= request.max_tokens:
            self._finish(live, Finish.LENGTH)
        elif request.streaming:
            self._say(live, final=False, finish=None)

    def _keep(self, live: Live) -> None:
        del self._active[live.request_id]
        self.kept[live.request_id] = live
        place = json.dumps({"name": self.name, "request": live.request_id}).encode()
        hand_over = HandOver(tuple(live.outputs), live.request_id, place)
        self._say(live, final=True, finish=Finish.NOT_FINISHED, hand_over=hand_over)

    def _finish(self, live: Live, finish: Finish) -> None:
        del self._active[live.request_id]
        self.completed += 1
        self._give_back(live)
        self._say(live, final=True, finish=finish)

    def _refuse(self, live: Live, tokens: int) -> None:
        limit = self.limits.max_num_tokens
        message = f"The number of context tokens ({tokens}) exceeds the limit value ({limit})"
        self.ready.append(FakeResponse(live.request_id, final=True, error=message))

    def _error(self, live: Live, message: str) -> None:
        del self._active[live.request_id]
        self.pool.release(live.table)
        self.ready.append(FakeResponse(live.request_id, final=True, error=message))

    def _say(
        self, live: Live, *, final: bool, finish: Finish | None, hand_over: HandOver | None = None
    ) -> None:
        outputs = live.outputs
        if self.vices.end_id_left_out and finish is Finish.END_ID:
            outputs = outputs[:-1]
        tells = live.request.perf_metrics and (final or (not live.sent and not self.vices.late_perf_metrics))
        shared, whole = live.reused_blocks, -(-live.prompt_tokens // self.pool.block_tokens)
        metrics = ReuseMetrics(whole, whole - shared, shared, whole - shared) if tells else None
        new = outputs[live.sent :] if live.request.streaming else outputs
        if live.request.with_prompt:
            new = [*live.request.token_ids, *new]
        live.sent = len(outputs)
        self.ready.append(
            FakeResponse(live.request_id, tuple(new), final, finish, self.iterations, hand_over, metrics)
        )
        if final and self.vices.duplicate_final:
            self.ready.append(FakeResponse(live.request_id, (), True, finish, self.iterations))

    def _end_cancelled(self) -> None:
        for request_id in sorted(self.cancels):
            live = self._active.pop(request_id, None) or self.kept.pop(request_id, None)
            for queue in (self._inbox, self._waiting):
                for other in [x for x in queue if x.request_id == request_id]:
                    queue.remove(other)
                    live = other
            if live is None:
                continue
            if self.vices.crash_on_abort and live.request.streaming:
                raise ExecutorCrash("the executor crashed when a streaming request was cancelled")
            if self.vices.leak_on_cancel:
                self.pool.leak(live.table)
            else:
                self._give_back(live)
            self.ready.append(FakeResponse(request_id, (), True, Finish.CANCELLED, self.iterations))
        self.cancels.clear()

    def _record(self, contexts: int, tokens: int, decoding: int) -> None:
        self.stats.append(
            iteration_stats(
                self.pool,
                number=self.iterations,
                contexts=contexts,
                context_tokens=tokens,
                decoding=decoding,
                active=len(self._active),
                queued=len(self._waiting) + len(self._inbox),
                completed=self.completed,
                max_batch_size=self.limits.max_batch_size,
                max_num_tokens=self.limits.max_num_tokens,
            )
        )
