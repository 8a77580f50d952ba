"""Long tokens: how large a chunk is, and how many of its tokens join a pass.

Long tokens join the items that are in a pass already only where that is predicted to lower the summed
completion time: with n requests in the pass, m waiting behind it, and c the cost of a pass,

    (m + 1) (saved - added) > n added            added = c(mixed) - c(as it is)

`saved` is the time that the tokens would take later: the whole pass for those that finish a prompt, else
their share of the next chunk, since a part taken out of a chunk saves no pass. Padding up to the class edge
is free by the same test. Only padding is filled in a pass that is at the knee already: from there on tokens
cost nearly what they cost alone, and all in the pass would wait for them.

A chunk alone has the size with the best tokens/s within the time that it may block others, and is never below
the knee, where tokens are not yet paid for, except for the tail of a prompt.
"""

from __future__ import annotations

from service.core.policy import Instance
from service.core.pricing import PassRow


class LongFill:
    """Chunks of one plan on one instance. `allowed_s`: how long a pass with long tokens may take."""

    def __init__(self, instance: Instance, allowed_s: float) -> None:
        self._instance = instance
        self._allowed_s = allowed_s

    def end_within(self, seconds: float) -> None:
        """A prompt that ends in the pass must have its first token by then."""
        self._allowed_s = min(self._allowed_s, seconds)

    def alone(self, rest: tuple[int, int]) -> int:
        """Tokens of a chunk of `rest` = (new tokens, history) in a pass of its own; 0: none can run."""
        return self._instance.chunk_tokens(rest, self._bound(rest[1]))

    def beside(
        self, row: PassRow, tokens: int, behind: float, rest: tuple[int, int], only_whole: bool
    ) -> int:
        """The chunk of `rest` with the largest predicted gain in the pass `row` of `tokens` tokens, `behind`
        requests waiting; 0 if none gains. `only_whole`: all of `rest` or nothing."""
        pricer, (new_tokens, history) = self._instance.pricer, rest
        count = len(row)
        front_s = row.cost(0, count)
        allowed_s = front_s if tokens >= pricer.knee_tokens else max(front_s, self._allowed_s)
        later_tokens = min(new_tokens, self._bound(history))
        later_part = later_tokens < new_tokens
        later_s = pricer.pass_s(((later_tokens, history),), parts=int(later_part))
        best_gain, best = 0.0, 0
        for limit in pricer.chunk_sizes(tokens, new_tokens):
            chunk = self._instance.chunk_tokens(rest, limit)
            whole = chunk == new_tokens
            if chunk == 0 or (only_whole and not whole):
                continue
            mixed_s = row.cost_with(chunk, history, part=not whole)
            if mixed_s > allowed_s:
                continue
            added_s = mixed_s - front_s
            saved_s = pricer.pass_s(((chunk, history),)) if whole else later_s * chunk / later_tokens
            gain = (behind + 1.0) * (saved_s - added_s) - count * added_s
            if gain > best_gain:
                best_gain, best = gain, chunk
        return best

    def most(self, row: PassRow, tokens: int, rest: tuple[int, int], allowed_s: float) -> int:
        """The largest chunk of `rest` with which the pass takes no longer than `allowed_s`, and than two
        passes would; 0: none."""
        pricer, (new_tokens, history) = self._instance.pricer, rest
        front_s, best = row.cost(0, len(row)), 0
        for limit in pricer.chunk_sizes(tokens, new_tokens):
            chunk = self._instance.chunk_tokens(rest, limit)
            part = chunk < new_tokens
            if chunk <= best:
                continue
            mixed_s = row.cost_with(chunk, history, part=part)
            if mixed_s > allowed_s:
                continue
            if mixed_s <= front_s + pricer.pass_s(((chunk, history),), parts=int(part)):
                best = chunk
        return best

    def _bound(self, history: int) -> int:
        """The best tokens/s within the allowed time, at least the knee."""
        return self._instance.pricer.best_edge(history, self._allowed_s)
