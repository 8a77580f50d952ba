"""What every part measures with: one model with random weights on the device, the sizes it may use, tables.

Sizes come in two scales: `full`, of the real shapes on a large GPU, and `tiny`, which runs the same code on a
CPU in seconds and whose figures mean nothing.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from engines.models import ModelShape, known_models
from engines.torch_cuda_batch import Slots, probe_batch
from engines.torch_cuda_model import DecoderConfig, TorchModel, random_weights

_KV_SHARE = 0.7  # of the memory that is free after the weights
_KV_TOKENS_MAX = 1_100_000  # 64 requests of 16k
_BLOCK_TOKENS = 32


class Skip(Exception):  # noqa: N818 - what happened
    """A part can't be measured here; the message says why."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes in tokens. prompts, batches, histories: the grid of prefill. cells: of LAPS, (L list, B list)."""

    name: str
    tokens_max: int
    prompts: tuple[int, ...]
    batches: tuple[int, ...]
    histories: tuple[int, ...]
    launch_tokens: tuple[int, ...]
    cells: tuple[tuple[int, ...], tuple[int, ...]]
    classes: tuple[int, ...]
    long_prompts: tuple[int, ...]
    short_prompt: int
    shorts: tuple[int, ...]
    split_prefill: int
    split_decode: tuple[int, int]  # requests, history


FULL = Scale(
    name="full",
    tokens_max=16_384,
    prompts=(8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
    batches=(1, 2, 4, 8, 16, 32, 64),
    histories=(0, 1024, 4096, 16_384),
    launch_tokens=(8, 16, 32, 64, 128, 256, 512),
    cells=((8, 16, 32, 64, 128, 256), (1, 2, 4, 8, 16, 32, 64)),
    classes=(64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384),
    long_prompts=(1024, 4096),
    short_prompt=64,
    shorts=(1, 3, 7, 15, 63),
    split_prefill=2048,
    split_decode=(32, 1024),
)
TINY = Scale(
    name="tiny",
    tokens_max=256,
    prompts=(8, 16, 32, 64),
    batches=(1, 2, 4),
    histories=(0, 32),
    launch_tokens=(8, 16),
    cells=((8, 16), (1, 2)),
    classes=(16, 32),
    long_prompts=(64,),
    short_prompt=8,
    shorts=(1, 3),
    split_prefill=64,
    split_decode=(4, 32),
)
SCALES = {scale.name: scale for scale in (FULL, TINY)}


@dataclass(slots=True)
class Bench:
    """One model, ready to be measured."""

    name: str
    model: TorchModel
    scale: Scale
    kv_tokens: int
    seed: int

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def cuda(self) -> bool:
        return str(self.device.type) == "cuda"

    def takes(self, sizes: Sequence[tuple[int, int]]) -> bool:
        """Whether requests of (new, history) tokens fit into the pool and the largest pass."""
        tokens, history = sum(new for new, _ in sizes), sum(past for _, past in sizes)
        return tokens <= self.scale.tokens_max and (history == 0 or tokens + history <= self.kv_tokens)

    def eager(self, sizes: Sequence[tuple[int, int]]) -> Callable[[], Any]:
        """A pass over requests of (new, history) tokens, from the host's arrays to the tokens' argmax."""
        batch = probe_batch(sizes, self.model.slots, self.model.config.shape.vocab, self.seed)
        return lambda: self.model.forward(batch).argmax(dim=-1)

    def on_device(self, sizes: Sequence[tuple[int, int]]) -> Callable[[], Any]:
        """The same with its inputs on the device already: it only issues kernels."""
        model = self.model
        batch = model.upload(probe_batch(sizes, model.slots, model.config.shape.vocab, self.seed))

        def run() -> Any:
            with torch.inference_mode():
                state = model.begin(batch)
                model.layers(state, 0, model.config.shape.layers, model.attention)
                return model.head(state).argmax(dim=-1)

        return run


def make_bench(name: str, device: str, scale: Scale, seed: int = 0) -> Bench:
    """Random weights of a shipped shape on the device."""
    shape, label = known_models()[name].shape, name
    assert shape is not None  # shipped models have one
    if scale is TINY:
        shape, label = _tiny(shape), f"{name}-tiny"
    dtype = "bf16" if device.startswith("cuda") else "f32"
    config = DecoderConfig.of_shape(shape, context_tokens=max(scale.prompts) + max(scale.histories))
    weights = random_weights(config, device, dtype, seed)
    largest = max(scale.batches) * (max(scale.histories) + max(scale.prompts))
    kv_tokens = min(_KV_TOKENS_MAX, largest)
    if device.startswith("cuda"):
        free = torch.cuda.mem_get_info()[0]
        kv_tokens = min(kv_tokens, int(free * _KV_SHARE) // shape.kv_bytes_per_token - scale.tokens_max)
    slots = Slots(max(1, kv_tokens // _BLOCK_TOKENS), _BLOCK_TOKENS, scratch=scale.tokens_max)
    model = TorchModel(config, weights, slots)
    for pool in model.pool:
        pool.normal_()  # attention over zeros would draw less power than over values
    return Bench(label, model, scale, slots.total, seed)


def _tiny(shape: ModelShape) -> ModelShape:
    return replace(shape, layers=2, hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16, vocab=97)


class Table:
    """A CSV that is complete after every row: a run that is killed keeps what it has."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path, self.columns, self.rows = path, tuple(columns), 0
        new = not path.exists() or path.stat().st_size == 0
        self._file = path.open("a", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, self.columns, lineterminator="\n", restval="")
        if new:
            self._writer.writeheader()
            self._file.flush()

    def add(self, **values: object) -> None:
        self._writer.writerow({name: _text(value) for name, value in values.items()})
        self._file.flush()
        self.rows += 1

    def close(self) -> None:
        self._file.close()


def _text(value: object) -> object:
    if value is None:
        return ""
    return f"{value:.4f}" if isinstance(value, float) else value


@dataclass(frozen=True, slots=True)
class Deadline:
    """Until when a part may begin another row. Seconds of `time.monotonic`."""

    at_s: float

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self.at_s
