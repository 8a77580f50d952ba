"""Read a Llama model out of a GGUF file: sizes, float32 weights, tokenizer, chat template.

GGUF is llama.cpp's container. Its tensors keep llama.cpp's names (`blk.0.attn_q.weight`, ...), which this
project keeps too, so there is no second naming to learn. Two things are not as in the original checkpoint:

- Tensors are quantised by blocks (here Q4_1, the embedding Q8_0). They are expanded to float32; the values
  of the file are the model, nothing is quantised again.
- llama.cpp rotates neighbouring pairs in RoPE where Llama rotates halves, so its converter permuted the rows
  of q and k: row (half, i) of a head went to row (i, half). `load_gguf` puts them back, and everything after
  it uses rotate-half.

The vocabulary of a "gpt2" tokenizer in GGUF is a plain byte-level BPE; only the pre-tokenizer is named, not
written out. `smollm` splits digits one by one and then applies the regular expression of GPT-2.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers import Tokenizer

Weights = dict[str, npt.NDArray[np.float32]]

_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL: <|im_start|> and the like


class GgufError(ValueError):
    """The file is not a model that this builder can read; the message names the field."""


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes of a Llama model, and what the engine must know beside them. Tensors are (out, in)."""

    layers: int
    hidden: int
    ff: int  # inner width of the gated MLP
    heads: int  # query heads
    kv_heads: int
    head_dim: int
    vocab: int
    context_tokens: int
    rope_base: float
    norm_eps: float
    eos_id: int | None = None  # the token that ends an answer; None: only the length ends it

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "ff", "heads", "kv_heads", "head_dim", "vocab", "context_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"model config: {name} must be at least 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model config: heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})"
            )
        if self.eos_id is not None and not 0 <= self.eos_id < self.vocab:
            raise ValueError(f"model config: eos_id {self.eos_id} is outside the vocabulary of {self.vocab}")
        if self.head_dim % 2:
            raise ValueError(f"model config: head_dim must be even for RoPE, got {self.head_dim}")

    @property
    def parameters(self) -> int:
        """Number of weights, the embedding counted once (it is tied to the LM head)."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.ff + 2 * self.hidden
        return self.layers * layer + self.vocab * self.hidden + self.hidden

    @property
    def kv_values_per_token(self) -> int:
        """K and V of all layers, in values; times 2 bytes where they are kept as f16."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """What a front end needs beside `tokenizer.json`: the chat template (Jinja) and the special ids."""

    chat_template: str
    bos_id: int
    eos_id: int
    add_bos: bool  # the template writes <|im_start|> itself, so this model says False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def load_gguf(path: Path) -> tuple[LlamaConfig, Weights]:
    """Sizes and weights of the Llama model in `path`. Raises GgufError naming what does not fit."""
    from gguf.quants import dequantize

    reader = _open(path)
    config = _config(reader)
    weights: Weights = {}
    for tensor in reader.tensors:
        values = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if tensor.name.endswith("attn_q.weight"):
            values = _unpermute(values, config.heads)
        elif tensor.name.endswith("attn_k.weight"):
            values = _unpermute(values, config.kv_heads)
        weights[tensor.name] = values
    check_weights(config, weights)
    return config, weights


def weight_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the model. `output.weight` is absent: the LM head is tied."""
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layer = {
        "attn_norm": (config.hidden,),
        "attn_q": (q, config.hidden),
        "attn_k": (kv, config.hidden),
        "attn_v": (kv, config.hidden),
        "attn_output": (config.hidden, q),
        "ffn_norm": (config.hidden,),
        "ffn_gate": (config.ff, config.hidden),
        "ffn_up": (config.ff, config.hidden),
        "ffn_down": (config.hidden, config.ff),
    }
    shapes = {"token_embd.weight": (config.vocab, config.hidden), "output_norm.weight": (config.hidden,)}
    for index in range(config.layers):
        shapes.update({f"blk.{index}.{name}.weight": shape for name, shape in layer.items()})
    return shapes


def check_weights(config: LlamaConfig, weights: Weights) -> None:
    """Raise GgufError unless `weights` are exactly the tensors of `config`, all finite."""
    expected = weight_shapes(config)
    for name in sorted(expected.keys() - weights.keys()):
        raise GgufError(f"tensor {name} is missing: is this a complete Llama GGUF?")
    for name in sorted(weights.keys() - expected.keys()):
        raise GgufError(f"tensor {name} is not known: only Llama models with a tied LM head are supported")
    for name, shape in expected.items():
        if weights[name].shape != shape:
            raise GgufError(f"tensor {name} has shape {weights[name].shape}, expected {shape}")
        if not np.isfinite(weights[name]).all():
            raise GgufError(f"tensor {name} holds values that are not finite: fetch the file again")


def build_tokenizer(path: Path) -> Tokenizer:
    """The byte-level BPE tokenizer of the GGUF. Control tokens are special: one id, left out of decoded text.

    The vocabulary has no token for 21 bytes (some control characters, and bytes that begin no assigned
    character in UTF-8): they are left out, as by the original tokenizer. Control tokens are also found inside
    the text that is encoded; text of a user must therefore be encoded with
    `tokenizer.encode_special_tokens = True`, which takes them as plain characters.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    reader = _open(path)
    for key, supported in (("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.pre", "smollm")):
        if (found := _field(reader, key)) != supported:
            raise GgufError(f"{key} is {found!r}; only {supported!r} is supported")
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    kinds: list[int] = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def tokenizer_info(path: Path) -> TokenizerInfo:
    reader = _open(path)
    return TokenizerInfo(
        chat_template=_field(reader, "tokenizer.chat_template"),
        bos_id=_field(reader, "tokenizer.ggml.bos_token_id"),
        eos_id=_field(reader, "tokenizer.ggml.eos_token_id"),
        add_bos=_field(reader, "tokenizer.ggml.add_bos_token"),
    )


def _open(path: Path) -> GGUFReader:
    from gguf import GGUFReader

    if not path.is_file():
        raise GgufError(f"{path}: no such file")
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, OverflowError, UnicodeDecodeError) as error:
        raise GgufError(f"{path} is not a readable GGUF file ({error}): fetch it again") from error


def _field(reader: GGUFReader, key: str, default: Any = None) -> Any:
    """The value of `key`. Without a default, raises GgufError where the file lacks it."""
    field = reader.fields.get(key)
    if field is not None:
        return field.contents()
    if default is None:
        raise GgufError(f"{key} is missing in the GGUF file")
    return default


def _config(reader: GGUFReader) -> LlamaConfig:
    if (found := _field(reader, "general.architecture")) != "llama":
        raise GgufError(f"general.architecture is {found!r}; only 'llama' is supported")
    if (
        scaling := next((key for key in reader.fields if key.startswith("llama.rope.scaling")), None)
    ) is not None:
        raise GgufError(f"{scaling} is set; RoPE scaling is not supported")
    heads = _field(reader, "llama.attention.head_count")
    hidden = _field(reader, "llama.embedding_length")
    return LlamaConfig(
        layers=_field(reader, "llama.block_count"),
        hidden=hidden,
        ff=_field(reader, "llama.feed_forward_length"),
        heads=heads,
        kv_heads=_field(reader, "llama.attention.head_count_kv"),
        head_dim=_field(reader, "llama.attention.key_length", hidden // heads),
        vocab=_field(reader, "llama.vocab_size"),
        context_tokens=_field(reader, "llama.context_length"),
        rope_base=_field(reader, "llama.rope.freq_base"),
        norm_eps=_field(reader, "llama.attention.layer_norm_rms_epsilon"),
        eos_id=_field(reader, "tokenizer.ggml.eos_token_id"),
    )


def _unpermute(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of each head from llama.cpp's (pair, half) order back to (half, pair)."""
    rows, columns = weight.shape
    pairs = rows // heads // 2
    return np.ascontiguousarray(
        weight.reshape(heads, pairs, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )
