"""How long a prompt is when the service's tokenizer is not at hand."""

from __future__ import annotations

TEMPLATE_TOKENS = 31  # SmolLM2's template with its default system message; others differ by a few dozen
CHARS_PER_TOKEN = 4.3  # English prose


def approximate_tokens(text: str) -> int:
    """Good to some 20 % for English."""
    return TEMPLATE_TOKENS + round(len(text) / CHARS_PER_TOKEN)
