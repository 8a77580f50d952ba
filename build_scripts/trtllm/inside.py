"""The steps of a build that need tensorrt_llm: run by its own interpreter, one step a process.

    python -m build_scripts.trtllm.inside STEP REQUEST.json

    versions   what is installed here
    revision   the commit that a branch or tag on the hub is now
    fetch      a checkpoint from the hub, at a commit
    convert    Hugging Face checkpoint -> TensorRT-LLM checkpoint, calibrated where it is FP8
    build      TensorRT-LLM checkpoint -> engine directory
    profiles   what TensorRT reads back from an engine: profiles, activation memory

A request holds `result`, the path to answer to, and what its step takes. Arguments of TensorRT-LLM come from
`recipe`, with real paths in them; here names of enums become enums and the calls are made, nothing is added.
The answer is written in one rename: `{"ok": true, ...}` or `{"ok": false, "reason": ..., "remedy": ...}`,
with exit status 0 or 1. Lines on stdout that begin with `@progress` carry a share and words; all else is log.

A process a step, because a build may change what it was given, leaves GPU memory behind and can crash whole.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PROGRESS = "@progress"
PYTHON_MIN = (3, 11)
_NEVER_KEPT = ("dry_run", "visualize_network")  # of BuildConfig: not written to an engine's config.json
_PATHS = ("input_timing_cache", "output_timing_cache")  # of BuildConfig: differ by machine, mean nothing
_DERIVED = ("paged_kv_cache", "paged_state")  # of PluginConfig: set by kv_cache_type and the model's kind
WANTED = ("*.safetensors", "*.json", "*.txt", "*.jinja", "tokenizer.model", "LICENSE*", "README.md")
_PIN = "use the environment of the exact version that the project is made for (see `plaserve build --help`)"


class StepError(Exception):
    """A step can't be done: `reason`, and the `remedy`."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}; {remedy}")
        self.reason = reason
        self.remedy = remedy


def main(arguments: list[str]) -> int:
    """Run one step; the exit status."""
    if len(arguments) != 2 or arguments[0] not in STEPS:
        print(f"usage: python -m build_scripts.trtllm.inside {'|'.join(STEPS)} REQUEST.json", file=sys.stderr)  # noqa: T201
        return 2
    step, path = arguments
    _end_with_parent()
    request = json.loads(Path(path).read_text(encoding="utf-8"))
    result = Path(request.pop("result"))
    try:
        if sys.version_info < PYTHON_MIN:
            have, need = ".".join(map(str, sys.version_info[:3])), ".".join(map(str, PYTHON_MIN))
            raise StepError(
                f"{sys.executable} is Python {have}", f"use an environment of Python {need} or later"
            )
        answer = {"ok": True, **STEPS[step](request)}
    except Exception as error:
        traceback.print_exc()
        reason, remedy = _explained(step, error)
        answer = {"ok": False, "reason": reason, "remedy": remedy}
    _write(result, answer)
    return 0 if answer["ok"] else 1


def _end_with_parent() -> None:
    """A build that is killed must not leave a step behind that writes where the next build works."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended just before
        sys.exit(1)


def tell(share: float, words: str) -> None:
    """Say how much of the step is through, 0 to 1."""
    print(f"{PROGRESS} {share:.3f} {words}", flush=True)  # noqa: T201


def _explained(step: str, error: Exception) -> tuple[str, str]:
    """Reason and remedy of any failure."""
    reason, remedy = getattr(error, "reason", None), getattr(error, "remedy", None)
    if isinstance(reason, str) and isinstance(remedy, str):
        return reason, remedy
    said = f"{type(error).__name__}: {error}"
    if isinstance(error, ImportError):
        return (
            f"{sys.executable} can't import what the step {step} needs ({said})",
            "give the interpreter of the environment that has tensorrt_llm, on a machine with its GPU",
        )
    if "out of memory" in said.lower():
        return said, "free the GPU, or build with a smaller pass_tokens_max or with FP8"
    if "no space left" in said.lower():
        return said, "free space on the disk of --out; what is done stays"
    if isinstance(error, (TypeError, AttributeError)) or "Extra inputs are not permitted" in said:
        return f"tensorrt_llm refused the call of step {step} ({said})", _PIN
    return said, "read the log of the step"


def _write(path: Path, answer: Mapping[str, Any]) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(answer, indent=2) + "\n", encoding="utf-8")
    part.replace(path)


def _versions(request: dict[str, Any]) -> dict[str, Any]:
    """Installed versions, from package metadata where that is enough: importing tensorrt_llm takes long."""
    from importlib import metadata

    def of(*names: str) -> str | None:
        for name in names:
            try:
                return metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        return None

    import tensorrt
    import tensorrt_llm

    from engines.trtllm_child.guard import check_version

    check_version(str(tensorrt_llm.__version__))
    return {
        "tensorrt_llm": str(tensorrt_llm.__version__),
        "tensorrt": str(tensorrt.__version__),
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": of("torch"),
        "cuda": of("nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime"),
    }


def _revision(request: dict[str, Any]) -> dict[str, Any]:
    from huggingface_hub import HfApi

    repo, revision = request["repo"], request["revision"]
    try:
        return {"commit": str(HfApi().model_info(repo, revision=revision).sha)}
    except Exception as error:
        raise _hub_error(repo, revision, error) from error


def _fetch(request: dict[str, Any]) -> dict[str, Any]:
    """Files of `repo` at the commit `revision` into `out`, without caches of the download."""
    import shutil

    from huggingface_hub import snapshot_download

    repo, revision, out = request["repo"], request["revision"], request["out"]
    tell(0.0, f"downloading {repo} at {revision}")
    try:
        snapshot_download(repo_id=repo, revision=revision, local_dir=out, allow_patterns=list(WANTED))
    except Exception as error:
        raise _hub_error(repo, revision, error) from error
    shutil.rmtree(Path(out) / ".cache", ignore_errors=True)
    return {}


def _hub_error(repo: str, revision: str, error: Exception) -> StepError:
    return StepError(
        f"{repo}@{revision} can't be had from the hub: {type(error).__name__}: {error}",
        "check name, revision, network and access (HF_TOKEN), or download it elsewhere and give --checkpoint",
    )


def _convert(request: dict[str, Any]) -> dict[str, Any]:
    """One TensorRT-LLM checkpoint. `arguments`: of `recipe.convert_arguments`, with paths."""
    from build_scripts.trtllm.checkpoint import check_checkpoint
    from engines.models import ModelShape

    shape = ModelShape(**request["shape"])
    directory = Path(request["checkpoint"])
    check_checkpoint(directory, request["architecture"], shape, request["context_tokens_max"])

    recipe = request["arguments"]
    tell(0.0, "importing tensorrt_llm")
    from tensorrt_llm.mapping import Mapping as ParallelMapping
    from tensorrt_llm.models.modeling_utils import QuantConfig

    quantisation = recipe["quant_config"]
    given = {**recipe["arguments"], "mapping": ParallelMapping(**recipe["mapping"])}
    if quantisation is not None:
        given["quant_config"] = QuantConfig(**_with_enums(quantisation))
    tell(0.05, "calibrating and converting" if recipe["call"] == "quantize" else "converting")
    converted = getattr(_model_class(recipe["model_class"]), recipe["call"])(**given)
    if recipe["save"] is not None:
        tell(0.7, "writing the checkpoint")
        converted.save_checkpoint(**recipe["save"])
    written = request["converted"]
    files = sorted(path.name for path in Path(written).iterdir())
    if "config.json" not in files or not any(name.endswith(".safetensors") for name in files):
        raise StepError(
            f"{recipe['call']} left no checkpoint in {written}: {', '.join(files) or 'nothing'}", _PIN
        )
    return {"files": files}


def _build(request: dict[str, Any]) -> dict[str, Any]:
    """One engine. `arguments`: of `recipe.build_arguments`, with paths.

    Returns `changed`: fields of build_config and plugin_config that came out otherwise than asked, by the
    engine's own config.json (TensorRT-LLM clips some, silently); `plan_bytes`.
    """
    recipe = request["arguments"]
    tell(0.0, "importing tensorrt_llm")
    from tensorrt_llm.builder import BuildConfig, build
    from tensorrt_llm.plugin import PluginConfig

    plugins = PluginConfig()
    for name, value in recipe["plugin_config"].items():
        if not hasattr(plugins, name):  # some releases would take any name and drop it
            raise StepError(f"this tensorrt_llm has no plugin_config.{name}", _PIN)
        setattr(plugins, name, value)
    config = BuildConfig(**_with_enums(recipe["build_config"]), plugin_config=plugins)
    tell(0.05, "loading the converted checkpoint")
    model = _model_class(recipe["model_class"]).from_checkpoint(**recipe["load"])
    tell(0.15, "building; TensorRT times kernels, which takes minutes")
    engine = build(model, config)
    if engine is None:  # what a failed build returns
        raise StepError("TensorRT built no engine", "read the log of the step for the layer that failed")
    tell(0.9, "writing the engine")
    engine.save(**recipe["save"])
    directory = Path(recipe["save"]["engine_dir"])
    _leave_out_paths(directory / "config.json")
    return {"changed": _changed(directory, recipe), "plan_bytes": plan_bytes(directory)}


def plan_bytes(directory: Path) -> int:
    """Bytes of the plans of an engine directory. Raises StepError when there is none."""
    plans = sorted(directory.glob("rank*.engine"))
    if not plans:
        raise StepError(f"no rank*.engine in {directory}", "build it again")
    return sum(path.stat().st_size for path in plans)


def _leave_out_paths(config: Path) -> None:
    """An engine's config.json names the files of its timings, whole. It goes into the bundle, and its digest
    into the bundle's id: neither may tell, or depend on, where it was built."""
    data = json.loads(config.read_text(encoding="utf-8"))
    kept = {"input_timing_cache": None, "output_timing_cache": "model.cache"}
    data["build_config"] |= {name: kept[name] for name in _PATHS if name in data["build_config"]}
    _write(config, data)


def _changed(directory: Path, recipe: Mapping[str, Any]) -> dict[str, list[Any]]:
    """(asked, written) of every field that the saved engine's config.json has another value of."""
    written = json.loads((directory / "config.json").read_text(encoding="utf-8"))["build_config"]
    asked = {
        name: value
        for name, value in recipe["build_config"].items()
        if name not in _NEVER_KEPT and name not in _PATHS
    }
    pairs = [(name, value, written.get(name)) for name, value in asked.items() if name in written]
    plugins = written.get("plugin_config") or {}
    pairs += [
        (f"plugin_config.{name}", value, plugins[name])
        for name, value in recipe["plugin_config"].items()
        # auto: it is written as the type that it stood for
        if name in plugins and name not in _DERIVED and value != "auto"
    ]
    return {name: [value, found] for name, value, found in pairs if not _same(value, found)}


def _same(asked: Any, written: Any) -> bool:
    if isinstance(asked, str) and isinstance(written, str):
        return asked.lower() == written.lower().rpartition(".")[2]  # enums are written in several ways
    return bool(asked == written)


def _profiles(request: dict[str, Any]) -> dict[str, Any]:
    """What TensorRT reads back from the plan of rank 0.

    Returns `profiles`: (min, opt, max) tokens of each, in order; `requests`: the largest batch of each;
    `activation_bytes`: what an execution context needs, shared by all profiles; `plan_bytes`.
    """
    import tensorrt
    import tensorrt_llm  # noqa: F401  # registers the plugins that the plan is made of

    directory = Path(request["engine_dir"])
    size = plan_bytes(directory)
    tell(0.1, f"reading {size / 1e9:.1f} GB back")
    runtime = tensorrt.Runtime(tensorrt.Logger(tensorrt.Logger.WARNING))
    engine = runtime.deserialize_cuda_engine((directory / "rank0.engine").read_bytes())
    if engine is None:
        raise StepError(
            f"TensorRT {tensorrt.__version__} can't read {directory / 'rank0.engine'}",
            "build and read it with one environment on one kind of GPU",
        )
    profiles, requests = [], []
    for index in range(engine.num_optimization_profiles):
        profiles.append([_first(shape) for shape in engine.get_tensor_profile_shape("input_ids", index)])
        lengths = engine.get_tensor_profile_shape("context_lengths", index)
        requests.append(_first(lengths[2]))
    return {
        "profiles": profiles,
        "requests": requests,
        "activation_bytes": int(engine.device_memory_size_v2),
        "plan_bytes": size,
    }


def _first(shape: Any) -> int:
    """Tokens of a packed [T] input, or requests of a [B] one."""
    return int(next(iter(shape)))


def _model_class(name: str) -> Any:
    from tensorrt_llm import models

    return getattr(models, name)


def _with_enums(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` with the names of enum members (`recipe.ENUMS`) turned into members."""
    from build_scripts.trtllm.recipe import ENUMS

    return {
        name: getattr(_enum(ENUMS[name]), value) if name in ENUMS and value is not None else value
        for name, value in fields.items()
    }


def _enum(name: str) -> Any:
    if name == "QuantAlgo":
        from tensorrt_llm.quantization import QuantAlgo

        return QuantAlgo
    from engines.trtllm_child.spelling import kv_cache_type

    return kv_cache_type()


STEPS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "versions": _versions,
    "revision": _revision,
    "fetch": _fetch,
    "convert": _convert,
    "build": _build,
    "profiles": _profiles,
}

if __name__ == "__main__":
    _status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # All is written, and the GPU is freed with the process. What the libraries do when an interpreter ends
    # (MPI, CUDA) can hang or crash, and a step that is through would count as failed.
    os._exit(_status)
