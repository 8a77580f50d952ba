"""The exact arguments of every TensorRT-LLM call of a build, as plain data that JSON can hold.

Nothing is left to a default of TensorRT-LLM: three of them moved between releases. What is named here exists
in every stratum of the API that 1.2.1 may have (S1, S2 and S3); `NOT_NAMED` says what is left out, and why.
`inside` turns enum names into enums and makes the calls; nothing here imports tensorrt_llm.

Paths stand as words in braces, which `fill` replaces, so that a recipe, and with it a content key, is the
same on every machine:
  {checkpoint}       directory of the Hugging Face checkpoint
  {converted}        directory of the TensorRT-LLM checkpoint that `convert` writes and every build reads
  {engine}           directory that the engine is saved to
  {timing_cache_in}  tactic timings of an earlier build; None where there are none yet
  {timing_cache_out} where the timings are left; shipped with the bundle
  {calibration_set}  directory with train.txt, one text a line, for FP8
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from build_scripts.spec import BuildError
from build_scripts.trtllm.spec import EngineName, Quantisation, TrtLlmSpec
from engines.executor.types import ExecutorRole
from engines.trtllm_child.config import ChildConfig, Driver
from engines.trtllm_profiles import limits, stock_classes

MODEL_CLASSES = {"qwen2": "QWenForCausalLM", "llama": "LLaMAForCausalLM"}  # in tensorrt_llm.models

# Strings here that a call takes as a member of an enum of this name.
ENUMS = {"kv_cache_type": "KVCacheType", "quant_algo": "QuantAlgo", "kv_cache_quant_algo": "QuantAlgo"}

NOT_NAMED = {
    "auto_parallel_config": "gone in the 1.2 line",
    "lora_config": "an object of its own; adapters are not built in",
    "speculative_decoding_mode": "an enum that moved; its default is no speculation, as max_draft_len 0 says",
    "dora_plugin": "not in every stratum; off by default",
    "gemm_allreduce_plugin": "not in every stratum; off by default",
    "norm_quant_fusion": "not in every stratum; off by default",
    "fuse_fp4_quant": "not in every stratum; off by default",
}

# Fields of BuildConfig that trtllm-build has no flag for: a command line takes their defaults.
WITHOUT_FLAG = ("opt_batch_size", "strongly_typed", "force_num_profiles", "use_refit", "use_mrope")

_OFF = (  # dtype fields of PluginConfig that stay off
    "gemm_swiglu_plugin",
    "fp8_rowwise_gemm_plugin",
    "qserve_gemm_plugin",
    "identity_plugin",
    "lora_plugin",
    "weight_only_groupwise_quant_matmul_plugin",
    "weight_only_quant_matmul_plugin",
    "smooth_quant_gemm_plugin",
    "layernorm_quantization_plugin",
    "rmsnorm_quantization_plugin",
    "low_latency_gemm_plugin",
    "low_latency_gemm_swiglu_plugin",
)


def convert_arguments(spec: TrtLlmSpec) -> dict[str, Any]:
    """How the checkpoint becomes a TensorRT-LLM checkpoint.

    model_class: in tensorrt_llm.models. call: its class method. arguments: of that call. mapping: of
    tensorrt_llm.Mapping. quant_config: of QuantConfig; None: none. save: arguments of save_checkpoint; None
    where the call writes the checkpoint itself, as `quantize` does.
    """
    common: dict[str, Any] = {
        "model_class": MODEL_CLASSES[spec.architecture],
        "mapping": {"world_size": spec.tp * spec.pp, "rank": 0, "tp_size": spec.tp, "pp_size": spec.pp},
    }
    if spec.quantisation is Quantisation.NONE:
        return {
            **common,
            "call": "from_hugging_face",
            "arguments": {"hf_model_or_dir": "{checkpoint}", "dtype": spec.dtype},
            "quant_config": None,
            "save": {"output_dir": "{converted}", "save_config": True},
        }
    return {
        **common,
        "call": "quantize",
        "arguments": {
            "hf_model_dir": "{checkpoint}",
            "output_dir": "{converted}",
            "dtype": spec.dtype,
            # A directory is read as a data set with a split `train` and a column `text`
            # (quantize_by_modelopt.py at 042c510d; not read at 1.2.1's tag).
            "calib_dataset": "cnn_dailymail" if spec.calibration_text is None else "{calibration_set}",
            "calib_batches": 512,
            "calib_batch_size": 1,
            "calib_max_seq_length": 512,
            "random_seed": 1234,
            "tokenizer_max_seq_length": 2048,
        },
        "quant_config": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
        "save": None,
    }


def build_arguments(spec: TrtLlmSpec, engine: EngineName, gemm_plugin: bool) -> dict[str, Any]:
    """How one engine is built from the converted checkpoint.

    model_class, load: the class and the arguments of its from_checkpoint; a fresh model is loaded for every
    build, since a build may change it. build_config, plugin_config: fields of BuildConfig and of the
    PluginConfig in it. save: of Engine.save. Raises BuildError for a pass that can't be built.
    """
    several = engine is EngineName.SP
    tokens = pass_tokens(spec, engine)
    build_config: dict[str, Any] = {
        # Ignored with packed input and context FMHA; a request must leave room for one token.
        "max_input_len": spec.context_tokens_max - 1,
        "max_seq_len": spec.context_tokens_max,
        "opt_batch_size": spec.requests_opt,
        "max_batch_size": spec.requests_max,
        "max_beam_width": 1,
        "max_num_tokens": tokens,
        "opt_num_tokens": None if several else min(spec.lp_tokens_opt, tokens),  # ignored with several
        "max_prompt_embedding_table_size": 0,
        "max_encoder_input_len": 1024,
        "kv_cache_type": "PAGED",
        # Either of them would turn block reuse off or keep logits of every prompt token.
        "gather_context_logits": False,
        "gather_generation_logits": False,
        "strongly_typed": True,
        "force_num_profiles": None,
        "profiling_verbosity": "layer_names_only",
        "enable_debug_output": False,
        "max_draft_len": 0,
        "use_refit": False,
        "use_strip_plan": False,
        "weight_sparsity": False,
        "weight_streaming": False,
        "input_timing_cache": "{timing_cache_in}",
        "output_timing_cache": "{timing_cache_out}",
        "dry_run": False,
        "visualize_network": None,
        "monitor_memory": False,
        "use_mrope": False,
    }
    return {
        "model_class": MODEL_CLASSES[spec.architecture],
        "load": {"ckpt_dir": "{converted}", "rank": 0},
        "build_config": build_config,
        "plugin_config": _plugin_config(spec, several, gemm_plugin),
        "save": {"engine_dir": "{engine}"},
    }


def _plugin_config(spec: TrtLlmSpec, several: bool, gemm_plugin: bool) -> dict[str, Any]:
    fp8 = spec.quantisation is Quantisation.FP8
    # 'auto' means the model's type, which would leave the FP8 matmuls to TensorRT [not verified].
    gemm = ("fp8" if fp8 else "auto") if gemm_plugin else None
    return {
        **dict.fromkeys(_OFF),
        "dtype": spec.dtype,
        "gpt_attention_plugin": "auto",
        "bert_attention_plugin": "auto",
        "gemm_plugin": gemm,
        "nccl_plugin": "auto" if spec.tp > 1 else None,
        "moe_plugin": "auto",
        "mamba_conv1d_plugin": "auto",
        "smooth_quant_plugins": True,
        "quantize_per_token_plugin": False,
        "quantize_tensor_plugin": False,
        "context_fmha": True,
        "bert_context_fmha_fp32_acc": False,
        "paged_kv_cache": None,  # the older name of kv_cache_type; naming both is a conflict
        "remove_input_padding": True,
        "reduce_fusion": False,
        "user_buffer": False,
        "tokens_per_block": spec.block_tokens,
        "use_paged_context_fmha": True,  # without it block reuse is off, silently
        "use_fp8_context_fmha": fp8,
        "multiple_profiles": several,
        "paged_state": True,
        "streamingllm": False,
        "manage_weights": False,
        "use_fused_mlp": True,
        "pp_reduce_scatter": False,
    }


def pass_tokens(spec: TrtLlmSpec, engine: EngineName = EngineName.SP) -> int:
    """max_num_tokens of an engine after TensorRT-LLM's own clipping. Raises BuildError."""
    try:
        return limits(
            spec.pass_tokens_max,
            spec.context_tokens_max,
            spec.requests_max,
            spec.block_tokens,
            multiple=engine is EngineName.SP,
        ).pass_tokens_max
    except ValueError as error:
        raise BuildError(str(error)) from None


def pass_classes(spec: TrtLlmSpec) -> tuple[int, ...]:
    """Upper edges of the T-classes of a pass: profiles of the engines, or sizes of captured graphs."""
    if not spec.torch:
        return stock_classes(pass_tokens(spec))
    from engines.trtllm_torch import torch_classes  # not for TensorRT-LLM's interpreter

    return torch_classes(pass_tokens(spec))


def child_config(spec: TrtLlmSpec, version: str, model_dir: str, kv_blocks: int) -> ChildConfig:
    """What an executor over `model_dir` is started with while it is built: no room is kept for decode."""
    return ChildConfig(
        driver=Driver.TORCH if spec.torch else Driver.ENGINE,
        model_dir=model_dir,
        version=version,
        role=ExecutorRole.BOTH,
        requests_max=spec.requests_max,
        pass_tokens_max=pass_tokens(spec),
        context_tokens_max=spec.context_tokens_max,
        block_tokens=spec.block_tokens,
        kv_blocks=kv_blocks,
        capture_tokens=pass_classes(spec) if spec.torch else (),
        dtype=spec.dtype,
    )


def fill(arguments: Mapping[str, Any], paths: Mapping[str, str | None]) -> dict[str, Any]:
    """`arguments` with every word in braces replaced by its path. Raises KeyError for one without a path."""

    def filled(value: Any) -> Any:
        if isinstance(value, str) and value.startswith("{") and value.endswith("}"):
            return paths[value[1:-1]]
        if isinstance(value, Mapping):
            return {key: filled(item) for key, item in value.items()}
        return value

    return {key: filled(value) for key, value in arguments.items()}


def cli_line(spec: TrtLlmSpec, engine: EngineName, gemm_plugin: bool) -> tuple[str, ...]:
    """The words of the `trtllm-build` command that comes nearest, for humans: the pipeline calls the API.

    What has no flag (`WITHOUT_FLAG`) takes its default there, which for opt_batch_size is 8.
    """
    arguments = build_arguments(spec, engine, gemm_plugin)
    build, plugins = arguments["build_config"], arguments["plugin_config"]
    words = ["trtllm-build", "--checkpoint_dir", "{converted}", "--output_dir", "{engine}"]
    for name in _VALUE_FLAGS:
        if build[name] is not None:
            words += [f"--{name}", str(build[name]).lower() if name == "kv_cache_type" else str(build[name])]
    for name in _PLUGIN_FLAGS:
        value = plugins[name]
        words += [f"--{name}", _switch(value) if value is None or isinstance(value, bool) else str(value)]
    return tuple(words)


# Flags that must say the same as the recipe; the others' defaults agree with it.
_VALUE_FLAGS = (
    "max_batch_size",
    "max_input_len",
    "max_seq_len",
    "max_beam_width",
    "max_num_tokens",
    "opt_num_tokens",
    "kv_cache_type",
    "input_timing_cache",
    "output_timing_cache",
    "profiling_verbosity",
)
_PLUGIN_FLAGS = (
    "gpt_attention_plugin",
    "gemm_plugin",
    "nccl_plugin",
    "context_fmha",
    "remove_input_padding",
    "tokens_per_block",
    "use_paged_context_fmha",
    "use_fp8_context_fmha",
    "multiple_profiles",
    "use_fused_mlp",
)


def _switch(value: bool | None) -> str:
    return "enable" if value else "disable"
