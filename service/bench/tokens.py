"""How long a prompt is, counted the way the service counts it: the chat template around one user message."""

from __future__ import annotations

from pathlib import Path

from service.bench.workload import CountTokens

TEMPLATE_TOKENS = 31  # SmolLM2's template with its default system message; others differ by a few dozen
CHARS_PER_TOKEN = 4.3  # English prose


def approximate_tokens(text: str) -> int:
    """For a service whose tokenizer is not at hand: good to some 20 % for English."""
    return TEMPLATE_TOKENS + round(len(text) / CHARS_PER_TOKEN)


def bundle_counter(tokenizer_path: Path, chat_template: str) -> CountTokens:
    """Exact counts with the tokenizer and the chat template of a bundle."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(chat_template)

    def count(text: str) -> int:
        messages = [{"role": "user", "content": text}]
        prompt = template.render(messages=messages, add_generation_prompt=True)
        return len(tokenizer.encode(prompt, add_special_tokens=False).ids)

    return count
