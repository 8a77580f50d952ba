"""Attention over a packed row, for the torch engine: several ways, chosen by a check on the device itself.

    flash    the variable-length FlashAttention kernel that torch is built with, called as an operator: one
             kernel a layer, no host work beside it
    varlen   the same through torch.nn.attention.varlen, the public name (torch 2.10 and newer)
    each     scaled_dot_product_attention, request by request: any device and type, not to be captured
    mask     scaled_dot_product_attention under one T x K mask: any device, can be captured, but pays for
             every pair of tokens whether of one request or not

All are causal with the new tokens at the end of what they attend to ("lower right"), and share K and V heads
between query heads. Names and arguments of the kernels moved between torch versions, and a kernel that takes
the arguments may still align the mask otherwise, so a way is used only after it gave the answer of `each`.

Imported only where torch is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from torch import Tensor

_CHECK_SIZES = ((5, 0), (1, 9), (4, 7), (0, 0))  # (new, history) of the requests of the check


@dataclass(frozen=True, slots=True)
class Runs:
    """Where the requests of a packed row begin and end.

    q_starts, k_starts: int32 [requests + 1] on the device. q_lens, k_lens: the same on the host, for `each`.
    q_max, k_max: bounds of the longest. mask: bool [T, K], for `mask`.
    """

    q_starts: Tensor
    k_starts: Tensor
    q_lens: Sequence[int]
    k_lens: Sequence[int]
    q_max: int
    k_max: int
    mask: Tensor | None = None


Attend = Callable[["Tensor", "Tensor", "Tensor", Runs], "Tensor"]


@dataclass(frozen=True, slots=True)
class Attention:
    """One way to attend: q [T, heads, d], k and v [K, kv heads, d] -> [T, heads, d]."""

    name: str
    attend: Attend
    capturable: bool

    @property
    def masked(self) -> bool:
        return self.name == "mask"


def choose_attention(
    heads: int, kv_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype, *, captured: bool
) -> tuple[Attention, dict[str, str]]:
    """The best way that works here, and why each better one does not. captured: it must fit into a graph."""
    refused: dict[str, str] = {}
    for way in ways():
        if captured and not way.capturable:
            continue
        if way.name in ("flash", "varlen") and (device.type != "cuda" or dtype == torch.float32):
            refused[way.name] = f"needs CUDA and 16-bit types, this is {device.type} and {dtype}"
            continue
        try:
            error = check(way, heads, kv_heads, head_dim, device, dtype)
        except (RuntimeError, TypeError, ValueError, AttributeError) as caught:
            refused[way.name] = f"{type(caught).__name__}: {str(caught).splitlines()[0]}"
            continue
        if error <= (1e-4 if dtype == torch.float32 else 3e-2):
            return way, refused
        refused[way.name] = f"differs from request-by-request attention by {error:.3g}"
    raise RuntimeError(f"no way to attend works on {device} in {dtype}: {refused}")


def check(
    way: Attention, heads: int, kv_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype
) -> float:
    """Largest difference from `each` on a small case with history."""
    new = [n for n, _ in _CHECK_SIZES]
    ends = [n + p for n, p in _CHECK_SIZES]
    generator = torch.Generator("cpu").manual_seed(1)

    def values(rows: int, count: int) -> Tensor:
        made = torch.randn(rows, count, head_dim, generator=generator, device="cpu")
        return made.to(device, dtype)

    q, k, v = values(sum(new), heads), values(sum(ends), kv_heads), values(sum(ends), kv_heads)
    runs = make_runs(new, ends, device, masked=way.masked)
    found, expected = way.attend(q, k, v, runs), _each(q, k, v, runs)
    return float((found.float() - expected.float()).abs().max())


def make_runs(
    q_lens: Sequence[int], k_lens: Sequence[int], device: torch.device, *, masked: bool = False
) -> Runs:
    starts = [0], [0]
    for sums, lens in zip(starts, (q_lens, k_lens), strict=True):
        for length in lens:
            sums.append(sums[-1] + length)
    q_starts, k_starts = torch.tensor(starts, dtype=torch.int32).to(device)
    mask = block_mask(q_starts, k_starts, sum(q_lens), sum(k_lens)) if masked else None
    return Runs(q_starts, k_starts, q_lens, k_lens, max(q_lens), max(k_lens), mask)


def block_mask(q_starts: Tensor, k_starts: Tensor, tokens: int, rows: int) -> Tensor:
    """Which of `rows` each of `tokens` attends to, from the starts alone, so that a graph can hold it."""
    device = q_starts.device
    q_row = torch.arange(tokens, device=device, dtype=torch.int32)
    k_row = torch.arange(rows, device=device, dtype=torch.int32)
    q_of = torch.searchsorted(q_starts[1:].contiguous(), q_row, right=True)
    k_of = torch.searchsorted(k_starts[1:].contiguous(), k_row, right=True)
    after = k_starts[1:] - q_starts[1:]  # of the last row: both sides end together
    allowed: Tensor = (q_of[:, None] == k_of[None, :]) & (k_row[None, :] <= (q_row + after[q_of])[:, None])
    return allowed


def ways() -> tuple[Attention, ...]:
    """Best first."""
    return (
        Attention("flash", _flash, capturable=True),
        Attention("varlen", _varlen, capturable=True),
        Attention("each", _each, capturable=False),
        Attention("mask", _mask, capturable=True),
    )


def _flash(q: Tensor, k: Tensor, v: Tensor, runs: Runs) -> Tensor:
    result: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, runs.q_starts, runs.k_starts, runs.q_max, runs.k_max, 0.0, True, return_debug_mask=False
    )[0]
    return result


def _varlen(q: Tensor, k: Tensor, v: Tensor, runs: Runs) -> Tensor:
    function, options = _varlen_function()
    sizes = (runs.q_starts, runs.k_starts, runs.q_max, runs.k_max)
    result: Tensor = function(q, k, v, *sizes, **options)
    return result


def _varlen_function() -> tuple[Callable[..., Any], dict[str, Any]]:
    """The public function of this torch and its options. Raises AttributeError where there is none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise AttributeError(str(error)) from error
    named = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in named else {}
    options |= {"is_causal": True} if "is_causal" in named else {"window_size": (-1, 0)}
    return varlen_attn, options


def _each(q: Tensor, k: Tensor, v: Tensor, runs: Runs) -> Tensor:
    out = torch.zeros_like(q)
    q_end = k_end = 0
    for new, rows in zip(runs.q_lens, runs.k_lens, strict=True):
        q_start, k_start, q_end, k_end = q_end, k_end, q_end + new, k_end + rows
        if new == 0:
            continue
        mask = None
        if 1 < new < rows:
            mask = torch.ones(new, rows, dtype=torch.bool, device=q.device).tril(rows - new)
        heads = scaled_dot_product_attention(
            q[q_start:q_end].transpose(0, 1)[None],
            k[k_start:k_end].transpose(0, 1)[None],
            v[k_start:k_end].transpose(0, 1)[None],
            attn_mask=mask,
            is_causal=new == rows and new > 1,
            enable_gqa=True,
        )
        out[q_start:q_end] = heads[0].transpose(0, 1)
    return out


def _mask(q: Tensor, k: Tensor, v: Tensor, runs: Runs) -> Tensor:
    assert runs.mask is not None
    heads = scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=runs.mask,
        enable_gqa=True,
    )
    result: Tensor = heads[0].transpose(0, 1)
    return result
