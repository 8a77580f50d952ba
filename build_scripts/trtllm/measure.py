"""What a built engine is asked before it is published: does it run as planned, which one is faster, what does
a pass cost. Everything goes through the adapter that the service will use.

*Choosing.* The GEMM plugin's tactics follow T in powers of two, TensorRT's the profile, and neither wins
everywhere. Both engines are timed at the upper edge of every T-class, where a profile is tuned, and compared
by the geometric mean of the ratios, so that a class of 2 ms counts as much as one of 200 ms. Weights are
equal unless given; on a tie the smaller plan wins, since it leaves more KV.

*Verifying.* One pass of one request a class, and one of several requests, must give each its token, run as
one iteration by the executor's own statistics, and leave nothing in the KV pool. A prompt sent again must
find its full blocks: reuse is off, silently, where an engine lacks paged context attention. One iteration for
one call is not promised in any document, so a pass that was split is tried again before it counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from build_scripts.calibrate import Calibration, Shape, measure_shapes
from build_scripts.spec import BuildError
from engines.base import Engine
from engines.cost_fit import SAMPLES_MIN
from engines.types import EngineRequest, ItemResult, Pass, PassItem, PassKind, Ran

ATTEMPTS = 3  # for a pass that the executor split
_FIRST_TOKEN_ID = 10  # below are often special ones
_HISTORIES = (1_024, 4_096, 16_384)
_SHORT_HISTORIES = (64, 128, 256, 512)  # for so small an engine that there are too few samples

Update = Callable[[float], None]


class MeasurableEngine(Engine, Protocol):
    def measure(self, new_tokens: int, history: int) -> float:
        """Seconds of one pass of `new_tokens` new tokens over `history` cached ones."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One engine that was built. pass_s: seconds of a pass, by its tokens."""

    name: str
    gemm_plugin: bool
    plan_bytes: int
    pass_s: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Choice:
    """kept: name of the engine. ratio: how much longer a pass of the next best takes on average; None: alone.

    weights: of each class, by its tokens.
    """

    kept: str
    ratio: float | None
    weights: Mapping[int, float]


def choose(timed: Sequence[Timed], weights: Mapping[int, float] | None = None) -> Choice:
    """The faster of `timed` by the geometric mean over the classes. Raises ValueError for unequal classes."""
    classes = sorted(timed[0].pass_s)
    if any(sorted(other.pass_s) != classes for other in timed) or not classes:
        raise ValueError("every engine must be timed at the same classes, at least one")
    given = dict.fromkeys(classes, 1.0) if weights is None else {c: weights.get(c, 0.0) for c in classes}
    total = sum(given.values())
    if total <= 0.0:
        raise ValueError(f"weights of the classes {classes} must be above 0 in all, got {given}")

    def mean_log_s(engine: Timed) -> float:
        return sum(weight * math.log(engine.pass_s[c]) for c, weight in given.items()) / total

    ranked = sorted(timed, key=lambda engine: (mean_log_s(engine), engine.plan_bytes, engine.name))
    ratio = math.exp(mean_log_s(ranked[1]) - mean_log_s(ranked[0])) if len(ranked) > 1 else None
    return Choice(ranked[0].name, ratio, given)


def time_classes(
    engine: MeasurableEngine, edges: Sequence[int], budget_s: float, update: Update = lambda share: None
) -> dict[int, float]:
    """Seconds of a pass at each of `edges`, which are tokens."""
    samples = measure_shapes(engine.measure, [(tokens, 0) for tokens in edges], budget_s, update=update)
    return {sample.new_tokens: sample.time_s for sample in samples.samples}


def edges_within(edges: Sequence[int], context_tokens_max: int) -> tuple[int, ...]:
    """The edges, the last one cut to what one request can hold: it is timed as one request."""
    return tuple(sorted({min(edge, context_tokens_max - 1) for edge in edges}))


def padded_shapes(edges: Sequence[int], context_tokens_max: int) -> tuple[Shape, ...]:
    """(new tokens, history) to measure where passes are padded: any size costs as the edge above it, and only
    at the edges is that size what the cost model counts."""
    sizes = edges_within(edges, context_tokens_max)

    def over(histories: Sequence[int]) -> set[Shape]:
        pairs = ((size, past) for size in sizes for past in (0, *histories))
        return {(size, past) for size, past in pairs if size + past < context_tokens_max}

    found = over(_HISTORIES)
    return tuple(sorted(found if len(found) >= SAMPLES_MIN else over((*_SHORT_HISTORIES, *_HISTORIES))))


def calibration_shapes(edges: Sequence[int], context_tokens_max: int) -> tuple[Shape, ...]:
    """(new tokens, history) to measure: powers of two, the class edges, one past each edge; over histories.

    One past an edge is where another profile begins: a step of cost there would show in the residuals. The
    smallest sizes are those of decode steps.
    """
    largest = min(edges[-1], context_tokens_max - 1)
    powers = {1 << n for n in range(largest.bit_length())} | {largest}
    at_edges = {size for edge in edges for size in (edge, edge + 1) if size <= largest}
    between = {3 << n for n in range(largest.bit_length()) if 3 << n < largest}
    alone = powers | at_edges if len(powers | at_edges) >= SAMPLES_MIN else powers | at_edges | between
    over = {(size, past) for size in powers for past in _HISTORIES if size + past < context_tokens_max}
    return tuple(sorted({(size, 0) for size in alone} | over))


def calibrate(
    engine: MeasurableEngine, shapes: Sequence[Shape], budget_s: float, update: Update
) -> Calibration:
    return measure_shapes(engine.measure, shapes, budget_s, update=update)


def verify(engine: Engine, edges: Sequence[int], requests: int, vocab: int) -> dict[str, Any]:
    """Checks of the module text, for the record. Raises BuildError saying which failed.

    edges: upper edges of the T-classes, tokens. requests: how many the pass of several has.
    """
    limits = engine.capabilities
    probe = _Probe(engine, vocab)
    within = edges_within(edges, limits.context_tokens_max)
    passes = [probe.run_whole(f"class to {edge}", [edge]) for edge in within]
    count = min(requests, limits.requests_max)
    each = max(1, min(edges[0], limits.context_tokens_max - 1) // 2)
    if count > 1 and each * count <= edges[-1]:
        passes.append(probe.run_whole(f"{count} requests", [each] * count))
    record = {"passes": passes, "reused_tokens": probe.check_reuse(edges)}
    stats = engine.stats()
    if stats.requests_live or stats.kv_blocks_free + stats.kv_blocks_cached != stats.kv_blocks_total:
        raise BuildError(f"verify: the engine still holds KV after its requests ended: {stats}")
    return record


class _Probe:
    """Runs passes whose prompts share nothing, so that none finds another's blocks."""

    def __init__(self, engine: Engine, vocab: int) -> None:
        self._engine, self._vocab = engine, vocab
        self._passes = self._requests = 0

    def prompt(self, tokens: int) -> tuple[int, ...]:
        """Begins with a token that no other prompt begins with."""
        self._requests += 1
        span = self._vocab - _FIRST_TOKEN_ID
        return tuple(_FIRST_TOKEN_ID + (self._requests + index) % span for index in range(tokens))

    def run(self, prompts: Sequence[tuple[int, ...]]) -> tuple[tuple[ItemResult, ...], Ran | None]:
        """One prefill pass of whole prompts, each a request with one answer token."""
        self._passes += 1
        names = [f"probe-{self._passes}-{index}" for index in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            self._engine.submit(EngineRequest(name, prompt, 1))
        items = tuple(PassItem(name, len(prompt), 0) for name, prompt in zip(names, prompts, strict=True))
        try:
            result = self._engine.execute(Pass(self._passes, PassKind.PREFILL, items))
        finally:
            for name in names:
                self._engine.cancel(name)
        for item, prompt in zip(result.items, prompts, strict=True):
            if item.error or item.token is None or item.position < len(prompt):
                raise BuildError(
                    f"verify: a prompt of {len(prompt)} tokens got to token {item.position} with token "
                    f"{item.token}: {item.error or 'no error was given'}"
                )
        return result.items, result.ran

    def run_whole(self, what: str, sizes: Sequence[int]) -> dict[str, Any]:
        """A pass that must run in one iteration; tried again when it was split."""
        ran: Ran | None = None
        for attempt in range(1, ATTEMPTS + 1):
            _, ran = self.run([self.prompt(size) for size in sizes])
            if ran is None or (ran.iterations == 1 and ran.tokens >= sum(sizes)):
                told = None if ran is None else {"tokens": ran.tokens, "requests": ran.requests}
                return {"pass": what, "tokens": sum(sizes), "attempts": attempt, "ran": told}
        assert ran is not None
        raise BuildError(
            f"verify: {what}: a pass of {sum(sizes)} tokens ran in {ran.iterations} iterations with "
            f"{ran.tokens} tokens, {ATTEMPTS} times; the scheduler counts on one. Look at max_num_tokens and "
            "chunking in the engine's config.json"
        )

    def check_reuse(self, edges: Sequence[int]) -> int:
        """Tokens of a prompt that were found cached when it came again: all its full blocks at least."""
        block = self._engine.capabilities.block_tokens
        size = min(max(edges[0], 2 * block + 1), edges[-1], self._engine.capabilities.context_tokens_max - 1)
        prompt = self.prompt(size)
        self.run([prompt])
        items, _ = self.run([prompt])
        expected, reused = (size - 1) // block * block, items[0].reused
        if reused < expected:
            raise BuildError(
                f"verify: a prompt of {size} tokens that came again reused {reused} tokens, expected at "
                f"least {expected}: block reuse is off or broken; the engine needs use_paged_context_fmha on "
                "and gather_context_logits off"
            )
        return reused
