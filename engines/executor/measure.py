"""One prefill pass of a given size, timed: what the cost model of an engine is fitted to.

A prompt of random tokens is computed up to its history in parts, which leaves that in the cache, and then to
its end, which is timed. Its tokens are new each time, also in another run against an executor that lives on,
so nothing else can be found in the cache. Whether the pass was what it was meant to be is checked by what it
computed: an executor without prefix reuse would give times of another size.
"""

from __future__ import annotations

from itertools import count
from random import Random

from engines.base import Engine, EngineError
from engines.types import EngineRequest, ItemResult, Pass, PassItem, PassKind, PassResult, Sampling

_TOKENS = range(256, 32_000)  # ordinary tokens in every vocabulary of the models served here
_numbers = count(1)


def measure(engine: Engine, tokens: int, history: int, random: Random) -> float:
    """Seconds of a pass of `tokens` new tokens over `history`, which is rounded down to whole blocks.

    Raises ValueError for sizes that the engine can't run or when it holds requests, EngineError where the
    executor computed something else than it was asked to.
    """
    limits = engine.capabilities
    if tokens < 1 or history < 0:
        raise ValueError(f"tokens must be at least 1 and history 0, got {tokens} and {history}")
    if engine.stats().requests_live:
        raise ValueError("requests_live: the engine must be idle to be measured")
    history = history // limits.block_tokens * limits.block_tokens
    prompt = tuple(random.choice(_TOKENS) for _ in range(history + tokens))
    request = EngineRequest(f"measure{next(_numbers)}", prompt, 1, Sampling(ignore_eos=True))
    engine.submit(request)
    try:
        step = max(1, engine.profiles.tokens_max // limits.block_tokens) * limits.block_tokens
        for start in range(0, history, step):
            end = min(start + step, history)
            _check(_run(engine, request, end - start, start).items[0], end - start, end)
        result = _run(engine, request, tokens, history)
        _check(result.items[0], tokens, len(prompt))
        return result.elapsed_s
    finally:
        engine.cancel(request.request_id)


def _run(engine: Engine, request: EngineRequest, tokens: int, history: int) -> PassResult:
    item = PassItem(request.request_id, tokens, history)
    return engine.execute(Pass(next(_numbers), PassKind.PREFILL, (item,)))


def _check(item: ItemResult, computed: int, position: int) -> None:
    if item.error is not None:
        raise EngineError(f"measuring failed: {item.error}")
    if (item.computed, item.position) != (computed, position):
        raise EngineError(
            f"measuring: the executor computed {item.computed} tokens up to {item.position} instead of "
            f"{computed} up to {position}; is block reuse on, and has the pool room for the history?"
        )
