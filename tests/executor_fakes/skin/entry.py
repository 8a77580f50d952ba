"""What each module of a fake package holds, by its name. Called by the modules that `package` wrote."""

from __future__ import annotations

from functools import cache
from typing import Any

from .bindings import MODULE, executor_symbols
from .build import builder_symbols, model_class, tensorrt_symbols
from .classes import Surface
from .llm import CompletionOutput, RequestOutput, llm_class

_MODELS = ("QWenForCausalLM", "LLaMAForCausalLM")


@cache
def surface(stratum: str) -> Surface:
    return Surface(stratum)


def modules(stratum: str) -> list[str]:
    """Modules of the packages of a stratum, tensorrt among them where it has one."""
    found = surface(stratum)
    names = {"tensorrt_llm", "tensorrt_llm.llmapi", "tensorrt_llm.executor", *found.classes}
    for name in list(names):
        parts = name.split(".")
        names |= {".".join(parts[:count]) for count in range(1, len(parts))}
    return sorted(names | ({"tensorrt"} if found.tensorrt else set()))


@cache
def symbols(stratum: str, module: str) -> dict[str, Any]:
    """Raises KeyError for a module that the stratum does not have."""
    found = surface(stratum)
    if module == "tensorrt" and found.tensorrt is not None:
        return tensorrt_symbols(found.tensorrt)
    if module not in modules(stratum):
        raise KeyError(f"{stratum} has no module {module}")
    names = {**found.classes.get(module, {}), **found.exported(module)}
    if module == MODULE:
        names = executor_symbols(found)
    elif module == "tensorrt_llm.builder":
        names = builder_symbols(found)
    elif module == "tensorrt_llm.models":
        names = {name: model_class(found, name) for name in _MODELS}
    elif module == "tensorrt_llm.executor.result":
        names = {"CompletionOutput": CompletionOutput, "GenerationResult": RequestOutput}
    elif module == "tensorrt_llm":
        names["__version__"] = found.version
        if stratum != "S0":
            names["LLM"] = llm_class(found)
    return names
