"""What a call looks like to a Triton server, and what its responses mean.

Inputs (batch dimension first; n: prompt tokens, k: bytes of a ticket):

    input_ids INT32 [1, n]   input_lengths, request_output_len INT32 [1, 1]   streaming BOOL [1, 1]
    end_id, pad_id INT32 [1, 1], left out where the end token is to be ignored
    runtime_top_k INT32, runtime_top_p, temperature FP32, seed UINT64 [1, 1]; greedy: runtime_top_k 1 alone
    return_perf_metrics, exclude_input_in_output BOOL [1, 1]
    retention_token_range_starts, _ends, _priorities, retention_decode_priority INT32 [1, 1]; end -1: open
    context_phase_params UINT8 [1, k] of a generation-only call

`request_type` (context_only, generation_only) is a request parameter, not a tensor. Outputs: output_ids INT32
[1, 1, m], the m new tokens, sequence_length INT32 [1, 1] = m, kv_cache_reused_blocks INT32 [1, 1] and, of a
context-only call, context_phase_params UINT8 [1, k]: the server's own serialisation of its context phase
parameters, first tokens and request id inside, returned byte for byte to the decode side.

No output says why a call ended. So it is told from what is known: the end token last, as many tokens as asked
for, told to stop; early otherwise is the end token, left out of the output, where the call has one, and an
error where it has none. [not verified: whether the end token is among the tokens, that a call without end_id
never ends early, with which response the reused blocks come.]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engines.executor.types import Answer, Call, CallKind, ContextTicket, Ending

SENT = (
    "input_ids",
    "input_lengths",
    "request_output_len",
    "streaming",
    "stop",
    "end_id",
    "pad_id",
    "temperature",
    "runtime_top_k",
    "runtime_top_p",
    "seed",
    "return_perf_metrics",
    "exclude_input_in_output",
    "retention_token_range_starts",
    "retention_token_range_ends",
    "retention_token_range_priorities",
    "retention_decode_priority",
    "context_phase_params",
)
OUTPUT_IDS, SEQUENCE_LENGTH = "output_ids", "sequence_length"
REUSED_BLOCKS, CONTEXT_PHASE_PARAMS = "kv_cache_reused_blocks", "context_phase_params"
REQUEST_TYPE = "request_type"
NO_RANGE_END = -1
_NUMPY = {"INT32": "int32", "UINT64": "uint64", "FP32": "float32", "BOOL": "bool", "UINT8": "uint8"}
_SEED_MASK = 2**64 - 1

Values = dict[str, tuple[str, list[Any] | bytes]]  # tensor: (wire type, row of values)


class BadResponse(Exception):  # noqa: N818 - what happened
    """A response that can't be understood; the message names the tensor."""


def values_of(call: Call) -> Values:
    """The tensors of a call, each one row. Raises ValueError for a call that can't be said."""
    prompt = list(call.token_ids)
    if not prompt or call.max_tokens < 1:
        raise ValueError(f"call {call.call_id}: needs a token of prompt and max_tokens of at least 1")
    values: Values = {
        "input_ids": ("INT32", prompt),
        "input_lengths": ("INT32", [len(prompt)]),
        "request_output_len": ("INT32", [call.max_tokens]),
        "streaming": ("BOOL", [True]),
        "return_perf_metrics": ("BOOL", [True]),
        "exclude_input_in_output": ("BOOL", [True]),
    }
    _sampling(call, values)
    if call.end_id is not None and not call.sampling.ignore_eos:
        values["end_id"] = values["pad_id"] = ("INT32", [call.end_id])
    if call.priority is not None:
        values["retention_token_range_starts"] = ("INT32", [0])
        values["retention_token_range_ends"] = ("INT32", [NO_RANGE_END])
        values["retention_token_range_priorities"] = ("INT32", [call.priority])
        values["retention_decode_priority"] = ("INT32", [call.priority])
    if call.kind is CallKind.GENERATION_ONLY:
        if call.ticket is None:
            raise ValueError(f"call {call.call_id}: a generation-only call needs the ticket of its prefill")
        values[CONTEXT_PHASE_PARAMS] = ("UINT8", call.ticket.opaque_state)
    return values


def stop_values() -> Values:
    """The tensors of a stop request: those that every request must have, and `stop`."""
    return {
        "input_ids": ("INT32", [0]),
        "input_lengths": ("INT32", [1]),
        "request_output_len": ("INT32", [1]),
        "stop": ("BOOL", [True]),
    }


def request_of(
    values: Values, *, model: str, version: str, request_id: str, kind: CallKind | None
) -> dict[str, Any]:
    """One request as tritonclient's `stream_infer` takes it. kind: None for a stop request."""
    import numpy as np
    from tritonclient.grpc import InferInput, InferRequestedOutput

    inputs = []
    for name, (wire_type, row) in values.items():
        dtype = np.dtype(_NUMPY[wire_type])
        array = np.frombuffer(row, dtype) if isinstance(row, bytes) else np.array(row, dtype)
        tensor = InferInput(name, [1, array.size], wire_type)
        tensor.set_data_from_numpy(array.reshape(1, -1))
        inputs.append(tensor)
    wanted = [OUTPUT_IDS, SEQUENCE_LENGTH]
    if kind is not None:
        wanted.append(REUSED_BLOCKS)
    if kind is CallKind.CONTEXT_ONLY:
        wanted.append(CONTEXT_PHASE_PARAMS)
    handed_over = kind in (CallKind.CONTEXT_ONLY, CallKind.GENERATION_ONLY)
    return {
        "model_name": model,
        "model_version": version,
        "request_id": request_id,
        "inputs": inputs,
        "outputs": [InferRequestedOutput(name) for name in wanted],
        "parameters": {REQUEST_TYPE: str(kind)} if handed_over else None,
    }


def arrays_of(result: Any) -> tuple[dict[str, Any], bool]:
    """Outputs of tritonclient's result as arrays by name, and whether it says that it is the last."""
    response = result.get_response()
    wanted = (OUTPUT_IDS, SEQUENCE_LENGTH, REUSED_BLOCKS, CONTEXT_PHASE_PARAMS)
    names = {output.name for output in response.outputs}
    try:
        arrays = {name: result.as_numpy(name) for name in wanted if name in names}
    except (ValueError, TypeError) as error:  # bytes that do not make the shape
        raise BadResponse(f"a tensor can't be read: {error}") from error
    last = response.parameters.get("triton_final_response")
    return arrays, bool(last is not None and last.bool_param)


@dataclass(slots=True)
class CallReader:
    """Turns the responses of one call into answers, and ends it exactly once."""

    call: Call
    fingerprint: str
    block_tokens: int
    cancelled: bool = False
    over: bool = False
    tokens: list[int] = field(default_factory=list)
    _reused: int | None = None

    def read(self, arrays: Mapping[str, Any], last: bool) -> Answer | None:
        """What a response brings; None for nothing. Raises BadResponse."""
        new, opaque = self._new_tokens(arrays), arrays.get(CONTEXT_PHASE_PARAMS)
        if (blocks := arrays.get(REUSED_BLOCKS)) is not None:
            if blocks.size != 1:
                raise BadResponse(f"{REUSED_BLOCKS} has shape {list(blocks.shape)}, expected [1, 1]")
            self._reused = int(blocks.reshape(-1)[0]) * self.block_tokens
        if self.over:
            return None
        self.tokens += new
        if self.call.kind is CallKind.CONTEXT_ONLY and opaque is not None:
            return self._finish(new, Ending.NOT_FINISHED, self._ticket(opaque))
        if last:
            return self.end(new)
        return Answer(self.call.call_id, tokens=tuple(new)) if new else None

    def end(self, new: list[int] | None = None) -> Answer | None:
        """The call's last answer, when its last response or the end of its stream came."""
        if self.over:
            return None
        if self.call.kind is CallKind.CONTEXT_ONLY and not self.cancelled:
            return self.fail(f"the server gave no {CONTEXT_PHASE_PARAMS}; does it know context_only?")
        ending = self._ending()
        if ending is None:
            return self.fail(
                f"it ended after {len(self.tokens)} of {self.call.max_tokens} tokens, and neither the end "
                "token nor a stop request of ours explains it"
            )
        return self._finish(new or [], ending)

    def fail(self, error: str) -> Answer | None:
        if self.over:
            return None
        self.over = True
        return Answer(self.call.call_id, final=True, error=error)

    def _finish(self, new: list[int], ending: Ending, ticket: ContextTicket | None = None) -> Answer:
        self.over = True
        return Answer(
            self.call.call_id,
            tokens=tuple(new),
            final=True,
            ending=ending,
            reused_tokens=self._reused,
            ticket=ticket,
        )

    def _ending(self) -> Ending | None:
        given = len(self.call.ticket.first_gen_tokens) if self.call.ticket else 0
        if self.call.end_id is not None and self.tokens and self.tokens[-1] == self.call.end_id:
            return Ending.END_ID
        if len(self.tokens) >= self.call.max_tokens - given:  # the first may or may not be told again
            return Ending.LENGTH
        if self.cancelled:
            return Ending.CANCELLED
        return None if self.call.end_id is None else Ending.END_ID

    def _ticket(self, opaque: Any) -> ContextTicket:
        """context_request_id is inside the opaque state and never read, so it is 0."""
        return ContextTicket(
            first_gen_tokens=tuple(self.tokens),
            context_request_id=0,
            opaque_state=opaque.tobytes(),
            fingerprint=self.fingerprint,
            block_tokens=self.block_tokens,
        )

    def _new_tokens(self, arrays: Mapping[str, Any]) -> list[int]:
        ids, lengths = arrays.get(OUTPUT_IDS), arrays.get(SEQUENCE_LENGTH)
        if ids is None:
            return []
        if ids.ndim != 3 or ids.shape[:2] != (1, 1):
            raise BadResponse(f"{OUTPUT_IDS} has shape {list(ids.shape)}, expected [1, 1, tokens]")
        length = ids.shape[2] if lengths is None else int(lengths.reshape(-1)[0]) if lengths.size else -1
        if not 0 <= length <= ids.shape[2]:
            raise BadResponse(f"{SEQUENCE_LENGTH} is {length} for {ids.shape[2]} tokens")
        return [int(token) for token in ids[0, 0, :length]]


def _sampling(call: Call, values: Values) -> None:
    sampling = call.sampling
    if sampling.temperature <= 0.0:
        values["runtime_top_k"] = ("INT32", [1])
        return
    values["temperature"] = ("FP32", [sampling.temperature])
    values["runtime_top_k"] = ("INT32", [sampling.top_k])
    values["runtime_top_p"] = ("FP32", [sampling.top_p])
    values["seed"] = ("UINT64", [sampling.seed & _SEED_MASK])
