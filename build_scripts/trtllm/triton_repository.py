"""A Triton model repository for our engines: `<name>/config.pbtxt` and an empty version directory `1/`.

One model of backend `tensorrtllm` with all tensors of the documented table, decoupled (streaming needs it),
and every parameter that means something here written out, so that nothing rests on a default of the server's.
The configuration is made as a `ModelConfig` message of tritonclient and printed in protobuf text format: what
is not valid can't be written. Preprocessing, BLS and ensembles are not part of it: this service sends token
ids and takes token ids.

Parameters that only other models need (encoders, Medusa, lookahead, Eagle, LoRA) are left out; each is listed
with its reason in `LEFT_OUT`. Three string parameters are read without a default, so they are written empty.
"""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from build_scripts.spec import BuildError
from engines.triton_tensors import BACKEND, BLOCK_TOKENS, FINGERPRINT, Tensor, tensor_table

VERSION = "1"
CONFIG = "config.pbtxt"
WORKER = "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker"  # in NVIDIA's image
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")

LEFT_OUT = {
    "cross_kv_cache_fraction": "only encoder-decoder models have it; refused with others",
    "encoder_model_path": "no encoder",
    "eagle_choices": "no speculative decoding",
    "medusa_choices": "no speculative decoding",
    "lookahead_ngram_size": "no speculative decoding",
    "lookahead_verification_set_size": "no speculative decoding",
    "lookahead_window_size": "no speculative decoding",
    "kv_cache_free_gpu_mem_fraction": "the pool has a size in tokens; a share depends on who starts first",
    "lora_cache_gpu_memory_fraction": "no LoRA",
    "lora_cache_host_memory_bytes": "no LoRA",
    "lora_cache_max_adapter_size": "no LoRA",
    "lora_cache_optimal_adapter_size": "no LoRA",
    "lora_prefetch_dir": "no LoRA",
    "max_attention_window_size": "no sliding window: with block reuse it crashes engines (issue 13123)",
    "participant_ids": "one process a model",
    "sink_token_length": "no sliding window",
}


@dataclass(frozen=True, slots=True)
class TritonLimits:
    """Bounds of the served engine.

    requests_max: in one iteration, at most the engine's; also of Triton's batch, so that a pass goes to the
    executor in one piece. kv_blocks: of the pool. queue_requests_max: waiting in the server; it is the queue
    of the executor too. queue_delay_us: how long the server waits for a pass to fill up: its requests come as
    streams of their own, and each waits so long where the pass is smaller than requests_max [not measured].
    cancellation_check_period_ms: how often cancelled streams are looked for; the backend's default is 100.
    """

    requests_max: int
    kv_blocks: int
    block_tokens: int
    queue_requests_max: int = 256
    queue_delay_us: int = 500
    cancellation_check_period_ms: int = 10

    def __post_init__(self) -> None:
        for name in self.__slots__:
            least = 0 if name == "queue_delay_us" else 1
            if getattr(self, name) < least:
                raise BuildError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.queue_requests_max < self.requests_max:
            raise BuildError(
                f"queue_requests_max ({self.queue_requests_max}) must hold a pass of requests_max "
                f"({self.requests_max})"
            )


def write_repository(
    target: Path,
    *,
    model_name: str,
    engine_dir: str,
    limits: TritonLimits,
    tokenizer_dir: str = "",
    fingerprint: str = "",
    device: int = 0,
) -> Path:
    """Write the model into the repository `target`, in place of one of the same name; returns its directory.

    engine_dir, tokenizer_dir: as the server sees them. fingerprint: bundle id of the engine; an adapter
    refuses a server that has another. Raises BuildError.
    """
    if not _NAME.fullmatch(model_name):
        raise BuildError(f"model_name {model_name!r} must be letters, digits, '_', '-' and '.'")
    if not engine_dir.startswith("/"):
        raise BuildError(f"engine_dir {engine_dir!r} must be an absolute path in the server's file system")
    config = model_config(
        model_name, parameters(engine_dir, limits, tokenizer_dir, fingerprint, device), limits
    )
    directory = target / model_name
    (directory / VERSION).mkdir(parents=True, exist_ok=True)
    _replace(directory / CONFIG, to_text(config))
    return directory


def parameters(
    engine_dir: str, limits: TritonLimits, tokenizer_dir: str = "", fingerprint: str = "", device: int = 0
) -> dict[str, str]:
    """Every parameter of the model, by name. Values are strings in config.pbtxt."""
    return {
        "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
        "gpt_model_type": "inflight_fused_batching",
        "gpt_model_path": engine_dir,
        "max_beam_width": "1",
        "batch_scheduler_policy": "guaranteed_no_evict",
        "max_tokens_in_paged_kv_cache": str(limits.kv_blocks * limits.block_tokens),
        "enable_kv_cache_reuse": "true",
        # Prompts come in parts. But without this none may be longer than a pass, however much is cached.
        "enable_chunked_context": "true",
        "exclude_input_in_output": "true",
        "cancellation_check_period_ms": str(limits.cancellation_check_period_ms),
        "stats_check_period_ms": "100",
        "iter_stats_max_iterations": "1000",
        "request_stats_max_iterations": "0",
        "kv_cache_host_memory_bytes": "0",
        "kv_cache_onboard_blocks": "true",
        "decoding_mode": "top_k_top_p",
        "normalize_log_probs": "false",  # never asked for
        "enable_trt_overlap": "false",
        "multi_block_mode": "true",
        "enable_context_fmha_fp32_acc": "false",
        "cuda_graph_mode": "false",  # it is for batches without prefill only
        "cuda_graph_cache_size": "0",
        "gpu_weights_percent": "1.0",
        "gpu_device_ids": str(device),
        "num_nodes": "1",
        "executor_worker_path": WORKER,
        "speculative_decoding_fast_logits": "false",
        "tokenizer_dir": tokenizer_dir,
        "guided_decoding_backend": "",
        "xgrammar_tokenizer_info_path": "",
        FINGERPRINT: fingerprint,
        BLOCK_TOKENS: str(limits.block_tokens),
    }


def model_config(model_name: str, values: dict[str, str], limits: TritonLimits) -> Any:
    """The configuration as a `ModelConfig` message. Raises BuildError where tritonclient is not installed."""
    message = _messages()
    config = message.ModelConfig(name=model_name, backend=BACKEND, max_batch_size=limits.requests_max)
    config.model_transaction_policy.decoupled = True
    batching = config.dynamic_batching
    batching.preferred_batch_size.append(limits.requests_max)
    batching.max_queue_delay_microseconds = limits.queue_delay_us
    batching.default_queue_policy.max_queue_size = limits.queue_requests_max
    table = tensor_table()
    for tensor in table.inputs:
        _declare(
            config.input.add(optional=tensor.optional, allow_ragged_batch=tensor.ragged), tensor, message
        )
    for tensor in table.outputs:
        _declare(config.output.add(), tensor, message)
    config.instance_group.add(count=1, kind=message.ModelInstanceGroup.KIND_CPU)  # the executor places it
    for name, value in values.items():
        config.parameters[name].string_value = value
    return config


def to_text(config: Any) -> str:
    """The message in protobuf text format, as in config.pbtxt."""
    from google.protobuf import text_format

    return text_format.MessageToString(config)


def read_config(directory: Path) -> Any:
    """The `ModelConfig` of a model's directory. Raises BuildError naming the file and what is wrong in it."""
    from google.protobuf import text_format

    path = directory / CONFIG
    try:
        return text_format.Parse(path.read_text(encoding="utf-8"), _messages().ModelConfig())
    except (OSError, text_format.ParseError) as error:
        raise BuildError(f"{path}: {error}") from error


def _declare(declared: Any, tensor: Tensor, message: Any) -> None:
    declared.name = tensor.name
    declared.data_type = message.DataType.Value(tensor.datatype)
    declared.dims.extend(tensor.dims)
    if tensor.scalar:
        declared.reshape.SetInParent()  # to no dimension


def _messages() -> Any:
    try:
        from tritonclient.grpc import model_config_pb2
    except ImportError as error:
        raise BuildError(f"{error}; install the extra: pip install 'plaserve[triton]'") from error
    return model_config_pb2


def _replace(path: Path, text: str) -> None:
    """A server that polls its repository sees the old file or the new one."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    Path(name).chmod(0o644)
    Path(name).replace(path)
