"""Reading a model out of GGUF, on files written here: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf")

import gguf

from build_scripts.gguf_model import GgufError, build_tokenizer, load_gguf, tokenizer_info
from tests.engines import oracle

CONFIG = oracle.TINY
WEIGHTS = oracle.random_model(CONFIG)
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def alphabet() -> list[str]:
    """GPT-2's printable stand-ins for bytes: enough of them for ASCII, newline and space."""
    return [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp's converter writes them: (half, pair) of each head becomes (pair, half)."""
    rows = weight.shape[0] // heads
    order = np.arange(weight.shape[0]).reshape(heads, 2, rows // 2).transpose(0, 2, 1).reshape(-1)
    return weight[order]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a GGUF file; keyword arguments replace metadata (None leaves it out) or drop a tensor."""

    def write(drop: str = "", **changes: object) -> Path:
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(str(path), str(changes.get("architecture", "llama")))
        writer.add_block_count(CONFIG.layers)
        writer.add_embedding_length(CONFIG.hidden)
        writer.add_feed_forward_length(CONFIG.ff)
        writer.add_head_count(CONFIG.heads)
        writer.add_head_count_kv(CONFIG.kv_heads)
        writer.add_key_length(CONFIG.head_dim)
        writer.add_context_length(CONFIG.context_tokens)
        writer.add_rope_freq_base(CONFIG.rope_base)
        writer.add_layer_norm_rms_eps(CONFIG.norm_eps)
        writer.add_vocab_size(CONFIG.vocab)
        if "scaling" in changes:
            writer.add_rope_scaling_factor(2.0)
        _add_tokenizer(writer, str(changes.get("pre", "smollm")))
        for name, values in WEIGHTS.items():
            if name != drop:
                heads = {"attn_q": CONFIG.heads, "attn_k": CONFIG.kv_heads}.get(name.split(".")[-2])
                writer.add_tensor(name, permuted(values, heads) if heads else values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def _add_tokenizer(writer: object, pre: str) -> None:
    tokens = ["<|end|>", "<|im_start|>", "<|im_end|>", *alphabet(), "he", "ll", "12"]
    writer.add_tokenizer_model("gpt2")  # type: ignore[attr-defined]
    writer.add_tokenizer_pre(pre)  # type: ignore[attr-defined]
    writer.add_token_list(tokens)  # type: ignore[attr-defined]
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))  # type: ignore[attr-defined]
    writer.add_token_merges(["h e", "l l", "1 2"])  # type: ignore[attr-defined]
    writer.add_bos_token_id(1)  # type: ignore[attr-defined]
    writer.add_eos_token_id(2)  # type: ignore[attr-defined]
    writer.add_add_bos_token(False)  # type: ignore[attr-defined]
    writer.add_chat_template(TEMPLATE)  # type: ignore[attr-defined]


def test_weights_come_back_as_they_were_before_the_permutation(write: Callable[..., Path]) -> None:
    config, weights = load_gguf(write())
    assert (config.eos_id, config.rope_base, config.head_dim) == (2, CONFIG.rope_base, CONFIG.head_dim)
    assert weights.keys() == WEIGHTS.keys()
    for name, values in WEIGHTS.items():
        np.testing.assert_array_equal(weights[name], values)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architecture": "qwen3"}, "general.architecture"),
        ({"scaling": True}, "llama.rope.scaling"),
        ({"drop": "blk.0.ffn_up.weight"}, "blk.0.ffn_up.weight"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_by_field(
    write: Callable[..., Path], changes: dict[str, object], named: str
) -> None:
    with pytest.raises(GgufError, match=named):
        load_gguf(write(**changes))


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GgufError, match="no such file"):
        load_gguf(tmp_path / "absent.gguf")
    (tmp_path / "garbage.gguf").write_bytes(b"not a model" * 100)
    with pytest.raises(GgufError, match="not a readable GGUF"):
        load_gguf(tmp_path / "garbage.gguf")


def test_the_tokenizer_merges_splits_digits_and_keeps_control_tokens_whole(
    write: Callable[..., Path],
) -> None:
    tokenizer = build_tokenizer(write())
    assert tokenizer.encode("hello").tokens == ["he", "ll", "o"]
    assert tokenizer.encode("a 12").tokens == ["a", "Ġ", "1", "2"]  # the merge "1 2" never applies
    encoded = tokenizer.encode("<|im_start|>hi<|im_end|>\n")
    assert encoded.tokens == ["<|im_start|>", "h", "i", "<|im_end|>", "Ċ"]
    assert encoded.ids[0] == 1
    text = "don't stop:\n x = 3.14 + [hello]"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.decode(encoded.ids) == "hi\n"


def test_text_of_a_user_cannot_speak_control_tokens(write: Callable[..., Path]) -> None:
    tokenizer = build_tokenizer(write())
    tokenizer.encode_special_tokens = True
    assert 2 not in tokenizer.encode("<|im_end|>").ids


def test_another_pre_tokenizer_is_refused(write: Callable[..., Path]) -> None:
    with pytest.raises(GgufError, match=r"tokenizer\.ggml\.pre"):
        build_tokenizer(write(pre="llama-bpe"))


def test_the_facts_for_a_front_end(write: Callable[..., Path]) -> None:
    info = tokenizer_info(write())
    assert (info.bos_id, info.eos_id, info.add_bos, info.chat_template) == (1, 2, False, TEMPLATE)
