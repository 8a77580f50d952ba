"""Passes of fixed shape for the torch engine: one set of buffers a (T, K) class, captured into a CUDA graph.

A graph replays what was captured, on the addresses that it was captured with. So a class owns its inputs; a
pass is padded to it, its inputs are copied into them, and the graph runs. Nothing is captured while serving:
all classes are made at load, the largest first, so that the smaller ones reuse its memory.

Without CUDA, or where capturing is switched off, the same buffers and the same calls run uncaptured: what a
test on a CPU sees is what is captured on a GPU, but for the attention (`each` can't be captured).

Imported only where torch is used.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engines.torch_cuda_attention import Attention, Runs, block_mask
from engines.torch_cuda_batch import PackedBatch, pad
from engines.torch_cuda_model import DeviceBatch, TorchModel, starts

if TYPE_CHECKING:
    from torch import Tensor

_WARM_PASSES = 2  # libraries pick their kernels and take their workspaces in these


@dataclass(frozen=True, slots=True)
class FixedShape:
    """tokens: T. rows: K; equal to T for passes without history. requests: at most, the padding left out."""

    tokens: int
    rows: int
    requests: int


class FixedPass:
    """The forward of one shape. Call `prepare` before the first `run`; `pool` is shared between graphs."""

    def __init__(self, model: TorchModel, shape: FixedShape, attention: Attention, pool: Any = None) -> None:
        if shape.tokens > model.slots.scratch:
            raise ValueError(f"{shape.tokens} tokens, but {model.slots.scratch} scratch slots")
        self.shape = shape
        self.captured = False
        self.capture_s = 0.0
        self._model, self._attention, self._pool = model, attention, pool
        listed = 0 if shape.rows == shape.tokens else shape.rows
        self._sizes = [shape.tokens, shape.tokens, shape.tokens, shape.requests, listed]
        device = model.device
        self._ints = torch.zeros(sum(self._sizes), dtype=torch.int64, device=device)
        self._starts = torch.zeros((2, shape.requests + 2), dtype=torch.int32, device=device)
        self._graph: Any = None
        self._logits: Tensor | None = None
        self._lens: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    def prepare(self, *, capture: bool) -> None:
        """Run it a few times on padding alone and, if asked to, capture it (CUDA only)."""
        empty = np.zeros(0, np.int64)
        self._fill(PackedBatch(empty, empty, empty, None, (), (), empty))
        if not capture:
            self._logits = self._forward()
            return
        start_s = time.perf_counter()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_PASSES):
                self._forward()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._logits = self._forward()
        self._graph, self.captured = graph, True
        torch.cuda.synchronize()
        self.capture_s = time.perf_counter() - start_s

    def run(self, batch: PackedBatch) -> Tensor:
        """Logits [rows in batch.last, vocab], valid until the next run of any shape that shares the pool."""
        self._fill(batch)
        return self.replay()[: len(batch.last)]

    def replay(self) -> Tensor:
        """The pass over the inputs that are there: logits of all rows."""
        if self._graph is None:
            self._logits = self._forward()
        else:
            self._graph.replay()
        assert self._logits is not None
        return self._logits

    def _fill(self, batch: PackedBatch) -> None:
        shape = self.shape
        padded = pad(batch, shape.tokens, shape.rows, self._model.slots)
        last = np.zeros(shape.requests, np.int64)
        last[: len(batch.last)] = batch.last
        parts = [padded.token_ids, padded.positions, padded.writes, last]
        if isinstance(padded.reads, np.ndarray):
            parts.append(padded.reads)
        self._ints.copy_(torch.from_numpy(np.concatenate(parts)))
        # Requests that are not there begin and end where the padding ends.
        spare = (0,) * (shape.requests + 1 - len(padded.q_lens))
        self._lens = ((*padded.q_lens, *spare), (*padded.k_lens, *spare))
        self._starts.copy_(torch.from_numpy(starts(*self._lens)))

    def _forward(self) -> Tensor:
        model, shape = self._model, self.shape
        with torch.inference_mode():
            token_ids, positions, writes, last, reads = self._ints.split(self._sizes)
            q_starts, k_starts = self._starts
            mask = None
            if self._attention.masked:
                mask = block_mask(q_starts, k_starts, shape.tokens, shape.rows)
            # At 1 the flash kernel takes every request for one token, and here some have none.
            q_max = max(2, shape.tokens)
            runs = Runs(q_starts, k_starts, *self._lens, q_max, shape.rows, mask)
            held = None if shape.rows == shape.tokens else reads
            state = model.begin(DeviceBatch(token_ids, positions, writes, held, last, runs))
            model.layers(state, 0, model.config.shape.layers, self._attention)
            return model.head(state)
