"""The answer of one request: what its executor says, made into the tokens that an engine reports.

The rules of the end. A token that is the end token, or the last that was asked for, ends the answer by
itself. The executor may end it before: by the end token, or at the limit of the context. The end token is in
the output of the PyTorch backend and not in that of the C++ executor (read in sources near 1.x, the sampler
and the sampling kernels); where it is missing it is added. The finish is always reported with a token; an end
that leaves none to report it with is an error.

The decode side of a hand-over may answer with the tokens that the prefill side gave already. Builds differ in
that, but one build always does the same, so a link has one `Habit`. What begins with other tokens repeats
nothing, and shows that this build does not. What begins with the same tokens is a repetition, or an answer
whose second token equals its first. Before the habit is known it is taken as a repetition, which is far more
likely. The length then tells, if the answer runs to its limit: with a repetition an executor gives as many
tokens as were asked for, without it fewer by those of the prefill side [not verified]. An answer that turns
out to have lost a token that way fails, and the habit is known from then on.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from engines.executor.types import Answer, Ending
from engines.types import FinishReason


@dataclass(frozen=True, slots=True)
class Output:
    """One thing to report of a request: a token, the last one with its finish; or that it failed."""

    token: int | None = None
    finish: FinishReason | None = None
    error: str | None = None


@dataclass(slots=True)
class Habit:
    """Whether the decode side repeats the tokens of the prefill side; None: not known yet."""

    repeats: bool | None = None


@dataclass(slots=True)
class AnswerStream:
    """The answer of a request that may have `max_new_tokens`, `given` of which came from a prefill side.

    end_id: None where the end token is to be ignored. habit: of the link, for a generation-only call.
    """

    max_new_tokens: int
    end_id: int | None = None
    given: tuple[int, ...] = ()
    habit: Habit | None = None
    outputs: deque[Output] = field(default_factory=deque)  # made, not reported yet
    tokens: list[int] = field(default_factory=list)  # all of the answer, with `given`
    ended: bool = False
    failed: bool = False
    received: int = 0  # tokens from the executor, repetitions among them
    repeated: int = 0  # tokens dropped as repetitions
    added_end: bool = False  # the end token is in `tokens`, but was not in the output
    _head: list[int] | None = None  # received, while they may be a repetition

    def __post_init__(self) -> None:
        self.tokens += self.given
        self._head = [] if self.given else None

    def take(self, answer: Answer) -> None:
        """Something new from the executor. After the end it is left out."""
        self.received += len(answer.tokens)
        for token in answer.tokens:
            if self._head is None:
                self._push(token)
            else:
                self._at_the_head(token)
        if answer.error is not None:
            self.fail(answer.error)
        elif answer.final:
            self._end(answer.ending)

    def fail(self, error: str) -> None:
        if not self.ended:
            self.ended = self.failed = True
            self.outputs.append(Output(error=error))

    def _at_the_head(self, token: int) -> None:
        assert self._head is not None
        self._head.append(token)
        if tuple(self._head) != self.given[: len(self._head)]:
            self._learn(repeats=False)
            self._take_head()
        elif len(self._head) == len(self.given):
            if self.habit is not None and self.habit.repeats is False:
                self._take_head()
            else:
                self.repeated, self._head = len(self._head), None

    def _take_head(self) -> None:
        head, self._head = self._head or [], None
        for token in head:
            self._push(token)

    def _push(self, token: int) -> None:
        if self.ended:
            return
        self.tokens.append(token)
        finish = None
        if token == self.end_id:
            finish = FinishReason.STOP
        elif len(self.tokens) >= self.max_new_tokens:
            finish = FinishReason.LENGTH
        self.ended = finish is not None
        self.outputs.append(Output(token, finish))

    def _end(self, ending: Ending | None) -> None:
        if self.ended:
            if self.repeated and len(self.tokens) == self.max_new_tokens and self.tokens[-1] != self.end_id:
                self._learn(repeats=True)  # all that was asked for, and the repetition on top
            return
        if self._head:
            if ending in (Ending.LENGTH, Ending.END_ID, Ending.STOP_WORDS):
                self._learn(repeats=False)  # whole, and shorter than a repetition
            self._take_head()
        if ending is Ending.LENGTH:
            self._end_at_length()
        elif ending is Ending.END_ID and self.end_id is not None:
            self.added_end = True
            self._push(self.end_id)
        elif ending in (Ending.END_ID, Ending.STOP_WORDS):
            self._finish_last(FinishReason.STOP, ending)
        else:
            self.fail(f"the executor ended it: {ending or 'it does not say why'}")

    def _end_at_length(self) -> None:
        unsure = self.habit is None or self.habit.repeats is None
        if unsure and self.repeated and self.received == self.max_new_tokens - len(self.given):
            self._learn(repeats=False)
            self.fail("transfer: a token was taken as a repetition of the prefill side's, and was none")
            return
        self._finish_last(FinishReason.LENGTH, Ending.LENGTH)

    def _finish_last(self, finish: FinishReason, ending: Ending) -> None:
        if self.outputs and self.outputs[-1].token is not None:
            self.outputs[-1] = Output(self.outputs[-1].token, finish)
            self.ended = True
        else:
            self.fail(f"the executor ended it with no token to go with that: {ending}")

    def _learn(self, *, repeats: bool) -> None:
        if self.habit is not None:
            self.habit.repeats = repeats
