"""Make `h200_off_grid.csv`: estimates of AIConfigurator between and beyond the points of the fitted table.

Run in an environment of its own, with `pip install aiconfigurator==0.12.0` (Apache-2.0):

    python make_off_grid.py [--check TABLE.csv] > h200_off_grid.csv

--check: first hold the tool against a table in the same columns, and stop if it gives anything else.
"""

from __future__ import annotations

import csv
import itertools
import sys

from aiconfigurator.cli.api import cli_estimate

MODELS = ("Qwen/Qwen3-32B", "meta-llama/Meta-Llama-3.1-8B")
BACKEND_VERSION = "1.3.0rc20"  # of TensorRT-LLM: the newest tables that 0.12.0 holds for this GPU
COLUMNS = ("model", "batch", "new_tokens", "history", "prefill_ms")
POINTS = (*itertools.product((4, 16), (96, 384), (0, 3000)), (4, 96, 12_000), (16, 384, 12_000))


def estimate_ms(model: str, batch: int, new_tokens: int, history: int) -> float:
    """Milliseconds of one context pass, bf16, one GPU."""
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
    return result.ttft


def check(path: str) -> None:
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        found = estimate_ms(row["model"], *(int(row[name]) for name in COLUMNS[1:4]))
        if f"{found:.3f}" != row["prefill_ms"]:
            raise SystemExit(f"not reproduced: {row}, found {found:.3f} ms")
    print(f"{len(rows)} rows of {path} reproduced", file=sys.stderr)


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "--check":
        check(sys.argv[2])
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(COLUMNS)
    for model, (batch, new_tokens, history) in itertools.product(MODELS, POINTS):
        estimate = estimate_ms(model, batch, new_tokens, history)
        writer.writerow((model, batch, new_tokens, history, f"{estimate:.3f}"))


if __name__ == "__main__":
    main()
