"""What turns messages into a prompt, out of a checkpoint's tokenizer files.

`tokenizer_config.json` names the special tokens and the chat template (newer checkpoints keep the template in
a file of its own), `tokenizer.json` has the numbers. A chat model ends its turn with another token than a
text model: the tokenizer's own end token is taken, not the first that `config.json` lists.

The service puts the begin token before every prompt where `add_bos` says so. Templates of such models often
write it too; two of them make answers worse, so the template is then told that there is none.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from build_scripts.trtllm.checkpoint import CheckpointError, read_config
from engines.bundle_base import TOKENIZER, Text

_REMEDY = "give a complete checkpoint with a fast tokenizer (tokenizer.json and tokenizer_config.json)"
_PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"  # a text model has none


def read_text(directory: Path) -> Text:
    """Raises CheckpointError saying which file or token is missing, or that the tokenizer can't be loaded."""
    _check_tokenizer(directory / TOKENIZER)
    settings = _load(directory / "tokenizer_config.json")
    tokenizer = _load(directory / TOKENIZER)
    config = read_config(directory)
    eos_id = _token_id(tokenizer, settings.get("eos_token"), config.get("eos_token_id"))
    if eos_id is None:
        raise CheckpointError(f"checkpoint {directory} names no end token", _REMEDY)
    bos_id = _token_id(tokenizer, settings.get("bos_token"), config.get("bos_token_id"))
    add_bos = bos_id is not None and _adds_bos(settings, tokenizer)
    template = _template(directory, settings)
    return Text(
        chat_template="{% set bos_token = '' %}" + template if add_bos else template,
        bos_id=eos_id if bos_id is None else bos_id,
        eos_id=eos_id,
        add_bos=add_bos,
    )


def _check_tokenizer(path: Path) -> None:
    """The service would find out only when it starts. Left out where `tokenizers` is not installed."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return
    if path.is_file():
        try:
            Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise CheckpointError(f"{path} is no tokenizer: {error}", _REMEDY) from None


def _load(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {path.parent} has no {path.name}", _REMEDY) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} can't be read: {error}", _REMEDY) from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} is not an object", _REMEDY)
    return data


def _content(token: Any) -> str | None:
    """The text of a special token, which is written as a text or as an object."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) and content else None


def _token_id(tokenizer: dict[str, Any], token: Any, otherwise: Any) -> int | None:
    """The number of `token`; where it is not named, what config.json says (one number, or several)."""
    content = _content(token)
    if content is not None:
        for added in tokenizer.get("added_tokens") or ():
            if added.get("content") == content:
                return int(added["id"])
        vocabulary = (tokenizer.get("model") or {}).get("vocab")
        if isinstance(vocabulary, dict) and content in vocabulary:
            return int(vocabulary[content])
        raise CheckpointError(f"{TOKENIZER} has no token {content!r}", _REMEDY)
    first = otherwise[0] if isinstance(otherwise, list) and otherwise else otherwise
    return first if isinstance(first, int) else None


def _adds_bos(settings: dict[str, Any], tokenizer: dict[str, Any]) -> bool:
    """By the setting, else by the tokenizer's own post-processing, as Llama 3 has it."""
    said = settings.get("add_bos_token")
    if isinstance(said, bool):
        return said
    bos = _content(settings.get("bos_token"))
    return bos is not None and json.dumps(bos) in json.dumps(tokenizer.get("post_processor"))


def _template(directory: Path, settings: dict[str, Any]) -> str:
    found = settings.get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default") or next(iter(named.values()), None)
    file = directory / "chat_template.jinja"
    if not isinstance(found, str) and file.is_file():
        found = file.read_text(encoding="utf-8")
    return found if isinstance(found, str) and found else _PLAIN_TEMPLATE
