"""What `main` needs of a driver, and what both drivers share: the first request, and what it proved."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from engines.executor.types import Answer, BackendUnavailable, Call, CallKind, Facts
from engines.trtllm_child.config import ChildConfig
from engines.trtllm_child.reports import Hearing
from engines.trtllm_child.wire import Reports

WARM_UP_ID = "warm-up"
WARM_UP_S = 120.0  # the first request may load kernels
_STATS_S = 3.0  # after its answer, for statistics that come late


class ChildDriver(Protocol):
    """One executor. `enqueue` and `cancel` come from one thread, `poll` from another."""

    hearing: Hearing
    version: str

    def enqueue(self, calls: Sequence[Call]) -> Sequence[Answer]:
        """Hand over `calls`; gives answers for those that were refused at once."""

    def cancel(self, call_id: str) -> None:
        """Stop a call; unknown ids are ignored."""

    def poll(self, timeout_s: float) -> Reports:
        """What was heard, waiting at most about `timeout_s`. Statistics are drained: one caller only."""

    def shutdown(self) -> None:
        """End the executor; may block for ever."""


def warm_up(driver: ChildDriver, config: ChildConfig) -> Facts:
    """Run one tiny request and see what the pool really holds. Raises BackendUnavailable, RuntimeError.

    A pool of fewer blocks than asked means that the memory was not there (another executor on this GPU, or
    larger activations): the engine's ledger would admit requests that then wait for ever.
    """
    call = Call(WARM_UP_ID, CallKind.GENERATE, (1, 2, 3, 4), max_tokens=1)
    answers = [*driver.enqueue([call])]
    deadline = time.monotonic() + WARM_UP_S
    while not any(answer.final or answer.error for answer in answers):
        if time.monotonic() > deadline:
            raise RuntimeError(f"the first request was not answered in {WARM_UP_S:g} s")
        answers += [r for r in driver.poll(0.05).reports if isinstance(r, Answer)]
    if failed := [answer.error for answer in answers if answer.error]:
        raise RuntimeError(f"the first request failed: {failed[0]}")
    deadline = time.monotonic() + _STATS_S
    while driver.hearing.blocks is None and time.monotonic() < deadline:
        driver.poll(0.05)
    driver.hearing.take_skipped()
    return _checked(driver, config)


def _checked(driver: ChildDriver, config: ChildConfig) -> Facts:
    blocks, block_tokens = driver.hearing.blocks, driver.hearing.block_tokens
    if blocks is None:
        raise BackendUnavailable(
            "the executor does not say how many KV blocks it has",
            "turn its iteration statistics on (stats_iterations above 0) or its cache events",
        )
    if block_tokens is not None and block_tokens != config.block_tokens:
        raise BackendUnavailable(
            f"the executor's KV blocks hold {block_tokens} tokens, the bundle says {config.block_tokens}",
            "build the bundle again with the same block_tokens",
        )
    if blocks < config.kv_blocks:
        raise BackendUnavailable(
            f"the executor made {blocks} KV blocks of {config.block_tokens} tokens, not {config.kv_blocks}",
            f"set kv_blocks to {blocks} or less, or free memory of this GPU",
        )
    return Facts(
        version=driver.version,
        kv_blocks_total=blocks,
        block_tokens=config.block_tokens,
        cache_events=config.event_buffer > 0,
        reports_reuse=True,
        iteration_stats=config.stats_iterations > 0,
    )
