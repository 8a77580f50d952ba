"""Predicted time of a pass.

For a pass over requests with L new and H history tokens:

    T = sum L        A = sum L (L + 2H)        R = sum H
    compute = alpha A + beta T
    memory  = weights + gamma_w T + gamma_r R
    latency = launch + smooth_max(compute, memory)

`alpha`, `beta`, `gamma_w` and `gamma_r` are those of LAPS (arXiv 2601.11589, section 3). `weights`, reading
the model once a pass, is missing there and dominates small passes; `launch` is host work a pass. The smooth
maximum is the p-norm (compute^p + memory^p)^(1/p), which real kernels follow better than a sharp corner.
Where an engine takes a chunk of a prompt as a request of its own, each item that does not finish its prompt
costs `part` more.

L_m(H), the printed boundary between memory- and compute-bound prefills, is where compute passes memory for
one request. The *knee* is the T from which tokens cost linearly: 90 % of the saturated tokens/s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class PassShape:
    """The three sums that the cost of a pass depends on, and how many requests it holds."""

    tokens: int  # T
    attention: float  # A
    history: int  # R
    requests: int
    captured: bool = False  # replayed from a graph: no launch cost

    @classmethod
    def of(cls, items: Iterable[tuple[int, int]]) -> PassShape:
        """From (new tokens, history tokens) per request."""
        tokens = attention = history = requests = 0
        for new, past in items:
            tokens += new
            history += past
            attention += new * (new + 2 * past)  # whole numbers: sums in any order are the same
            requests += 1
        return cls(tokens, attention, history, requests)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Coefficients in seconds; see the module text. `origin` says where they come from."""

    launch_s: float
    weights_s: float
    alpha: float  # s per token^2
    beta: float  # s per token
    gamma_w: float  # s per token
    gamma_r: float  # s per history token
    smooth_p: float = 4.0
    tokens_max: int = 4096  # the largest T that was measured; beyond it a prediction is extrapolated
    origin: str = ""
    part_s: float = 0.0  # s per item that ends before its prompt does; 0 where chunks are no requests

    def __post_init__(self) -> None:
        for name in ("launch_s", "weights_s", "alpha", "beta", "gamma_w", "gamma_r", "part_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"cost model: {name} must be finite and not negative, got {value}")
        if self.smooth_p < 1.0:
            raise ValueError(f"cost model: smooth_p must be at least 1, got {self.smooth_p}")
        if self.beta + self.gamma_w <= 0.0:
            raise ValueError("cost model: beta and gamma_w are both 0, so tokens would be free")

    def compute_s(self, shape: PassShape) -> float:
        return self.alpha * shape.attention + self.beta * shape.tokens

    def memory_s(self, shape: PassShape) -> float:
        return self.weights_s + self.gamma_w * shape.tokens + self.gamma_r * shape.history

    def pass_s(self, shape: PassShape, parts: int = 0) -> float:
        """Predicted seconds of one pass in which `parts` items end before their prompts do."""
        pass_s = self.sums_s(shape.tokens, shape.attention, shape.history, parts)
        return pass_s - self.launch_s if shape.captured else pass_s

    def sums_s(self, tokens: int, attention: float, history: int, parts: int = 0) -> float:
        """`pass_s` from T, A and R: the scheduler asks for it many times a request."""
        compute = self.alpha * attention + self.beta * tokens
        memory = self.weights_s + self.gamma_w * tokens + self.gamma_r * history
        if self.smooth_p == 2.0:
            busy = math.sqrt(compute * compute + memory * memory)
        else:
            busy = self._smooth_max(compute, memory)
        return self.launch_s + busy + self.part_s * parts

    def sums_pricer(self) -> Callable[[int, float, int, int], float]:
        """`sums_s` with the coefficients at hand: it takes half the time."""
        if self.smooth_p != 2.0:
            return self.sums_s
        alpha, beta, weights_s, gamma_w = self.alpha, self.beta, self.weights_s, self.gamma_w
        gamma_r, launch_s, part_s, sqrt = self.gamma_r, self.launch_s, self.part_s, math.sqrt

        def sums_s(tokens: int, attention: float, history: int, parts: int = 0) -> float:
            compute = alpha * attention + beta * tokens
            memory = weights_s + gamma_w * tokens + gamma_r * history
            return launch_s + sqrt(compute * compute + memory * memory) + part_s * parts

        return sums_s

    def _smooth_max(self, compute: float, memory: float) -> float:
        low, high = (compute, memory) if compute < memory else (memory, compute)
        if high <= 0.0:
            return 0.0
        return high * float((1.0 + (low / high) ** self.smooth_p) ** (1.0 / self.smooth_p))

    def compute_share(self, shape: PassShape, parts: int = 0) -> float:
        """By how many per cent a pass gets longer where its compute side does by 1 %: from 0 to 1."""
        compute, memory = self.compute_s(shape), self.memory_s(shape)
        high = max(compute, memory)
        if high <= 0.0:
            return 0.0
        of_compute, of_memory = float((compute / high) ** self.smooth_p), (memory / high) ** self.smooth_p
        busy_s = self._smooth_max(compute, memory)
        return busy_s * of_compute / (of_compute + float(of_memory)) / self.pass_s(shape, parts)

    def request_s(self, new_tokens: int, history: int = 0) -> float:
        """Predicted seconds of a pass with one request."""
        return self.pass_s(PassShape.of([(new_tokens, history)]))

    def extrapolated(self, shape: PassShape) -> bool:
        return shape.tokens > self.tokens_max

    def boundary_tokens(self, history: int = 0) -> int:
        """L_m(H): smallest L whose compute time is at least its memory time; 0 if always compute-bound.

        Root of alpha L^2 + (2 alpha H + beta - gamma_w) L - (weights + gamma_r H) = 0.
        """
        constant = self.weights_s + self.gamma_r * history
        linear = 2.0 * self.alpha * history + self.beta - self.gamma_w
        if constant <= 0.0 and linear >= 0.0:
            return 0
        if self.alpha == 0.0:
            return math.ceil(constant / linear) if linear > 0.0 else self.tokens_max
        spread = math.sqrt(linear * linear + 4.0 * self.alpha * constant)
        # The form of the root that doesn't cancel: with a small alpha the printed one loses all its digits.
        root = 2.0 * constant / (linear + spread) if linear > 0.0 else (spread - linear) / (2.0 * self.alpha)
        return math.ceil(root - 1e-9)

    def printed_boundary_tokens(self) -> float:
        """The boundary as printed in LAPS, (gamma_w - beta) / alpha, which leaves `weights` out.

        Shown beside ours in reports and used nowhere else: on the H200 table it is negative.
        """
        return (self.gamma_w - self.beta) / self.alpha if self.alpha > 0.0 else math.inf

    def knee_tokens(self, share: float = 0.9) -> int:
        """Smallest T that reaches `share` of the saturated tokens/s, many short requests without history.

        Attention within short requests is left out: it does not saturate, and at the knee it is small.
        """

        def rate(tokens: int) -> float:
            return tokens / self.pass_s(PassShape(tokens, 0.0, 0, 1))

        # The limit of rate(T): both sides grow linearly, so the smooth maximum of their slopes remains.
        steep = max(self.beta, self.gamma_w)
        ratio = min(self.beta, self.gamma_w) / steep
        saturated = 1.0 / (steep * (1.0 + ratio**self.smooth_p) ** (1.0 / self.smooth_p))
        low, high = 1, max(2, self.tokens_max)
        if rate(high) < share * saturated:
            return high
        while low < high:
            middle = (low + high) // 2
            if rate(middle) >= share * saturated:
                high = middle
            else:
                low = middle + 1
        return low

    def scaled(self, factor: float) -> CostModel:
        """The same engine on a clock on which everything takes `factor` times as long."""
        return self.corrected(factor, factor)

    def corrected(self, memory: float, compute: float) -> CostModel:
        """With the compute side `compute` times as long, and all the rest, host work too, `memory` times."""
        sides = dict.fromkeys(("launch_s", "weights_s", "gamma_w", "gamma_r", "part_s"), memory)
        sides |= dict.fromkeys(("alpha", "beta"), compute)
        return replace(self, **{name: getattr(self, name) * factor for name, factor in sides.items()})
