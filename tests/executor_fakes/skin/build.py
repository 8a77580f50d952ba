"""`tensorrt_llm.builder`, `.models` and `tensorrt`: engines that hold their profiles and nothing else.

A plan is a line of JSON: the TensorRT version that wrote it and the shapes of each profile. Everything that
the real builder changes on its own is changed here too, so that a recipe that counts on it is seen.
"""

from __future__ import annotations

import copy
import enum
import json
from pathlib import Path
from typing import Any

from .classes import Surface, check_call
from .profiles import clipped_tokens, token_ranges

_MAGIC = b"fake TensorRT plan\n"
_NOT_KEPT = ("dry_run", "visualize_network")
_WEIGHTS = (2).to_bytes(8, "little") + b"{}"  # a safetensors file without tensors
_HF_NAMES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)


def plain(value: Any) -> Any:
    """As config.json has it."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return {key: plain(item) for key, item in vars(value).items()}


def model_class(surface: Surface, name: str) -> type:
    entry = surface.entry("tensorrt_llm.models", name)["methods"]
    base = surface.entry("tensorrt_llm.models.modeling_utils", "PretrainedModel")["methods"]

    def check(method: str, args: tuple[Any, ...], given: dict[str, Any]) -> dict[str, Any]:
        return check_call(f"{name}.{method}()", {**base, **entry}[method], args, given, {})

    class Model:
        def __init__(self, config: dict[str, Any]) -> None:
            self.config = config
            self.used = False

        @classmethod
        def from_hugging_face(cls, *args: Any, **given: Any) -> Any:
            values = check("from_hugging_face", args, given)
            return cls(_pretrained(name, values["hf_model_or_dir"], values))

        @classmethod
        def quantize(cls, *args: Any, **given: Any) -> None:
            values = check("quantize", args, given)
            cls(_pretrained(name, values["hf_model_dir"], values)).save_checkpoint(values["output_dir"])

        @classmethod
        def from_checkpoint(cls, *args: Any, **given: Any) -> Any:
            values = check("from_checkpoint", args, given)
            path = Path(values["ckpt_dir"])
            if not (path / f"rank{values['rank'] or 0}.safetensors").exists():
                raise FileNotFoundError(f"no weights in {path}")
            return cls(json.loads((path / "config.json").read_text(encoding="utf-8")))

        def save_checkpoint(self, *args: Any, **given: Any) -> None:
            values = check("save_checkpoint", args, given)
            path = Path(values["output_dir"])
            path.mkdir(parents=True, exist_ok=True)
            if values["save_config"]:
                (path / "config.json").write_text(json.dumps(self.config, indent=4), encoding="utf-8")
            (path / "rank0.safetensors").write_bytes(_WEIGHTS)

    Model.__name__ = Model.__qualname__ = name
    return Model


def _pretrained(name: str, directory: Any, values: dict[str, Any]) -> dict[str, Any]:
    path = Path(directory) / "config.json"
    hf = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    dtype = values["dtype"] if values["dtype"] != "auto" else hf.get("torch_dtype", "float16")
    quantisation = plain(values["quant_config"]) if values["quant_config"] is not None else None
    return {
        "architecture": hf.get("architectures", [name])[0],  # as MODEL_MAP has it: Qwen2ForCausalLM
        "dtype": dtype,
        **{key: hf[key] for key in _HF_NAMES if key in hf},
        "mapping": plain(values["mapping"]) if values["mapping"] is not None else {"world_size": 1},
        "quantization": quantisation or {"quant_algo": None, "kv_cache_quant_algo": None},
    }


def builder_symbols(surface: Surface) -> dict[str, Any]:
    names = dict(surface.classes["tensorrt_llm.builder"])
    plugin_class = surface.classes["tensorrt_llm.plugin"]["PluginConfig"]
    signatures = {
        n: surface.entry("tensorrt_llm.builder", n)["params"] for n in ("Engine", "EngineConfig", "build")
    }

    class EngineConfig:
        def __init__(self, *args: Any, **given: Any) -> None:
            values = check_call("EngineConfig.__init__()", signatures["EngineConfig"], args, given, {})
            self.pretrained_config = values["pretrained_config"]
            self.build_config = values["build_config"]
            self.version = values["version"]

    class Engine:
        def __init__(self, *args: Any, **given: Any) -> None:
            values = check_call("Engine.__init__()", signatures["Engine"], args, given, {})
            self.config, self.engine = values["config"], values["engine"]

        def save(self, engine_dir: str) -> None:
            path = Path(engine_dir)
            path.mkdir(parents=True, exist_ok=True)
            build_config = plain(self.config.build_config)
            for name in _NOT_KEPT:
                build_config.pop(name, None)
            config = {
                "version": self.config.version,
                "pretrained_config": plain(self.config.pretrained_config),
                "build_config": build_config,
            }
            (path / "config.json").write_text(json.dumps(config, indent=4), encoding="utf-8")
            (path / "rank0.engine").write_bytes(self.engine)

    def build(*args: Any, **given: Any) -> Any:
        values = check_call("build()", signatures["build"], args, given, {})
        model, config = values["model"], copy.deepcopy(values["build_config"])
        if model.used:
            raise RuntimeError("this model was changed by an earlier build: load a fresh one")
        model.used = True
        if config.plugin_config is None:
            config.plugin_config = plugin_class()
        _settle(config, model.config, surface)
        if config.output_timing_cache:
            Path(config.output_timing_cache).write_bytes(b"fake timings")
        plan = make_plan(config, surface.tensorrt or "")
        return Engine(EngineConfig(model.config, config, surface.version), plan)

    return {**names, "Engine": Engine, "EngineConfig": EngineConfig, "build": build}


def _settle(config: Any, pretrained: dict[str, Any], surface: Surface) -> None:
    """What the real builder decides or changes."""
    plugins = config.plugin_config
    plugins.dtype = pretrained["dtype"]
    for name, value in vars(plugins).items():
        if value == "auto":
            setattr(plugins, name, pretrained["dtype"])
    if config.kv_cache_type is None:
        config.kv_cache_type = "PAGED"
    # As `BuildConfig.update_kv_cache_type` (builder.py at 008b2b8d) does for models without a state.
    plugins.paged_kv_cache = getattr(config.kv_cache_type, "name", config.kv_cache_type) == "PAGED"
    plugins.paged_state = False
    if config.max_seq_len is None:
        config.max_seq_len = pretrained.get("max_position_embeddings", 2048)
    config.max_num_tokens = clipped_tokens(
        config.max_num_tokens, config.max_seq_len, config.max_batch_size, plugins.tokens_per_block
    )


def make_plan(config: Any, tensorrt: str) -> bytes:
    ranges = token_ranges(
        config.max_num_tokens,
        config.max_batch_size,
        config.opt_num_tokens,
        config.plugin_config.multiple_profiles,
    )
    if config.force_num_profiles:
        ranges = ranges[: config.force_num_profiles]
    batch = (1, config.opt_batch_size, config.max_batch_size)
    shapes = [
        {"input_ids": [[size] for size in tokens], "context_lengths": [[size] for size in batch]}
        for tokens in ranges
    ]
    return _MAGIC + json.dumps({"tensorrt": tensorrt, "profiles": shapes}).encode()


class TrtEngine:
    """ICudaEngine."""

    def __init__(self, profiles: list[dict[str, list[list[int]]]]) -> None:
        self._profiles = profiles
        self.num_optimization_profiles = len(profiles)
        most = max(profile["input_ids"][2][0] for profile in profiles)
        self.device_memory_size_v2 = most * 1024

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(shape) for shape in self._profiles[profile_index][name])


def tensorrt_symbols(version: str) -> dict[str, Any]:
    class Logger:
        INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)

        def __init__(self, min_severity: int = 2) -> None:
            self.min_severity = min_severity

    class Runtime:
        def __init__(self, logger: Any) -> None:
            if not isinstance(logger, Logger):
                raise TypeError("Runtime(): a Logger is wanted")

        def deserialize_cuda_engine(self, serialized_engine: bytes) -> TrtEngine | None:
            """None for what this version can't read, as the real one."""
            if not serialized_engine.startswith(_MAGIC):
                return None
            plan = json.loads(serialized_engine[len(_MAGIC) :])
            return TrtEngine(plan["profiles"]) if plan["tensorrt"] == version else None

    return {"__version__": version, "Logger": Logger, "Runtime": Runtime}
