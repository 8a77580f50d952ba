"""What a Triton server must say of itself before a call is sent to it.

Server live, model ready; then its configuration: backend, decoupled, batch size, every tensor that is sent or
read with its type and size, and the parameters that decide how prompts are batched and cached. All that is
wrong is told at once, each by its field. The server does not tell which TensorRT-LLM it has: the fingerprint
that the repository was written with stands for it.
"""

from __future__ import annotations

from typing import Any

from engines.executor.types import BackendUnavailable, ExecutorRole
from engines.triton_messages import CONTEXT_PHASE_PARAMS, OUTPUT_IDS, REUSED_BLOCKS, SENT, SEQUENCE_LENGTH
from engines.triton_options import TritonOptions
from engines.triton_tensors import BACKEND, BLOCK_TOKENS, FINGERPRINT, tensor_table

REMEDY = (
    "write the model with build_scripts.trtllm.triton_repository and load it again, or correct the options"
)


def check_config(config: Any, options: TritonOptions) -> bool:
    """Whether the model reports what it reused. Raises BackendUnavailable naming all that is wrong."""
    wrong = [*_model(config, options), *_tensors(config, options), *_parameters(config, options)]
    if wrong:
        where = f"model {options.model} at {options.url}"
        raise BackendUnavailable(f"{where} does not fit: {'; '.join(wrong)}", REMEDY)
    return any(output.name == REUSED_BLOCKS for output in config.output)


def _model(config: Any, options: TritonOptions) -> list[str]:
    wrong = []
    if config.backend != BACKEND:
        wrong.append(f"backend is {config.backend!r}, expected {BACKEND!r}")
    if not config.model_transaction_policy.decoupled:
        wrong.append("model_transaction_policy.decoupled is false, but streaming needs it")
    if config.max_batch_size < options.requests_max:
        wrong.append(
            f"max_batch_size is {config.max_batch_size}, less than requests_max {options.requests_max}"
        )
    return wrong


def _tensors(config: Any, options: TritonOptions) -> list[str]:
    from tritonclient.grpc import model_config_pb2

    name_of = model_config_pb2.DataType.Name
    table, wrong = tensor_table(), []
    read = [OUTPUT_IDS, SEQUENCE_LENGTH]
    if options.role is not ExecutorRole.BOTH:
        read.append(CONTEXT_PHASE_PARAMS)
    wanted = (
        ("input", config.input, [tensor for tensor in table.inputs if tensor.name in SENT]),
        ("output", config.output, [tensor for tensor in table.outputs if tensor.name in read]),
    )
    for what, declared, tensors in wanted:
        there = {tensor.name: tensor for tensor in declared}
        for tensor in tensors:
            other = there.get(tensor.name)
            if other is None:
                wrong.append(f"{what} {tensor.name} is missing")
            elif (got := name_of(other.data_type)) != tensor.datatype:
                wrong.append(f"{what} {tensor.name} has data_type {got}, expected {tensor.datatype}")
            elif tuple(other.dims) != tensor.dims:
                wrong.append(
                    f"{what} {tensor.name} has dims {list(other.dims)}, expected {list(tensor.dims)}"
                )
    known = {tensor.name for tensor in table.inputs if not tensor.optional}
    wrong += [
        f"input {tensor.name} is required there and not known here"
        for tensor in config.input
        if not tensor.optional and tensor.name not in known
    ]
    return wrong


def _parameters(config: Any, options: TritonOptions) -> list[str]:
    there = {name: value.string_value for name, value in config.parameters.items()}
    expected = {
        "gpt_model_type": ("inflight_fused_batching", "inflight_batching"),
        "batch_scheduler_policy": ("guaranteed_no_evict",),
        "enable_kv_cache_reuse": ("true", "1"),
        "enable_chunked_context": ("true", "1"),
        "max_beam_width": ("1",),
        "max_tokens_in_paged_kv_cache": (str(options.kv_blocks * options.block_tokens),),
        BLOCK_TOKENS: (str(options.block_tokens),),
    }
    if options.check_fingerprint:
        expected[FINGERPRINT] = (options.fingerprint,)
    return [
        f"parameter {name} is {there[name]!r}, expected {allowed[0]!r}"
        if name in there
        else f"parameter {name} is missing, expected {allowed[0]!r}"
        for name, allowed in expected.items()
        if there.get(name, "").lower() not in {value.lower() for value in allowed}
    ]
