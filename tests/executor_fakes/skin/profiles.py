"""Which profiles TensorRT-LLM's builder makes, written from the notes alone: the oracle of the project's own
rule.

One list for all of an engine: packed input, paged KV, one beam. With several profiles each begins where the
one before ends and is tuned at its upper end; the last ends with max_num_tokens. Their batch is the same.
"""

from __future__ import annotations

SPLITS = (64, 128, 256, 512, 1024)


class MalformedProfilesError(ValueError):
    """What the real one makes here is a flat list of numbers, and the build fails."""


def token_ranges(
    max_num_tokens: int, max_batch_size: int, opt_num_tokens: int | None, multiple: bool
) -> list[tuple[int, int, int]]:
    """(min, opt, max) new tokens of each profile."""
    if not multiple:
        return [(1, opt_num_tokens or min(max_num_tokens, max_batch_size), max_num_tokens)]
    if max_num_tokens <= SPLITS[0]:
        raise MalformedProfilesError(f"several profiles need max_num_tokens above 64, got {max_num_tokens}")
    ranges: list[tuple[int, int, int]] = []
    low = 1
    for split in SPLITS:
        if split >= max_num_tokens:
            break
        ranges.append((low, split, split))
        low = split
    return [*ranges, (low, max_num_tokens, max_num_tokens)]


def clipped_tokens(max_num_tokens: int, max_seq_len: int, max_batch_size: int, tokens_per_block: int) -> int:
    """max_num_tokens after what the builder does to it on its own."""
    return max(min(max_num_tokens, max_seq_len * max_batch_size), tokens_per_block)
