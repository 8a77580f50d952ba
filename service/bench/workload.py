"""A seeded workload: what is sent when, with which target.

Two kinds of request, the labels of the load generator: a *chat* is a short question and counts as the short
lane, a *document* is a long text to summarise and counts as the long lane, whatever a service makes of them.
The kinds are shuffled over Poisson arrivals with their shares exact per round, so that a round is not
light or heavy by chance. Everything follows from (seed, round): two arms of a comparison get the same
prompts at the same offsets, and no prompt comes twice in a run, so a prefix cache can hold nothing from an
earlier round but the chat template.

Targets are those of the metric: 0.4 s for the short lane, max(0.4 s, 3 x isolated + 0.2 s) for the long one,
where isolated is the prompt alone on an idle instance by the fitted cost model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import count, islice
from random import Random

from service.bench import corpus

CountTokens = Callable[[str], int]  # tokens of a user message with the chat template around it

SHORT_TARGET_S = 0.4


class Label(StrEnum):
    """The lane of a request as the load generator names it."""

    SHORT = "short"
    LONG = "long"


@dataclass(frozen=True, slots=True)
class Mix:
    """Shape of the load. Token bounds include the chat template; documents are uniform between theirs."""

    document_ratio: float = 0.1  # share of documents among requests
    document_tokens_min: int = 900
    document_tokens_max: int = 2400
    chat_tokens_max: int = 120
    max_tokens: int = 8

    def __post_init__(self) -> None:
        if not 0.0 <= self.document_ratio <= 1.0:
            raise ValueError(f"document_ratio must lie in [0, 1], got {self.document_ratio}")
        if not 64 <= self.document_tokens_min <= self.document_tokens_max:
            raise ValueError(
                f"document_tokens_min must be at least 64 and at most document_tokens_max, "
                f"got {self.document_tokens_min} and {self.document_tokens_max}"
            )
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One user message. `tokens` counts the whole prompt, template included."""

    label: Label
    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A prompt with its place in a round: `send_s` after the start, `target_s` for the first token."""

    request_id: str
    prompt: Prompt
    send_s: float
    target_s: float
    max_tokens: int


class Workload:
    """Draws distinct prompts, in the order of one seeded stream."""

    def __init__(self, mix: Mix, seed: int, count_tokens: CountTokens, documents_max: int = 2000) -> None:
        self.mix = mix
        self._count = count_tokens
        self._seed = seed
        self._chats = corpus.chats(Random(f"{seed}/chats"))
        documents_max = min(documents_max, len(corpus.paragraphs()))
        self._starts = iter(corpus.document_starts(Random(f"{seed}/documents"), documents_max))
        self._sizes = Random(f"{seed}/sizes")

    def chat(self) -> Prompt:
        """The next chat; those over the bound are passed over."""
        for text in islice(self._chats, 1000):
            tokens = self._count(text)
            if tokens <= self.mix.chat_tokens_max:
                return Prompt(Label.SHORT, text, tokens)
        raise ValueError(f"chat_tokens_max: no chat fits {self.mix.chat_tokens_max} tokens; raise it")

    def document(self) -> Prompt:
        """The next document, within the token bounds of the mix. Raises ValueError when the text runs out."""
        low, high = self.mix.document_tokens_min, self.mix.document_tokens_max
        wanted = self._sizes.randint(low, high)
        start = next(self._starts, None)
        if start is None:
            raise ValueError(
                "documents: the text at hand is used up; lower document_ratio or the run's length"
            )
        text, tokens = fit_document(start, wanted, self._count)
        return Prompt(Label.LONG, text, tokens)

    def sample(self, size: int) -> list[Prompt]:
        """A shuffled set of prompts, the share of documents as near to the mix as whole requests allow."""
        documents = round(size * self.mix.document_ratio)
        prompts = [self.document() for _ in range(documents)] + [self.chat() for _ in range(size - documents)]
        self._sizes.shuffle(prompts)
        return prompts

    def round(
        self, index: int, rate_rps: float, seconds: float, target_s: Callable[[Prompt], float]
    ) -> tuple[PlannedRequest, ...]:
        """Open-loop arrivals of one round: a Poisson process of `rate_rps` over `seconds`."""
        times = list(_poisson(Random(f"{self._seed}/arrivals/{index}"), rate_rps, seconds))
        prompts = self.sample(len(times))
        return tuple(
            PlannedRequest(f"r{index}-{n}", prompt, send_s, target_s(prompt), self.mix.max_tokens)
            for n, (send_s, prompt) in enumerate(zip(times, prompts, strict=True))
        )

    def endless(self, target_s: Callable[[Prompt], float], documents: int = 100) -> Iterator[PlannedRequest]:
        """Requests without a plan, for closed loops: chats always new, documents in turn."""
        pool = [self.document() for _ in range(documents)] if self.mix.document_ratio > 0.0 else []
        for n in count():
            is_document = self._sizes.random() < self.mix.document_ratio
            prompt = self._sizes.choice(pool) if is_document else self.chat()
            yield PlannedRequest(f"c{n}", prompt, 0.0, target_s(prompt), self.mix.max_tokens)


def target_s(prompt: Prompt, isolated_s: float) -> float:
    """The TTFT target of the metric, seconds."""
    if prompt.label is Label.SHORT:
        return SHORT_TARGET_S
    return max(SHORT_TARGET_S, 3.0 * isolated_s + 0.2)


def _poisson(rng: Random, rate_rps: float, seconds: float) -> Iterator[float]:
    """Arrival times in [0, seconds), conditioned on the expected count so that rounds bear equal load.

    Given their number, the arrivals of a Poisson process are independent and uniform.
    """
    arrivals = max(1, round(rate_rps * seconds))
    yield from sorted(rng.uniform(0.0, seconds) for _ in range(arrivals))


def fit_document(start: int, wanted_tokens: int, count_tokens: CountTokens) -> tuple[str, int]:
    """A document from paragraph `start` on, as near below `wanted_tokens` as whole words allow.

    The number of words is found by bisection: the token count of a text grows with its words.
    """
    every = corpus.paragraphs()
    words: list[str] = []
    breaks: set[int] = set()
    offset = 0
    while len(words) < wanted_tokens and offset < len(every):  # a word is a token or more
        words += every[(start + offset) % len(every)].split(" ")
        breaks.add(len(words))
        offset += 1

    def text_of(length: int) -> str:
        parts = (word + ("\n\n" if n in breaks else " ") for n, word in enumerate(words[:length], 1))
        return corpus.INSTRUCTION + "".join(parts).strip()

    low, high = 1, len(words)
    while low < high:
        middle = (low + high + 1) // 2
        if count_tokens(text_of(middle)) <= wanted_tokens:
            low = middle
        else:
            high = middle - 1
    text = text_of(low)
    return text, count_tokens(text)
