"""Which profile of a TensorRT-LLM engine runs a pass: the split rule of its builder and of its executor.

In packed mode an engine sees T, the tokens of a pass, and B, its requests, as separate dimensions, so the
profiles lie along T. With several profiles the builder splits T at 64, 128, 256, 512 and 1024, a constant in
its Python and again in the executor's C++. Each profile is tuned at its upper end, and all share one set of
weights. The executor pads nothing. Per iteration it takes the first class that T fits (`lower_bound`), or
profile 0 where the engine has only one. A cell (L, B) of the grid is therefore a T, and its T-class is the
profile that runs it.

Neighbouring ranges share their edge: T = 64 fits [1, 64] and [64, 128], and the executor takes the first.

Everything here is arithmetic: the build plan, the scheduler's profiles and the tests use the same functions.
Sources: `GenerationMixin.get_profiles_ranges` and `split_num_tokens_range`, `check_max_num_tokens` (read at
0.17, same text in 1.x files), `ModelConfig::kOPT_PROFILES_SPLIT_POINTS`; 1.2.1 was not read at its tag.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from engines.profiles import Profiles
from engines.types import Layout, Padding

SPLIT_POINTS = (64, 128, 256, 512, 1024)
WARN_TOKENS = (
    16_384  # TensorRT-LLM warns above it; with several profiles a build of 49,152 failed (issue 2014)
)

ProfileRange = tuple[int, int, int]  # tokens: (min, opt, max)


@dataclass(frozen=True, slots=True)
class CellClass:
    """Where a cell of the grid runs.

    tokens: T = length x batch. class_index: the profile, counted from 0; None: no pass holds the cell.
    why: in words.
    """

    length: int
    batch: int
    tokens: int
    class_index: int | None
    why: str


@dataclass(frozen=True, slots=True)
class PassLimit:
    """What is left of a wanted max_num_tokens. notes: what was changed and why, and warnings."""

    pass_tokens_max: int
    notes: tuple[str, ...] = ()


def stock_classes(pass_tokens_max: int) -> tuple[int, ...]:
    """Upper edges of the T-classes with several profiles, ascending; the last is `pass_tokens_max`."""
    if pass_tokens_max < 1:
        raise ValueError(f"pass_tokens_max must be at least 1, got {pass_tokens_max}")
    return (*(p for p in SPLIT_POINTS if p < pass_tokens_max), pass_tokens_max)


def profile_ranges(
    pass_tokens_max: int,
    *,
    multiple: bool = True,
    opt_num_tokens: int | None = None,
    requests_max: int,
) -> tuple[ProfileRange, ...]:
    """(min, opt, max) tokens of every profile, as the builder makes them.

    opt_num_tokens: of the single profile; with several it is ignored. Raises ValueError for what makes a
    malformed engine.
    """
    if multiple:
        _refuse_flat(pass_tokens_max)
        edges = stock_classes(pass_tokens_max)
        return tuple((low, high, high) for low, high in zip((1, *edges), edges, strict=False))
    if requests_max < 1:
        raise ValueError(f"requests_max must be at least 1, got {requests_max}")
    best = min(pass_tokens_max, requests_max) if opt_num_tokens is None else opt_num_tokens
    if not 1 <= best <= pass_tokens_max:
        raise ValueError(f"opt_num_tokens must be 1 to pass_tokens_max ({pass_tokens_max}), got {best}")
    return ((1, best, pass_tokens_max),)


def profile_index(tokens: int, profile_count: int) -> int:
    """The profile that the executor selects for T = `tokens`; always 0 where there is only one.

    Raises ValueError for a T that an engine with `profile_count` profiles has no profile for.
    """
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1, got {tokens}")
    if not 1 <= profile_count <= len(SPLIT_POINTS) + 1:
        raise ValueError(f"profile_count must be 1 to {len(SPLIT_POINTS) + 1}, got {profile_count}")
    if profile_count == 1:
        return 0
    index = bisect_left(SPLIT_POINTS, tokens)
    if index >= profile_count:
        raise ValueError(f"tokens: {tokens} needs profile {index}, but the engine has {profile_count}")
    return index


def limits(
    pass_tokens_max: int,
    context_tokens_max: int,
    requests_max: int,
    block_tokens: int,
    *,
    multiple: bool = True,
) -> PassLimit:
    """What TensorRT-LLM makes of max_num_tokens before a build.

    It is clipped to max_seq_len x max_batch_size, then raised to tokens_per_block; above 16,384 there is a
    warning. Raises ValueError where several profiles would come out malformed: at 64 or below the builder
    returns one flat range in place of a list of ranges.
    """
    given = {
        "pass_tokens_max": pass_tokens_max,
        "context_tokens_max": context_tokens_max,
        "requests_max": requests_max,
        "block_tokens": block_tokens,
    }
    for name, value in given.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    tokens, notes = pass_tokens_max, []
    if tokens > context_tokens_max * requests_max:
        tokens = context_tokens_max * requests_max
        notes.append(
            f"pass_tokens_max {pass_tokens_max} is clipped to {tokens}: {requests_max} requests of "
            f"{context_tokens_max} tokens are all that a pass can hold"
        )
    if tokens < block_tokens:
        notes.append(f"pass_tokens_max {tokens} is raised to one KV block, {block_tokens}")
        tokens = block_tokens
    if tokens > WARN_TOKENS:
        notes.append(
            f"pass_tokens_max {tokens} is above {WARN_TOKENS}: TensorRT-LLM warns, and with several "
            "profiles such a build can fail (issue 2014)"
        )
    if multiple:
        _refuse_flat(tokens)
    return PassLimit(tokens, tuple(notes))


def map_cell(length: int, batch: int, classes: tuple[int, ...]) -> CellClass:
    """The T-class of a cell. `classes`: upper edges, from `stock_classes`, or one for a single profile."""
    if length < 1 or batch < 1:
        raise ValueError(f"length and batch must be at least 1, got {length} and {batch}")
    tokens = length * batch
    index = bisect_left(classes, tokens)
    if index == len(classes):
        why = (
            f"T = {length} x {batch} = {tokens} is more than the largest pass, {classes[-1]}: "
            f"at most {classes[-1] // length} such requests a pass"
            if length <= classes[-1]
            else f"{length} tokens are more than the largest pass, {classes[-1]}: they run in parts"
        )
        return CellClass(length, batch, tokens, None, why)
    low = classes[index - 1] + 1 if index else 1
    why = f"T = {length} x {batch} = {tokens} is in {low} to {classes[index]}; nothing is padded"
    return CellClass(length, batch, tokens, index, why)


def stock_profiles(pass_tokens_max: int) -> Profiles:
    """The shapes of the stock engine as the scheduler sees them: packed, T-classes, never padded."""
    return Profiles(Layout.PACKED, Padding.NOTHING, stock_classes(pass_tokens_max))


def _refuse_flat(tokens: int) -> None:
    if tokens <= SPLIT_POINTS[0]:
        raise ValueError(
            f"pass_tokens_max is {tokens}: with several profiles TensorRT-LLM makes a malformed engine at "
            f"{SPLIT_POINTS[0]} or below; use {SPLIT_POINTS[0] + 1} or more, or one profile"
        )
