"""The embedded engine on a tiny random model, a driver for it, and the oracle's word on its tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from engines.base import Engine
from engines.openvino_cpu import OpenVinoCpuEngine
from engines.profiles import Profiles
from engines.types import (
    EngineRequest,
    ItemResult,
    Layout,
    Padding,
    Pass,
    PassItem,
    PassKind,
    PassResult,
    Sampling,
)
from tests.engines import oracle

CONFIG = replace(oracle.TINY, eos_id=7)
WEIGHTS = oracle.random_model(CONFIG)
PROFILES = Profiles(Layout.PACKED, Padding.CLASS, (4, 16, 64, 128), (0, 96, 512), block_mask=True)
NEAR_TIE = 1e-3  # logits closer than this may change places
GREEDY = Sampling(ignore_eos=True)

Load = Callable[..., OpenVinoCpuEngine]


@dataclass
class Driver:
    """Runs passes and keeps what came out. Ids are made unique, so that engines can be shared."""

    engine: Engine
    answers: dict[str, list[int]] = field(default_factory=dict)
    results: dict[str, list[ItemResult]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def submit(self, prompt: Sequence[int], count: int, sampling: Sampling = GREEDY) -> str:
        request_id = f"{id(self)}-{next(self._numbers)}"
        self.engine.submit(EngineRequest(request_id, tuple(prompt), count, sampling))
        self.answers[request_id], self.results[request_id] = [], []
        return request_id

    def prefill(self, *items: tuple[str, int]) -> PassResult:
        return self._run(PassKind.PREFILL, [PassItem(i, n, self._position(i)) for i, n in items])

    def decode(self, *request_ids: str) -> PassResult:
        return self._run(PassKind.DECODE, [PassItem(i, 1, self._position(i)) for i in request_ids])

    def finish(self, request_id: str) -> list[int]:
        """Run a request alone to its end."""
        while not self.answers[request_id]:
            self.prefill((request_id, 64))
        while self.results[request_id][-1].finish is None:
            self.decode(request_id)
        return self.answers[request_id]

    def _position(self, request_id: str) -> int:
        results = self.results[request_id]
        return results[-1].position if results else 0

    def _run(self, kind: PassKind, items: list[PassItem]) -> PassResult:
        result = self.engine.execute(Pass(next(self._numbers), kind, tuple(items)))
        for item in result.items:
            self.results[item.request_id].append(item)
            if item.token is not None:
                self.answers[item.request_id].append(item.token)
        return result


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, CONFIG.vocab, length).tolist()


def assert_greedy(tokens: list[int], prompt: Sequence[int]) -> None:
    """`tokens` are what the oracle says, up to the first near tie."""
    for found, (expected, lead) in zip(
        tokens, oracle.greedy(CONFIG, WEIGHTS, prompt, len(tokens)), strict=True
    ):
        if lead < NEAR_TIE:
            return
        assert found == expected
