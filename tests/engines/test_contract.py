"""The contract of `engines.base.Engine`, the same for every adapter (see `factories.FACTORIES`).

Requests ignore end-of-sequence here, so their length is known. What an engine computes is its own affair; the
contract is about positions, budgets, blocks and errors, and that tokens depend on the request alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import pytest
from factories import asked, held_blocks, part_tokens, parts_are_requests

from engines.base import Engine, EngineError
from engines.types import EngineRequest, FinishReason, ItemResult, Pass, PassItem, PassKind, PassResult

_pass_ids = count(1)


@pytest.fixture
def engine(make: Callable[[], Engine]) -> Iterator[Engine]:
    made = make()
    yield made
    made.close()


def prefill(engine: Engine, *items: tuple[str, int, int]) -> PassResult:
    """Execute (request id, new tokens, history) as one pass."""
    made = tuple(PassItem(request_id, new, past) for request_id, new, past in items)
    return engine.execute(Pass(next(_pass_ids), PassKind.PREFILL, made))


def decode(engine: Engine, *items: tuple[str, int]) -> PassResult:
    """Execute (request id, history) as one decode pass."""
    made = tuple(PassItem(request_id, 1, past) for request_id, past in items)
    return engine.execute(Pass(next(_pass_ids), PassKind.DECODE, made))


def generate(engine: Engine, request: EngineRequest, chunk: int = 64) -> tuple[list[int], list[ItemResult]]:
    """Run one request to its end, alone, in chunks: its tokens and the result of every pass."""
    engine.submit(request)
    results: list[ItemResult] = []
    position = 0
    while not results or results[-1].finish is None:
        if results and results[-1].token is not None:
            result = decode(engine, (request.request_id, position))
        else:
            new = part_tokens(engine, chunk, position, len(request.token_ids))
            result = prefill(engine, (request.request_id, new, position))
        results.append(result.items[0])
        position = results[-1].position
    return [r.token for r in results if r.token is not None], results


def fill(engine: Engine, blocks: int) -> list[str]:
    """Hold so many blocks by requests that wait to decode; a few more tokens of each have room in them."""
    limits, fillers = engine.capabilities, []
    while blocks > 0:
        size = min(blocks, limits.context_tokens_max // limits.block_tokens)
        name, tokens = f"filler{len(fillers)}", size * limits.block_tokens - 4
        engine.submit(asked(name, tokens, max_new_tokens=4, family=len(fillers)))
        for start in range(0, tokens, 64):
            prefill(engine, (name, min(64, tokens - start), start))
        fillers.append(name)
        blocks -= size
    return fillers


# --- what it says of itself ---


def test_it_is_an_engine_that_says_what_it_is(engine: Engine) -> None:
    assert isinstance(engine, Engine)
    limits, stats = engine.capabilities, engine.stats()
    assert (limits.layout, limits.padding) == (engine.profiles.layout, engine.profiles.padding)
    assert limits.kv_blocks_total == stats.kv_blocks_total == stats.kv_blocks_free
    assert (stats.kv_blocks_cached, stats.requests_live, stats.passes_done) == (0, 0, 0)


def test_it_takes_as_many_requests_as_it_says(engine: Engine) -> None:
    limit = engine.capabilities.requests_max
    ids = [f"r{index}" for index in range(limit + 1)]
    for family, request_id in enumerate(ids):
        engine.submit(asked(request_id, 2, family=family))
    with pytest.raises(ValueError, match="at most"):
        prefill(engine, *((request_id, 2, 0) for request_id in ids))
    assert all(r.finish for r in prefill(engine, *((request_id, 2, 0) for request_id in ids[:limit])).items)


def test_it_takes_contexts_as_long_as_it_says(engine: Engine) -> None:
    longest = engine.capabilities.context_tokens_max
    with pytest.raises(ValueError, match="need"):
        engine.submit(asked("over", longest - 1, max_new_tokens=2))
    tokens, results = generate(engine, asked("at", longest - 2, max_new_tokens=2))
    assert len(tokens) == 2
    assert results[-1].position == longest - 1


# --- prefill ---


@pytest.mark.parametrize("chunk", [1, 7, 8, 33])
def test_chunks_reach_the_position_and_the_tokens_of_one_pass(engine: Engine, chunk: int) -> None:
    whole, _ = generate(engine, asked("whole", 50, max_new_tokens=4))
    chunked, results = generate(engine, asked("chunked", 50, max_new_tokens=4), chunk)
    assert chunked == whole
    positions = [result.position for result in results]
    assert positions == sorted(set(positions))  # every pass gets on
    assert positions[-4] == 50


def test_tokens_do_not_depend_on_company(engine: Engine) -> None:
    alone = {family: generate(engine, asked(f"a{family}", 9 + family, 3, family))[0] for family in range(3)}
    for family in range(3):
        engine.submit(asked(f"b{family}", 9 + family, 3, family))
    items = prefill(engine, *((f"b{family}", 9 + family, 0) for family in range(3))).items
    tokens = {family: [items[family].token] for family in range(3)}
    for step in range(2):
        items = decode(engine, *((f"b{family}", 9 + family + step) for family in range(3))).items
        for family in range(3):
            tokens[family].append(items[family].token)
    assert tokens == alone


def test_what_was_computed_before_is_reused_and_reported(engine: Engine) -> None:
    block = engine.capabilities.block_tokens
    size = 2 * block
    _, first = generate(engine, asked("first", size))
    assert sum(r.reused for r in first) == 0
    _, second = generate(engine, asked("second", size))
    assert [r.reused for r in second] == [block]  # the last prompt token is always computed
    _, longer = generate(engine, asked("longer", size + 1))
    assert [r.reused for r in longer] == [2 * block]
    _, stranger = generate(engine, asked("stranger", size, family=3))
    assert sum(r.reused for r in stranger) == 0
    for results, tokens in ((second, size), (longer, size + 1)):
        assert sum(r.computed + r.reused for r in results) == tokens


def test_a_block_is_reusable_when_it_is_full_and_not_before(engine: Engine) -> None:
    block = engine.capabilities.block_tokens
    engine.submit(asked("begun", 3 * block))
    prefill(engine, ("begun", block, 0))
    if not parts_are_requests(engine):
        prefill(engine, ("begun", 3, block))
    assert len([value for event in engine.kv_events() for value in event.block_hashes]) == 1
    engine.submit(asked("second", 3 * block))
    assert prefill(engine, ("second", block, block)).items[0].reused == block


def test_the_budget_counts_from_what_is_cached(engine: Engine) -> None:
    block = engine.capabilities.block_tokens
    generate(engine, asked("first", 2 * block + 5))
    engine.submit(asked("second", 3 * block + 5))
    result = prefill(engine, ("second", block, 0)).items[0]
    assert (result.reused, result.computed, result.position) == (2 * block, block, 3 * block)


def test_a_budget_beyond_the_prompt_stops_at_the_prompt(engine: Engine) -> None:
    engine.submit(asked("r", 10))
    result = prefill(engine, ("r", 64, 0)).items[0]
    assert (result.computed, result.position, result.finish) == (10, 10, FinishReason.LENGTH)


# --- decode and the end ---


@pytest.mark.parametrize("max_new_tokens", [1, 2, 5])
def test_it_finishes_once_with_the_last_token(engine: Engine, max_new_tokens: int) -> None:
    tokens, results = generate(engine, asked("r", 12, max_new_tokens))
    assert len(tokens) == max_new_tokens
    assert [r.finish for r in results if r.finish] == [FinishReason.LENGTH]
    assert [r.position for r in results if r.token is not None] == list(range(12, 12 + max_new_tokens))
    assert engine.stats().requests_live == 0
    assert held_blocks(engine) == 0
    with pytest.raises(KeyError):
        decode(engine, ("r", 12 + max_new_tokens - 1))


def test_a_finished_id_may_come_again(engine: Engine) -> None:
    assert generate(engine, asked("r", 12, 3))[0] == generate(engine, asked("r", 12, 3))[0]


# --- cancel ---


@pytest.mark.parametrize("phase", ["unknown", "submitted", "partial", "prefilled", "decoding"])
def test_cancel_frees_everything_in_every_phase(engine: Engine, phase: str) -> None:
    if phase != "unknown":
        engine.submit(asked("r", 30, 8))
    if phase == "partial":
        prefill(engine, ("r", part_tokens(engine, 10, 0, 30), 0))
    if phase in ("prefilled", "decoding"):
        prefill(engine, ("r", 30, 0))
    if phase == "decoding":
        decode(engine, ("r", 30))
    engine.cancel("r")
    engine.cancel("r")
    assert held_blocks(engine) == 0
    assert engine.stats().requests_live == 0
    with pytest.raises(KeyError):
        prefill(engine, ("r", 1, 0))
    assert len(generate(engine, asked("r", 30, 8))[0]) == 8


# --- refusals: a clear error, and nothing changes ---


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (EngineRequest("new", (), 1), "empty"),
        (EngineRequest("new", (1,), 0), "max_new_tokens"),
        (EngineRequest("known", (1,), 1), "known"),
        (EngineRequest("new", (1,) * 10_000, 1), "need"),
    ],
)
def test_a_bad_request_is_refused_by_name(engine: Engine, request_: EngineRequest, named: str) -> None:
    engine.submit(asked("known", 5))
    before = engine.stats()
    with pytest.raises(ValueError, match=named):
        engine.submit(request_)
    assert engine.stats() == before


BAD_PASSES = {
    "empty": (PassKind.PREFILL, ()),
    "twice": (PassKind.PREFILL, (PassItem("new", 1, 0), PassItem("new", 1, 0))),
    "no tokens": (PassKind.PREFILL, (PassItem("new", 0, 0),)),
    "too large": (PassKind.PREFILL, (PassItem("long", 150, 0),)),
    "prompt done": (PassKind.PREFILL, (PassItem("done", 1, 5),)),
    "prompt not done": (PassKind.DECODE, (PassItem("new", 1, 0),)),
    "two tokens": (PassKind.DECODE, (PassItem("done", 2, 5),)),
    "good beside bad": (PassKind.PREFILL, (PassItem("new", 1, 0), PassItem("done", 1, 5))),
}


BAD_LAYER_BLOCKS = {
    "more than it has": lambda most: (0, most + 1),
    "none at all": lambda most: (0, 0),
    "before the first": lambda most: (-1, 1),
    "after the last": lambda most: (1, 1),
}


@pytest.mark.parametrize("case", list(BAD_LAYER_BLOCKS))
def test_a_bad_group_of_layers_is_refused(engine: Engine, case: str) -> None:
    engine.submit(asked("r", 5))
    before = engine.stats()
    block, blocks = BAD_LAYER_BLOCKS[case](engine.capabilities.layer_blocks_max)
    with pytest.raises(ValueError, match="layer_block"):
        engine.execute(Pass(next(_pass_ids), PassKind.PREFILL, (PassItem("r", 5, 0),), block, blocks))
    assert engine.stats() == before


def test_a_part_ends_with_a_block_where_it_is_a_request_of_its_own(engine: Engine) -> None:
    if not parts_are_requests(engine):
        pytest.skip("parts are no requests of their own here")
    block = engine.capabilities.block_tokens
    engine.submit(asked("r", 2 * block + 3))
    for tokens in (1, block - 1, block + 1, 2 * block + 2):
        with pytest.raises(ValueError, match="end it with a block"):
            prefill(engine, ("r", tokens, 0))
    assert prefill(engine, ("r", block, 0)).items[0].position == block
    assert held_blocks(engine) == 0  # what is between two requests is nobody's
    assert prefill(engine, ("r", block + 3, block)).items[0].finish is not None


@pytest.mark.parametrize("case", list(BAD_PASSES))
def test_a_bad_pass_is_refused_whole(engine: Engine, case: str) -> None:
    for request in (asked("new", 5), asked("long", 150), asked("done", 5, 2)):
        engine.submit(request)
    prefill(engine, ("done", 5, 0))
    before = engine.stats()
    with pytest.raises(ValueError, match="pass"):
        engine.execute(Pass(next(_pass_ids), *BAD_PASSES[case]))
    assert engine.stats() == before


def test_an_unknown_request_is_a_key_error(engine: Engine) -> None:
    engine.submit(asked("known", 5))
    with pytest.raises(KeyError):
        prefill(engine, ("known", 5, 0), ("unknown", 1, 0))
    assert held_blocks(engine) == 0


def test_a_request_without_memory_fails_alone(engine: Engine) -> None:
    """One block is left: a request that needs two does not take it, and the next of its pass gets it."""
    block, total = engine.capabilities.block_tokens, engine.capabilities.kv_blocks_total
    fillers = fill(engine, total - 1)
    engine.submit(asked("victim", block + 1, family=91))
    engine.submit(asked("small", 1, 4, family=92))
    failed, served = prefill(engine, ("victim", block + 1, 0), ("small", 1, 0)).items[:2]
    assert failed.error is not None
    assert (failed.token, failed.computed) == (None, 0)
    assert (served.error, served.position) == (None, 1)
    assert held_blocks(engine) == total
    engine.cancel("victim")
    engine.cancel("small")
    for filler in fillers:
        engine.cancel(filler)
    assert len(generate(engine, asked("victim", block + 1, family=91))[0]) == 1


# --- the prefix cache ---


def test_events_tell_what_is_cached(engine: Engine) -> None:
    generate(engine, asked("r", 3 * engine.capabilities.block_tokens))
    stored = [value for event in engine.kv_events() for value in event.block_hashes]
    assert len(stored) == len(set(stored)) == engine.stats().kv_blocks_cached == 3
    assert engine.kv_events() == ()


def test_close_gives_everything_back(engine: Engine) -> None:
    engine.submit(asked("r", 30, 8))
    prefill(engine, ("r", 30, 0))
    engine.close()
    engine.close()
    assert held_blocks(engine) == 0
    with pytest.raises(EngineError):
        engine.submit(asked("s", 30))
    with pytest.raises(EngineError):
        prefill(engine, ("r", 10, 10))
