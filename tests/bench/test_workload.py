"""The load: everything follows from the seed, nothing comes twice, sizes and shares are as promised."""

from __future__ import annotations

import itertools
import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.bench import corpus
from service.bench.workload import (
    SHORT_TARGET_S,
    Label,
    Mix,
    PlannedRequest,
    Workload,
    fit_document,
    target_s,
)


def count_tokens(text: str) -> int:
    """A stand-in for a tokenizer: 31 tokens of template, a token for four characters or a short word."""
    return 31 + sum(-(-len(word) // 4) for word in text.split())


def rounds_of(seed: int, count: int = 3, rate_rps: float = 4.0) -> list[tuple[PlannedRequest, ...]]:
    workload = Workload(Mix(), seed, count_tokens)
    return [workload.round(index, rate_rps, 20.0, lambda p: float(p.tokens)) for index in range(count)]


def test_the_seed_decides_everything() -> None:
    assert rounds_of(5) == rounds_of(5)
    assert rounds_of(5) != rounds_of(6)


def test_no_prompt_comes_twice() -> None:
    texts = [planned.prompt.text for part in rounds_of(1, count=4) for planned in part]
    assert len(set(texts)) == len(texts)


def test_documents_share_only_their_instruction() -> None:
    """A cached prefix of one document is of no use to any other."""
    documents = [
        p.prompt.text for part in rounds_of(2, count=4) for p in part if p.prompt.label is Label.LONG
    ]
    starts = {text[: len(corpus.INSTRUCTION) + 40] for text in documents}
    assert len(starts) == len(documents) > 20


def test_lengths_lie_within_the_bounds_and_spread_over_them() -> None:
    mix = Mix()
    prompts = [planned.prompt for part in rounds_of(3, count=4) for planned in part]
    chats = [p.tokens for p in prompts if p.label is Label.SHORT]
    documents = [p.tokens for p in prompts if p.label is Label.LONG]
    assert all(p.tokens == count_tokens(p.text) for p in prompts)
    assert min(chats) > 31
    assert max(chats) <= mix.chat_tokens_max
    assert max(chats) > 2 * (min(chats) - 31)
    # A document may fall short of what was drawn by the tokens of one word.
    assert min(documents) >= mix.document_tokens_min - 40
    assert max(documents) <= mix.document_tokens_max
    assert max(documents) - min(documents) > 1000


def test_every_round_bears_the_same_share_of_documents() -> None:
    for part in rounds_of(4):
        assert len(part) == 80
        assert sum(p.prompt.label is Label.LONG for p in part) == 8


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.5, 50.0), st.floats(1.0, 60.0))
def test_arrivals_are_a_poisson_process_of_the_given_rate(seed: int, rate_rps: float, seconds: float) -> None:
    """Ascending, inside the round, in the expected number, with unequal gaps."""
    workload = Workload(Mix(document_ratio=0.0), seed, count_tokens)
    part = workload.round(0, rate_rps, seconds, lambda _: 1.0)
    times = [planned.send_s for planned in part]
    assert times == sorted(times)
    assert all(0.0 <= time < seconds for time in times)
    assert len(times) == max(1, round(rate_rps * seconds))
    gaps = [after - before for before, after in itertools.pairwise(times)]
    if len(gaps) >= 50:  # exponential gaps: standard deviation about the mean
        mean = sum(gaps) / len(gaps)
        deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
        assert 0.5 < deviation / mean < 2.0


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(100, 2400))
def test_a_document_comes_as_near_to_its_size_as_whole_words_allow(start: int, wanted: int) -> None:
    text, tokens = fit_document(start, wanted, count_tokens)
    assert tokens == count_tokens(text) <= wanted
    assert wanted - tokens <= 40  # the longest word of the corpus
    assert text.startswith(corpus.INSTRUCTION)


def test_chats_never_repeat_even_when_the_combinations_run_thin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "CHAT_FORMS", ("Is {topic} older than {other}?",))
    chats = corpus.chats(Random(1))
    texts = [next(chats) for _ in range(4000)]  # 46 * 45 combinations
    assert len(set(texts)) == 4000


def test_targets_are_those_of_the_metric() -> None:
    chat, document = rounds_of(7)[0], [p for p in rounds_of(7)[0] if p.prompt.label is Label.LONG]
    short = next(p.prompt for p in chat if p.prompt.label is Label.SHORT)
    assert target_s(short, 100.0) == SHORT_TARGET_S
    assert target_s(document[0].prompt, 1.5) == pytest.approx(4.7)
    assert target_s(document[0].prompt, 0.01) == SHORT_TARGET_S


def test_bad_mixes_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="document_ratio"):
        Mix(document_ratio=1.5)
    with pytest.raises(ValueError, match="document_tokens_min"):
        Mix(document_tokens_min=3000)
    with pytest.raises(ValueError, match="max_tokens"):
        Mix(max_tokens=0)
    with pytest.raises(ValueError, match="chat_tokens_max"):
        Workload(Mix(chat_tokens_max=5), 1, count_tokens).chat()
    few = Workload(Mix(), 1, count_tokens, documents_max=1)
    few.document()
    with pytest.raises(ValueError, match="used up"):
        few.document()
