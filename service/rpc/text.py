"""Text to token ids and back.

`BundleCodec` reads the tokenizer and chat template of a bundle. `ByteCodec` serves engines without text (the
simulated one): a token is a byte, and generated tokens are shown as letters.

Detokenising a stream: a token may end inside a character, so `Detokenizer` holds text back until it is whole.
`StopFilter` cuts the text at a stop text, also one that spans tokens, and holds back what may become one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

Message = dict[str, str]  # role, content

_MARK = re.compile("(\ue000\\d+\ue001)")  # private characters: stands for a message's content
_UNFINISHED = "\ufffd"  # what decoders put for bytes that are no character (yet)
_UNFINISHED_TOKENS_MAX = 4  # a UTF-8 character has at most 4 bytes; more is no character at all


class ChatError(ValueError):
    """The chat template refused the messages."""


class TextCodec(Protocol):
    """Thread-safe. `vocab_size`: ids are below it. `eos_id`: ends an answer and is not part of it."""

    vocab_size: int
    eos_id: int

    def encode(self, text: str) -> list[int]:
        """Tokens of a prompt as it is: control tokens spelled out in it count as such."""

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of the prompt that stands for `messages`. What a message says is text, never control
        tokens. Raises ChatError."""

    def decode(self, token_ids: Sequence[int]) -> str: ...


class BundleCodec:
    def __init__(
        self, tokenizer_path: Path, chat_template: str, bos_id: int, eos_id: int, add_bos: bool
    ) -> None:
        from jinja2.sandbox import ImmutableSandboxedEnvironment
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(tokenizer_path))
        self._plain = Tokenizer.from_file(str(tokenizer_path))
        self._plain.encode_special_tokens = True  # spelled-out control tokens are text to this one
        added = self._tokenizer.get_added_tokens_decoder().values()
        self._control_tokens = tuple(token.content for token in added if token.special)
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise
        self._template = environment.from_string(chat_template)
        self._special = {
            "bos_token": self._tokenizer.id_to_token(bos_id) or "",
            "eos_token": self._tokenizer.id_to_token(eos_id) or "",
        }
        self._bos = [bos_id] if add_bos else []
        self.vocab_size = int(self._tokenizer.get_vocab_size())
        self.eos_id = eos_id

    def encode(self, text: str) -> list[int]:
        return self._bos + list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        spelled = [m for m in messages if any(token in m["content"] for token in self._control_tokens)]
        if not spelled:
            return self.encode(self._chat_text(messages))
        # Somebody writes control tokens into a message. The template goes through the tokenizer with them,
        # what is said without, piece by piece, so that nobody can end their turn and speak for another.
        marks = [f"\ue000{index}\ue001" for index in range(len(messages))]
        said = {mark: m["content"] for mark, m in zip(marks, messages, strict=True)}
        text = self._chat_text([{**m, "content": mark} for mark, m in zip(marks, messages, strict=True)])
        ids = list(self._bos)
        for piece in _MARK.split(text):
            if piece in said:
                ids += self._plain.encode(said[piece], add_special_tokens=False).ids
            elif piece:
                ids += self._tokenizer.encode(piece, add_special_tokens=False).ids
        return ids

    def _chat_text(self, messages: Sequence[Message]) -> str:
        from jinja2 import TemplateError

        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special)
        except (TemplateError, TypeError, ValueError) as error:  # what a template can run into
            raise ChatError(str(error)) from error

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))


class ByteCodec:
    """Bytes 0-255 are tokens 3-258; anything else decodes to a letter."""

    _OFFSET = 3
    vocab_size = 65_536
    eos_id = 2

    def encode(self, text: str) -> list[int]:
        return [byte + self._OFFSET for byte in text.encode()]

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        return self.encode("".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant: ")

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token_id % 26) for token_id in token_ids if token_id != self.eos_id)


class Detokenizer:
    """The text of a growing list of tokens, whole characters at a time."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._ids: list[int] = []
        self._context = 0  # decoding starts here: the tokenizer may treat a first token differently
        self._shown = 0  # tokens whose text has been given out

    def add(self, token_id: int) -> str:
        """Text that became whole with `token_id`."""
        self._ids.append(token_id)
        text = self._new_text()
        waiting = len(self._ids) - self._shown
        if text.endswith(_UNFINISHED) and waiting < _UNFINISHED_TOKENS_MAX:
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return text

    def rest(self) -> str:
        """What is left at the end, without the character that never became whole."""
        return self._new_text().rstrip(_UNFINISHED)

    def _new_text(self) -> str:
        before = self._codec.decode(self._ids[self._context : self._shown])
        return self._codec.decode(self._ids[self._context :])[len(before) :]


class StopFilter:
    """Cuts a stream of text before the stop text that is complete first, however the stream is split."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._hit = False

    def hit(self) -> bool:
        """Whether a stop text has come."""
        return self._hit

    def add(self, text: str, *, last: bool = False) -> str:
        """What of the text so far can be shown; after a hit always nothing."""
        if self._hit:
            return ""
        text, self._held = self._held + text, ""
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._hit = True
            return text[: min(found)[1]]
        held = 0 if last else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


def _raise(message: str) -> Any:
    from jinja2 import TemplateError

    raise TemplateError(message)
