"""Make the tables beside this file: AIConfigurator's estimates for H200 SXM, TensorRT-LLM, bf16, one GPU.

Run in an environment of its own, with `pip install aiconfigurator==0.12.0` (Apache-2.0):

    python make_h200.py [--check TABLE.csv]

h200_off_grid.csv: the two fitted models between and beyond the points that they were fitted to.
h200_long.csv: the same two with prompts longer than any of those points.
h200_derived.csv: the models of engines/models.json that are derived by scaling. The tool does not ship their
configuration, so it gets the sizes from models.json.
--check: first hold the tool against a table in the same columns, and stop if it gives anything else.
"""

from __future__ import annotations

import csv
import itertools
import json
import sys
import tempfile
from pathlib import Path

from aiconfigurator.cli.api import cli_estimate

HERE = Path(__file__).parent
FITTED = ("Qwen/Qwen3-32B", "meta-llama/Meta-Llama-3.1-8B")
BACKEND_VERSION = "1.3.0rc20"  # of TensorRT-LLM: the newest tables that 0.12.0 holds for this GPU
COLUMNS = ("model", "batch", "new_tokens", "history", "prefill_ms")
OFF_GRID = (*itertools.product((4, 16), (96, 384), (0, 3000)), (4, 96, 12_000), (16, 384, 12_000))
LONG = ((1, 8192, 0), (1, 16_384, 0), (1, 32_768, 0), (1, 4096, 16_384), (2, 8192, 8192))
ON_GRID = ((1, 8, 0), (1, 32, 1024), (1, 128, 0), (1, 256, 4096), (1, 2048, 0), (32, 128, 0))


def estimate_ms(model: str, batch: int, new_tokens: int, history: int) -> str:
    """Milliseconds of one context pass. `model`: a name that the tool knows, or a folder with config.json."""
    result = cli_estimate(
        model,
        "h200_sxm",
        mode="static_ctx",
        backend_name="trtllm",
        backend_version=BACKEND_VERSION,
        batch_size=batch,
        isl=new_tokens + history,
        prefix=history,
        osl=1,
        tp_size=1,
    )
    if {result.raw["gemm"], result.raw["kvcache"], result.raw["fmha"]} != {"bfloat16"}:
        raise SystemExit(f"{model}: not bf16 throughout")
    return f"{result.ttft:.3f}"


def check(path: str) -> None:
    with Path(path).open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        found = estimate_ms(row["model"], *(int(row[name]) for name in COLUMNS[1:4]))
        if found != row["prefill_ms"]:
            raise SystemExit(f"not reproduced: {row}, found {found} ms")
    print(f"{len(rows)} rows of {path} reproduced")


def write(name: str, rows: list[tuple[object, ...]]) -> None:
    with (HERE / name).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])


def write_config(shape: dict[str, int], folder: Path) -> str:
    """A Qwen2 configuration of these sizes."""
    names = {
        "hidden_size": "hidden",
        "intermediate_size": "ffn",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "head_dim": "head_dim",
        "vocab_size": "vocab",
    }
    config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "torch_dtype": "bfloat16"}
    config |= {theirs: shape[ours] for theirs, ours in names.items()}
    config |= {"max_position_embeddings": 131_072, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "--check":
        check(sys.argv[2])
    for name, points in (("h200_off_grid.csv", OFF_GRID), ("h200_long.csv", LONG)):
        write(name, [(m, *p, estimate_ms(m, *p)) for m, p in itertools.product(FITTED, points)])
    models = json.loads((HERE.parents[2] / "engines" / "models.json").read_text(encoding="utf-8"))["models"]
    rows: list[tuple[object, ...]] = []
    for shape in (entry["shape"] for entry in models if "cost" not in entry):
        with tempfile.TemporaryDirectory() as folder:
            config = write_config(shape, Path(folder))
            rows += [(shape["name"], *p, estimate_ms(config, *p)) for p in (*ON_GRID, *OFF_GRID)]
    write("h200_derived.csv", rows)


if __name__ == "__main__":
    main()
