"""Turn the weights into what the engine loads: graph, tokenizer, and the facts that the manifest repeats."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from build_scripts.spec import BuildError
from engines.bundle import MODEL_XML, TOKENIZER

FACTS = "model.json"
_CODE = ("convert.py", "gguf_model.py", "graph.py")


def code_digest() -> str:
    """Hash of the code that decides what a conversion gives; the engine relies on that very graph."""
    here = Path(__file__).parent
    return hashlib.sha256(b"".join((here / name).read_bytes() for name in _CODE)).hexdigest()


def convert(gguf: Path, out: Path) -> None:
    """Write model.xml, model.bin, tokenizer.json and model.json into `out`. Raises BuildError."""
    from build_scripts.gguf_model import GgufError, build_tokenizer, load_gguf, tokenizer_info
    from build_scripts.graph import build_graph, save_graph

    try:
        config, weights = load_gguf(gguf)
        save_graph(build_graph(config, weights), out / MODEL_XML)
        build_tokenizer(gguf).save(str(out / TOKENIZER), pretty=False)
        info = tokenizer_info(gguf)
    except GgufError as error:
        raise BuildError(str(error)) from error
    facts = {
        "architecture": "llama",
        "parameters": config.parameters,
        "config": config.to_json(),
        "text": info.to_json(),
    }
    (out / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
