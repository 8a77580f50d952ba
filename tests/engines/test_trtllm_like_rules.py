"""One rule book: the simulator's `trtllm_like` and the engine over a fake executor do the same, step by step.

The two share no code for blocks, parts or positions: the simulated engine accounts by itself, the other one
is told by an executor that forms its own batches. What they say of every pass is compared: positions,
computed and reused tokens, who gets a token, who ends, who fails, what is held; and the errors they raise.

Tokens differ in value. Decode passes take everything that decodes, as the scheduler's do. Prompts of one
family share a prefix; those of one pass are of different families, since two requests that would compute the
same blocks at once find them or not by the executor's batching, which nobody promises. Requests get no more
KV together than there is, as under the scheduler: without room the two fail differently, which
docs/engines.md says. A request whose last prompt block gets its name only when it ends is not cancelled:
whether the next pass finds that block hangs on when the executor comes to the cancel.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from factories import asked, held_blocks, parts_are_requests, simulated
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.base import Engine
from engines.executor.engine import ExecutorEngine
from engines.profiles import Profiles
from engines.types import (
    Capabilities,
    Chunking,
    DecodeMode,
    ItemResult,
    Layout,
    Padding,
    Pass,
    PassItem,
    PassKind,
    PassResult,
)
from tests.executor_fakes.link import InProcessLink

_PROFILES = Profiles(Layout.PACKED, Padding.NOTHING, (8, 16, 32, 64))
_FAMILIES = 4


def over_executor(capabilities: Capabilities) -> ExecutorEngine:
    link = InProcessLink()
    engine = ExecutorEngine(link, capabilities, _PROFILES, clock=link.clock)
    engine.start()
    return engine


@dataclass
class Known:
    """A request as both engines should see it."""

    family: int
    tokens: int
    max_new_tokens: int
    position: int = 0
    given: int = 0


@dataclass
class Twins:
    """Both engines, told the same. Every answer is compared."""

    model: Engine = field(
        default_factory=lambda: simulated(_PROFILES, chunking=Chunking.PREFIX_REUSE, decode=DecodeMode.BESIDE)
    )
    known: dict[str, Known] = field(default_factory=dict)
    passes: int = 0
    submitted: int = 0

    def __post_init__(self) -> None:
        self.executor: Engine = over_executor(self.model.capabilities)

    @property
    def waiting(self) -> list[str]:
        return [name for name, known in self.known.items() if not known.given]

    @property
    def cancellable(self) -> list[str]:
        size = self.model.capabilities.block_tokens
        late = [name for name, known in self.known.items() if known.given == 1 and known.tokens % size == 0]
        return sorted(self.known.keys() - set(late))

    @property
    def decoding(self) -> list[str]:
        return [name for name, known in self.known.items() if known.given]

    def submit(self, family: int, tokens: int, max_new_tokens: int) -> None:
        name = f"r{self.submitted}"
        self.submitted += 1
        for engine in (self.model, self.executor):
            engine.submit(asked(name, tokens, max_new_tokens, family))
        self.known[name] = Known(family, tokens, max_new_tokens)

    def has_room(self, tokens: int) -> bool:
        """The scheduler promises KV for the whole of a request, so that none fails for want of a block."""
        limits = self.model.capabilities
        sizes = [tokens, *(known.tokens + known.max_new_tokens for known in self.known.values())]
        return sum(-(-size // limits.block_tokens) for size in sizes) <= limits.kv_blocks_total

    def cancel(self, name: str) -> None:
        del self.known[name]
        for engine in (self.model, self.executor):
            engine.cancel(name)
        self.compare_blocks()

    def run(self, kind: PassKind, items: list[tuple[str, int]]) -> str | None:
        """Run one pass on both; the error that both raised."""
        self.passes += 1
        made = tuple(PassItem(name, new, self.known[name].position) for name, new in items)
        pass_ = Pass(self.passes, kind, made)
        results: list[PassResult] = []
        errors: list[str] = []
        for engine in (self.model, self.executor):
            try:
                results.append(engine.execute(pass_))
            except (ValueError, KeyError) as error:
                errors.append(f"{type(error).__name__}: {error}")
        assert len(errors) in (0, 2), (errors, results)
        if errors:
            ours, theirs = (error.partition("no profile takes")[0] for error in errors)
            assert ours == theirs
            return errors[0]
        modelled, real = results
        assert _said(modelled) == _said(real)
        assert modelled.executed_tokens == real.executed_tokens
        for item in modelled.items:
            self._note(item)
        self.compare_blocks()
        return None

    def compare_blocks(self) -> None:
        assert held_blocks(self.model) == held_blocks(self.executor)
        assert self.model.stats().requests_live == self.executor.stats().requests_live == len(self.known)

    def _note(self, item: ItemResult) -> None:
        known = self.known[item.request_id]
        known.position = item.position
        known.given += item.token is not None
        if item.finish is not None or item.error is not None:
            del self.known[item.request_id]


def _said(result: PassResult) -> list[tuple[object, ...]]:
    """What a pass said, without the values of tokens and the words of errors. Riders are in no set order."""
    said = [
        (i.request_id, i.position, i.computed, i.reused, i.token is None, i.finish, i.error is None)
        for i in result.items
    ]
    return sorted(said, key=str)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_step_has_the_same_outcome(data: st.DataObject) -> None:
    twins = Twins()
    for _ in range(data.draw(st.integers(5, 30))):
        step = data.draw(st.sampled_from(["submit", "prefill", "prefill", "decode", "cancel"]))
        if step == "submit" and len(twins.known) < 8:
            family = data.draw(st.integers(0, _FAMILIES - 1))
            tokens, max_new_tokens = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 5))
            if twins.has_room(tokens + max_new_tokens):
                twins.submit(family, tokens, max_new_tokens)
        elif step == "prefill" and twins.waiting:
            chosen = data.draw(st.lists(st.sampled_from(twins.waiting), min_size=1, max_size=4, unique=True))
            chosen = list({twins.known[name].family: name for name in chosen}.values())
            sizes = [data.draw(st.sampled_from([8, 16, 64, 3])) for _ in chosen]
            twins.run(PassKind.PREFILL, list(zip(chosen, sizes, strict=True)))
        elif step == "decode" and 0 < len(twins.decoding) <= 4:
            twins.run(PassKind.DECODE, [(name, 1) for name in twins.decoding])
        elif step == "cancel" and twins.cancellable:
            twins.cancel(data.draw(st.sampled_from(twins.cancellable)))


def test_both_say_the_same_of_themselves() -> None:
    twins = Twins()
    assert twins.model.capabilities == twins.executor.capabilities
    assert parts_are_requests(twins.model)
    assert parts_are_requests(twins.executor)


@pytest.mark.parametrize("tokens", [7, 8, 9, 31, 32, 33])
def test_a_long_prompt_in_parts(tokens: int) -> None:
    twins = Twins()
    twins.submit(0, tokens, 2)
    passes = 0
    while "r0" in twins.known:
        decode = bool(twins.known["r0"].given)
        twins.run(PassKind.DECODE if decode else PassKind.PREFILL, [("r0", 1 if decode else 8)])
        passes += 1
    assert passes == -(-tokens // 8) + 1
    twins.submit(0, tokens, 1)  # all of it but the last block, or the last token's, is found again
    twins.run(PassKind.PREFILL, [("r1", 8)])
    assert "r1" not in twins.known


def test_the_block_of_the_last_prompt_token_is_found_one_token_later() -> None:
    twins = Twins()
    twins.submit(0, 8, 3)
    twins.run(PassKind.PREFILL, [("r0", 8)])
    for name, passes in (("r1", 2), ("r2", 1)):  # the token after it rides in the first pass of r1
        twins.submit(0, 9, 1)
        for _ in range(passes):
            assert name in twins.known
            twins.run(PassKind.PREFILL, [(name, 8)])
        assert name not in twins.known


def test_tokens_ride_beside_the_prompts_of_others() -> None:
    twins = Twins()
    twins.submit(0, 9, 4)
    twins.run(PassKind.PREFILL, [("r0", 9)])
    for family in (1, 2):
        twins.submit(family, 9, 1)
        twins.run(PassKind.PREFILL, [(f"r{family}", 9)])
    assert twins.known["r0"].given == 3


def test_a_bad_part_is_refused_alike() -> None:
    twins = Twins()
    twins.submit(0, 40, 1)
    error = twins.run(PassKind.PREFILL, [("r0", 3)])
    assert error is not None
    assert "end it with a block" in error
