"""A random Llama of two layers as a GGUF file, with a tokenizer and chat template: builds in seconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np

from build_scripts.spec import BuildSpec, ModelSource
from engines.bundle import sha256_file
from engines.profiles import Profiles
from engines.types import Layout, Padding
from tests.engines import oracle

_SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>"]
_TOKENS = [*_SPECIAL, *(chr(code) for code in range(33, 127)), "Ġ", "Ċ", "he"]
_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}<|im_start|>"

CONFIG = replace(oracle.TINY, vocab=len(_TOKENS), eos_id=2)
PROFILES = Profiles(Layout.PACKED, Padding.CLASS, (1, 4, 16, 64), (0, 96, 192), block_mask=True)


def write_gguf(path: Path, seed: int = 0) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
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
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(_TOKENS)
    writer.add_token_types([3] * len(_SPECIAL) + [1] * (len(_TOKENS) - len(_SPECIAL)))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(_TEMPLATE)
    for name, values in oracle.random_model(CONFIG, seed).items():
        writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def spec(directory: Path) -> BuildSpec:
    """A build of the tiny model below `directory`, a second or two in all."""
    weights = directory / "tiny.gguf"
    if not weights.exists():
        write_gguf(weights)
    source = ModelSource(
        name="tiny",
        package="none",
        version="0",
        file="tiny.gguf",
        size_bytes=weights.stat().st_size,
        sha256=sha256_file(weights),
        licence="Apache-2.0",
        parameters=CONFIG.parameters,
        kv_values_per_token=CONFIG.kv_values_per_token,
        probe_question="hello?",
    )
    return BuildSpec(
        source=source,
        out=directory / "bundles",
        profiles=PROFILES,
        threads=1,
        precision="f32",
        calibration_s=0.2,
        gguf=weights,
    )
