"""The simulator against an outside one: the mocker of NVIDIA Dynamo, with the same cost and arrivals.

    python -m tests.sim.dynamo_check --python VENV/bin/python [--requests N]

VENV is an environment of its own with `ai-dynamo-runtime` 1.6.1 (the compiled core; nothing else is needed).
Its offline replay says when every request of a trace file got its first token, and `fcfs` runs the same
requests.

The mocker takes the time of a prefill pass from a table over the new tokens of the pass, T, interpolated
between its points; here there is one for every T. So the cost depends on T alone: that of the 32B model
without its terms in attention and history, for which a table over T has no place.

Equal: arrivals, lengths, the cost of a pass of T tokens, 2,048 tokens and 256 requests a pass, KV tokens, no
prefix cache, answers of one token (so no decode); a prompt is cut to fill a pass and goes on first.
Not equal: the mocker's T is requests x (mean length - mean history) with both means cut to whole tokens, so
its passes may be priced for a few tokens more or less than they hold. And its schedulers are its own models
of vLLM, SGLang and TensorRT-LLM; that of SGLang counts whole KV blocks against the budget.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.cost_model import CostModel
from engines.models import load_model
from engines.simulated_settings import Setting, engine_setting
from service.core.pricing import Pricer
from service.core.types import InstanceSpec, Request
from service.policies import make_scheduler
from service.sim.cluster import SimInstance
from service.sim.exhibits.runs import UNBOUNDED
from service.sim.kernel import run
from service.sim.sources import Targets, WorkloadSpec, make_source, workload_stats

Floats = NDArray[np.float64]

MIX = WorkloadSpec((("lmsys_chat_1m", 0.9), ("rag", 0.1)), prompt_tokens_max=16_384)
LOADS = (0.6, 0.9, 1.1)  # rate x seconds of the mean request alone; passes hold several, so 1 is no limit
BUDGET_TOKENS, BLOCK_TOKENS, TRACE_BLOCK_TOKENS = 2048, 32, 512
SCHEDULERS: Mapping[str, Mapping[str, Any]] = {
    "vllm": {},
    "trtllm": {},
    "sglang": {"sglang": {"chunked_prefill_size": BUDGET_TOKENS, "max_prefill_tokens": BUDGET_TOKENS}},
}
TOLERANCE = 0.03  # of a quantile; 10 % was asked for, and half the token budget would pass that

# Runs in the other environment, its settings the first argument. Writes [arrival ms, TTFT ms] per request.
MOCKER = """
import json, sys
from importlib import metadata
from dynamo import _core
asked = json.loads(sys.argv[1])
config = _core._normalize_mocker_config({"engine": asked["engine"]})
result = _core.run_mocker_trace_replay(
    [asked["trace"]],
    extra_engine_args=config,
    capture_per_request=True,
    trace_block_size=asked["trace_block_size"],
)
rows = [[row["arrival_time_ms"], row["ttft_ms"]] for row in result.per_request]
with open(asked["out"], "w") as out:
    json.dump({"version": metadata.version("ai-dynamo-runtime"), "rows": rows}, out)
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One load under one scheduler of the mocker. Seconds.

    busy_ratio: of the simulated instance. difference_*: mocker over simulator, less one.
    same_ratio: share of the requests whose two TTFTs are within 1 ms.
    """

    scheduler: str
    load: float
    rate_per_s: float
    busy_ratio: float
    requests: int
    ours_p50_s: float
    mocker_p50_s: float
    difference_p50: float
    ours_p90_s: float
    mocker_p90_s: float
    difference_p90: float
    same_ratio: float


def check(
    python: Path, requests: int, loads: Sequence[float] = LOADS, seed: int = 1
) -> tuple[str, list[Row]]:
    """(version of the mocker, a row for each scheduler and load).

    Raises RuntimeError, with what it said, where the mocker does not run.
    """
    setting = setting_of_tokens()
    pricer = Pricer(setting[2], setting[1])
    alone_s = workload_stats(MIX, pricer.request_s).alone_s_mean
    version, rows = "", []
    for load in loads:
        rate_per_s = load / alone_s
        source = make_source(
            MIX, rate_per_s=rate_per_s, seed=seed, targets=Targets(pricer.request_s), requests_max=requests
        )
        arrived: list[Request] = []
        while (arrival := source.next_arrival()) is not None:
            arrived.append(arrival.request)
        ours, busy_ratio = simulated(arrived, setting)
        for scheduler in SCHEDULERS:
            version, theirs = mocked(python, arrived, setting, scheduler)
            figures = _figures(ours, theirs)
            rows.append(Row(scheduler, load, rate_per_s, busy_ratio, len(arrived), *figures))
    return version, sorted(rows, key=lambda row: list(SCHEDULERS).index(row.scheduler))


def setting_of_tokens() -> Setting:
    """The packed 32B engine with a cost that depends on the new tokens of a pass alone."""
    model = load_model("qwen3-32b")
    cost = replace(model.cost, alpha=0.0, gamma_r=0.0, origin="of T alone, for the mocker")
    return engine_setting(replace(model, cost=cost), "packed", block_tokens=BLOCK_TOKENS)


def simulated(arrived: Sequence[Request], setting: Setting) -> tuple[Floats, float]:
    """(TTFT of each request in seconds, share of the time that the instance was busy)."""
    scheduler = make_scheduler(f"fcfs:budget_tokens={BUDGET_TOKENS}", UNBOUNDED)
    planned = [(request.arrival_s, request) for request in arrived]
    result = run(scheduler, [SimInstance(InstanceSpec("i0", *setting))], planned, keep_log=False)
    figures = result.instances[0]
    return np.array([record.ttft_s for record in result.records.values()]), figures.busy_s / figures.up_s


def mocked(python: Path, arrived: Sequence[Request], setting: Setting, scheduler: str) -> tuple[str, Floats]:
    """(version, TTFT of each request in seconds) of the mocker."""
    capabilities, _, cost = setting
    with tempfile.TemporaryDirectory() as folder:
        trace, profile, out = (Path(folder) / name for name in ("trace.jsonl", "profile.npz", "out.json"))
        trace.write_text("".join(json.dumps(line) + "\n" for line in _trace(arrived)), encoding="utf-8")
        np.savez(profile, **_profile(cost))
        timing = {"type": "external", "provider": "dynamo_profile", "config": {"path": str(profile)}}
        asked = {
            "trace": str(trace),
            "out": str(out),
            "trace_block_size": TRACE_BLOCK_TOKENS,
            "engine": {
                "backend": scheduler,
                "timing_model": timing,
                "max_num_batched_tokens": BUDGET_TOKENS,
                "max_num_seqs": capabilities.requests_max,
                "num_gpu_blocks": capabilities.kv_blocks_total,
                "block_size": BLOCK_TOKENS,
                "enable_prefix_caching": False,
                **SCHEDULERS[scheduler],
            },
        }
        command = [str(python), "-c", MOCKER, json.dumps(asked)]
        ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
        if ran.returncode:
            raise RuntimeError(f"the mocker ended with {ran.returncode}\n{ran.stderr[-2000:]}")
        answer: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    rows = sorted(answer["rows"])  # by arrival: no two come at one instant
    if len(rows) != len(arrived):
        raise RuntimeError(f"the mocker answered {len(rows)} of {len(arrived)} requests")
    return str(answer["version"]), np.array([ttft_ms for _, ttft_ms in rows]) / 1e3


def _trace(arrived: Sequence[Request]) -> list[dict[str, Any]]:
    """Rows as Mooncake's traces have them, every block of its own."""
    rows, block = [], 0
    for request in arrived:
        blocks = -(-request.prompt_tokens // TRACE_BLOCK_TOKENS)
        rows.append(
            {
                "timestamp": request.arrival_s * 1e3,
                "input_length": request.prompt_tokens,
                "output_length": request.max_new_tokens,
                "hash_ids": list(range(block, block + blocks)),
            }
        )
        block += blocks
    return rows


def _profile(cost: CostModel) -> dict[str, Any]:
    """The table over T that the mocker interpolates. Decode, which nothing here does, takes a millisecond."""
    tokens = range(BUDGET_TOKENS + 1)
    return {
        "prefill_isl": np.array(tokens, dtype=float),
        "prefill_ttft_ms": np.array([cost.request_s(count) * 1e3 for count in tokens]),
        "decode_active_kv_tokens": np.array([0.0, 1e7]),
        "decode_context_length": np.array([0.0, 1e6]),
        "decode_itl": np.ones((2, 2)),
    }


def _figures(ours: Floats, theirs: Floats) -> tuple[float, ...]:
    """The fields of a row from `ours_p50_s` on."""
    found: list[float] = []
    for share in (0.5, 0.9):
        pair = float(np.quantile(ours, share)), float(np.quantile(theirs, share))
        found += [*pair, pair[1] / pair[0] - 1.0]
    return *found, float(np.mean(np.abs(ours - theirs) < 1e-3))


def worst(rows: Sequence[Row]) -> float:
    """The largest difference of a quantile."""
    return max(abs(d) for row in rows for d in (row.difference_p50, row.difference_p90))


def table(version: str, rows: Sequence[Row]) -> str:
    lines = [
        f"ai-dynamo-runtime {version}, {rows[0].requests} requests a load; TTFT of all requests, ms",
        "",
        "| mocker as | load | requests/s | busy | P50 ours | mocker | | P90 ours | mocker | | within 1 ms |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        p50 = f"{row.ours_p50_s * 1e3:.1f} | {row.mocker_p50_s * 1e3:.1f} | {row.difference_p50:+.1%}"
        p90 = f"{row.ours_p90_s * 1e3:.1f} | {row.mocker_p90_s * 1e3:.1f} | {row.difference_p90:+.1%}"
        head = f"{row.scheduler} | {row.load} | {row.rate_per_s:.1f} | {row.busy_ratio:.0%}"
        lines.append(f"| {head} | {p50} | {p90} | {row.same_ratio:.0%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", type=Path, required=True, help="Python of the mocker's environment")
    parser.add_argument("--requests", type=int, default=20_000, help="of each load")
    given = parser.parse_args()
    version, rows = check(given.python, given.requests)
    print(table(version, rows))
    print(json.dumps({"version": version, "rows": [asdict(row) for row in rows]}))
    if worst(rows) > TOLERANCE:
        sys.exit(f"a quantile differs by {worst(rows):.1%}, more than {TOLERANCE:.0%}")


if __name__ == "__main__":
    main()
