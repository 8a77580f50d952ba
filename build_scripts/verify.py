"""Check a fresh engine before anything is measured or published.

It must accept exactly the profiles that it was loaded with, answer a simple question in a way that only a
sound model can, refuse a pass outside its profiles, and hold no KV afterwards. All through the Engine
protocol: what is checked is what the service will use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from build_scripts.spec import BuildError, ModelSource
from engines.base import Engine
from engines.bundle import Text
from engines.profiles import Profiles
from engines.types import EngineRequest, Pass, PassItem, PassKind

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_ANSWER_TOKENS = 16
_DEFAULT_QUESTION = "Hello?"


def verify(
    engine: Engine, wanted: Profiles, source: ModelSource, tokenizer: Tokenizer, text: Text
) -> dict[str, Any]:
    """What was checked, for the record. Raises BuildError saying which check failed."""
    if engine.profiles != wanted:
        raise BuildError(f"verify: profiles read back are {engine.profiles}, asked for {wanted}")
    question = source.probe_question or _DEFAULT_QUESTION
    prompt = tokenizer.encode(chat_prompt(text.chat_template, question), add_special_tokens=False).ids
    answer = tokenizer.decode(greedy(engine, prompt, _ANSWER_TOKENS))
    if source.probe_answer not in answer:
        raise BuildError(
            f"verify: {question!r} was answered {answer!r}, which does not name {source.probe_answer!r}"
        )
    _check_refusal(engine)
    stats = engine.stats()
    if stats.requests_live or stats.kv_blocks_free + stats.kv_blocks_cached != stats.kv_blocks_total:
        raise BuildError(f"verify: the engine still holds KV after its requests ended: {stats}")
    return {"question": question, "answer": answer, "prompt_tokens": len(prompt)}


def chat_prompt(chat_template: str, question: str) -> str:
    """The prompt text of one user message."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(chat_template)
    return template.render(messages=[{"role": "user", "content": question}], add_generation_prompt=True)


def greedy(engine: Engine, prompt: list[int], tokens_max: int) -> list[int]:
    """The greedy answer, prefilled in chunks as large as the profiles allow."""
    engine.submit(EngineRequest("probe", tuple(prompt), tokens_max))
    answer: list[int] = []
    position, pass_id = 0, 0
    while True:
        prefill = position < len(prompt)
        tokens = min(len(prompt) - position, engine.profiles.tokens_max) if prefill else 1
        kind = PassKind.PREFILL if prefill else PassKind.DECODE
        item = engine.execute(Pass(pass_id, kind, (PassItem("probe", tokens, position),))).items[0]
        if item.error or item.position <= position:
            raise BuildError(f"verify: pass {pass_id} got no further than token {position}: {item.error}")
        position, pass_id = item.position, pass_id + 1
        if item.token is not None:
            answer.append(item.token)
        if item.finish is not None:
            return answer


def _check_refusal(engine: Engine) -> None:
    """A pass one token larger than the largest T-class must raise ValueError."""
    tokens = engine.profiles.tokens_max + 1
    try:
        engine.submit(EngineRequest("outside", (0,) * tokens, 1))
        engine.execute(Pass(0, PassKind.PREFILL, (PassItem("outside", tokens, 0),)))
    except ValueError:
        return
    finally:
        engine.cancel("outside")
    raise BuildError(
        f"verify: a pass of {tokens} tokens was run, outside the profiles {engine.profiles.t_classes}"
    )
