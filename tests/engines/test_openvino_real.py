"""The embedded engine with its real weights: sensible answers, and the same ones however they are driven."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("openvino")

from engines.openvino_cpu import OpenVinoCpuEngine
from engines.profiles import Profiles
from engines.types import EngineRequest, Layout, Padding, Pass, PassItem, PassKind

pytestmark = pytest.mark.cpu_engine

PROFILES = Profiles(Layout.PACKED, Padding.CLASS, (16, 32, 128), (0, 256), block_mask=True)
CLOSE = "What is the capital of France?"  # "The" leads by 0.08: bfloat16 may turn it round
CLEAR = "Name the capital of France."
QUESTIONS = (CLEAR, CLOSE, "Write one sentence about GPUs.")
ANSWER_TOKENS = 8


def answers(engine: OpenVinoCpuEngine, bundle_dir: Path, chunk: int, together: bool) -> list[str]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(bundle_dir / "tokenizer.json"))
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    found: dict[str, list[int]] = {}
    position = {}
    groups = [QUESTIONS] if together else [(question,) for question in QUESTIONS]
    for group in groups:
        for question in group:
            text = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
            ids = tokenizer.encode(text + "<|im_start|>assistant\n").ids
            engine.submit(EngineRequest(question, tuple(ids), ANSWER_TOKENS))
            found[question], position[question] = [], 0
        live = list(group)
        while live:
            waiting = [question for question in live if not found[question]]
            kind = PassKind.PREFILL if waiting else PassKind.DECODE
            size = chunk if waiting else 1
            items = tuple(PassItem(question, size, position[question]) for question in waiting or live)
            for item in engine.execute(Pass(0, kind, items)).items:
                position[item.request_id] = item.position
                found[item.request_id] += [] if item.token is None else [item.token]
                if item.finish is not None:
                    live.remove(item.request_id)
    return [tokenizer.decode(found[question]) for question in QUESTIONS]


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_answers_name_paris_and_do_not_depend_on_how_they_are_computed(
    bundle_dir: Path, precision: str
) -> None:
    engine = OpenVinoCpuEngine.load(
        bundle_dir, PROFILES, threads=1, precision=precision, kv_capacity_tokens=1024
    )
    alone = answers(engine, bundle_dir, chunk=64, together=False)
    # This run also starts from what the first one left in the prefix cache.
    driven = answers(engine, bundle_dir, chunk=13, together=True)
    engine.close()
    assert "Paris" in alone[0]
    assert "Paris" in driven[0]
    if precision == "f32":
        assert "Paris" in alone[1]
        assert driven == alone
