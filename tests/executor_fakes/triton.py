"""A Triton server in this process: tritonclient's own service definitions over the fake executor.

It serves one model of a repository as written for the real one, and takes nothing that its config.pbtxt
does not declare: names, types, shapes with the batch dimension, sizes in bytes, required inputs, requested
outputs. As the real one does, it says what is wrong as text in the stream, ends requests whose client is
gone, flags the last response of a request, and forgets a request's id with it.

Iterations run in a thread, freely, or one by one where a test holds the server (`hold`, `allow`). Without
that thread (`stepped`) they run when somebody calls `step`.
"""

from __future__ import annotations

import base64
import json
import math
import queue
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from build_scripts.trtllm.triton_repository import read_config
from engines.triton_tensors import Tensor, tensor_table
from tests.executor_fakes.messages import FakeRequest, FakeResponse, HandOver, Kind, Retention
from tests.executor_fakes.model import ExecutorCrash, FakeExecutor
from tests.executor_fakes.pool import DEFAULT_PRIORITY

VERSION = "2.64.0"  # of the fake; only ever shown
_BYTES = {"INT32": 4, "INT64": 8, "UINT64": 8, "FP32": 4, "FP16": 2, "BOOL": 1, "UINT8": 1}
_FORMAT = {"INT32": "i", "INT64": "q", "UINT64": "Q", "FP32": "f", "BOOL": "?", "UINT8": "B"}
_KINDS = {None: Kind.GENERATE, "context_only": Kind.CONTEXT_ONLY, "generation_only": Kind.GENERATION_ONLY}


@dataclass
class Quirks:
    """What a server may do, or does wrong. error: of the next request. mangled: outputs by name, replaced in
    every response by (datatype, shape, values)."""

    final_flag: bool = True
    ignore_stop: bool = False
    live: bool = True
    ready: bool = True
    error: str | None = None
    mangled: dict[str, tuple[str, list[int], list[Any]]] = field(default_factory=dict)


@dataclass
class Seen:
    """A request as it came: its id, parameters, and values of its tensors."""

    request_id: str
    parameters: dict[str, str]
    tensors: dict[str, list[Any]]


class BadRequest(Exception):  # noqa: N818 - what happened
    """INVALID_ARGUMENT."""


class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """One server. executor: as configured. directory: of the model in its repository."""

    def __init__(
        self,
        directory: Path,
        executor: FakeExecutor,
        *,
        port: int = 0,
        credentials: Any = None,
        stepped: bool = False,
    ) -> None:
        self.config = read_config(directory)
        self.executor = executor
        self.quirks = Quirks()
        self.requests: list[Seen] = []
        self.cancelled: list[str] = []  # ids of requests whose stream was cancelled before their end
        self.stopped: list[str] = []  # ids of requests that a stop request has ended
        self.enqueued: list[str] = []  # ids of requests that the executor got
        self._declared = {tensor.name: tensor for tensor in self.config.input}
        self._table = {tensor.name: tensor for tensor in tensor_table().inputs}
        self._outputs = {tensor.name for tensor in self.config.output}
        self._changed = threading.Condition()
        self._free, self._steps, self._news, self._stopped = True, 0, False, False
        self._answers: dict[int, queue.SimpleQueue[FakeResponse | None]] = {}
        self._ids: dict[str, int] = {}
        self._pump = None if stepped else threading.Thread(target=self._run, name="fake-triton", daemon=True)
        self._server = grpc.server(ThreadPoolExecutor(64), options=[("grpc.so_reuseport", 1)])
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        address = f"127.0.0.1:{port}"
        if credentials is None:
            self.port = self._server.add_insecure_port(address)
        else:
            self.port = self._server.add_secure_port(address, credentials)
        self._server.start()
        if self._pump is not None:
            self._pump.start()

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.port}"

    def stop(self) -> None:
        """At once, as when the process dies."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for waiting in list(self._answers.values()):
            waiting.put(None)
        self._server.stop(0).wait()
        if self._pump is not None:
            self._pump.join(10)
        self.executor.shutdown()

    def hold(self) -> None:
        with self._changed:
            self._free = False

    def allow(self, steps: int | None = None) -> None:
        """So many iterations more; None: freely again."""
        with self._changed:
            self._free = steps is None
            self._steps += steps or 0
            self._changed.notify_all()

    def step(self) -> tuple[bool, list[str]]:
        """An iteration, if there is any: whether there was, and ids of the requests that it answers."""
        with self._changed:
            moved = self.executor.step()
            responses = self.executor.await_responses(0.0, only_ready=True)
            names = {value: name for name, value in self._ids.items()}
            answered = [r for r in responses if r.request_id in self._answers]
            for response in responses:
                self._hand_out(response)
        return moved or bool(responses), [names[response.request_id] for response in answered]

    # --- the service ---

    def ServerLive(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.ServerLiveResponse(live=self.quirks.live)

    def ServerReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.ServerReadyResponse(ready=self.quirks.ready)

    def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.ModelReadyResponse(ready=self.quirks.ready and request.name == self.config.name)

    def ServerMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.ServerMetadataResponse(name="triton", version=VERSION)

    def ModelConfig(self, request: Any, context: Any) -> Any:  # noqa: N802
        if (request.name, request.version) not in ((self.config.name, "1"), (self.config.name, "")):
            context.abort(grpc.StatusCode.NOT_FOUND, f"unknown model '{request.name}' {request.version}")
        return pb.ModelConfigResponse(config=self.config)

    def ModelStreamInfer(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:  # noqa: N802
        for request in requests:
            try:
                if self.quirks.error is not None:
                    error, self.quirks.error = self.quirks.error, None
                    raise BadRequest(error)
                tensors = self._checked(request)
                if tensors.get("stop") == [True]:
                    yield from self._stop_request(request)
                else:
                    yield from self._infer(request, tensors, context)
            except BadRequest as error:
                answer = pb.ModelStreamInferResponse(error_message=str(error))
                answer.infer_response.id = request.id
                yield answer

    # --- requests ---

    def _checked(self, request: Any) -> dict[str, list[Any]]:
        """Values of the tensors, if all is as declared. Raises BadRequest naming what is not."""
        where = f"[request id: {request.id}] "
        if request.model_name != self.config.name:
            raise BadRequest(f"{where}Request for unknown model: '{request.model_name}' is not found")
        if len(request.inputs) != len(request.raw_input_contents):
            raise BadRequest(f"{where}{len(request.inputs)} inputs, {len(request.raw_input_contents)} raw")
        values: dict[str, list[Any]] = {}
        for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
            known = self._table.get(tensor.name)
            if known is None or tensor.name not in self._declared:
                raise BadRequest(f"{where}unexpected inference input '{tensor.name}'")
            values[tensor.name] = self._values(where, known, tensor, raw)
        for name, declared in self._declared.items():
            if not declared.optional and name not in values:
                raise BadRequest(f"{where}expected input '{name}', which is required, is missing")
        for output in request.outputs:
            if output.name not in self._outputs:
                raise BadRequest(f"{where}unexpected inference output '{output.name}'")
        parameters = {name: value.string_param for name, value in request.parameters.items()}
        self.requests.append(Seen(request.id, parameters, values))
        if values["input_lengths"] != [len(values.get("input_ids", []))]:
            raise BadRequest(f"{where}input_lengths is {values['input_lengths']}")
        return values

    def _values(self, where: str, known: Tensor, tensor: Any, raw: bytes) -> list[Any]:
        if tensor.datatype != known.wire_type:
            raise BadRequest(
                f"{where}inference input '{tensor.name}' data-type is '{tensor.datatype}', but model "
                f"'{self.config.name}' expects '{known.wire_type}'"
            )
        if not known.fits(tuple(tensor.shape)):
            raise BadRequest(
                f"{where}unexpected shape for input '{tensor.name}': expected [-1,{list(known.dims)}], "
                f"got {list(tensor.shape)}"
            )
        count = math.prod(tensor.shape)
        if len(raw) != count * _BYTES[tensor.datatype]:
            raise BadRequest(f"{where}input '{tensor.name}' has {len(raw)} bytes for {count} elements")
        return list(struct.unpack(f"<{count}{_FORMAT[tensor.datatype]}", raw))

    def _stop_request(self, request: Any) -> Iterator[Any]:
        if not request.id:
            raise BadRequest("Trying to stop a request but request ID is not provided")
        with self._changed:
            executor_id = self._ids.get(request.id)
        if executor_id is not None and not self.quirks.ignore_stop:
            self._cancel(executor_id)
            self.stopped.append(request.id)
        yield self._response(request, {}, final=True)

    def _infer(self, request: Any, tensors: dict[str, list[Any]], context: Any) -> Iterator[Any]:
        made = self._executor_request(request, tensors)
        waiting: queue.SimpleQueue[FakeResponse | None] = queue.SimpleQueue()
        with self._changed:
            executor_id = self.executor.enqueue_requests([made])[0]
            self._answers[executor_id] = waiting
            self._ids[request.id] = executor_id
            self.enqueued.append(request.id)
            self._news = True
            self._changed.notify_all()
        context.add_callback(lambda: self._stream_ended(request.id, executor_id))
        while (response := waiting.get()) is not None:
            if response.error is not None:
                raise BadRequest(
                    f"Executor failed process requestId {response.request_id} due to the following error: "
                    f"{response.error}"
                )
            yield self._response(request, self._filled(made, response, request), response.final)
            if response.final:
                return
        if self._stopped:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the server is gone")

    def _executor_request(self, request: Any, tensors: dict[str, list[Any]]) -> FakeRequest:
        kind_name = request.parameters["request_type"].string_param if request.parameters else None
        if kind_name not in _KINDS:
            raise BadRequest(f"Unexpected parameter value for request_type: {kind_name}")
        names = {output.name for output in request.outputs}
        if names and not names >= {"output_ids", "sequence_length"}:
            raise BadRequest("output_ids tensor must be present in list of output tensors")
        kind = _KINDS[kind_name]
        opaque, hand_over = tensors.get("context_phase_params"), None
        if (opaque is not None) != (kind is Kind.GENERATION_ONLY):
            raise BadRequest("context_phase_params and request_type generation_only belong together")
        if opaque is not None:
            hand_over = unpack_hand_over(bytes(opaque))
        return FakeRequest(
            tuple(tensors["input_ids"]),
            tensors["request_output_len"][0],
            kind,
            streaming=tensors.get("streaming", [False])[0],
            end_id=tensors["end_id"][0] if "end_id" in tensors else None,
            retention=self._retention(tensors),
            decode_priority=tensors.get("retention_decode_priority", [DEFAULT_PRIORITY])[0],
            hand_over=hand_over,
            perf_metrics=tensors.get("return_perf_metrics", [False])[0],
        )

    def _retention(self, tensors: dict[str, list[Any]]) -> tuple[Retention, ...]:
        columns = [tensors.get(f"retention_token_range_{name}") for name in ("starts", "ends", "priorities")]
        if columns[0] is None:
            return ()
        if any(column is None or len(column) != len(columns[0]) for column in columns):
            raise BadRequest("retention_token_range_* must be provided, and have the same length")
        rows = zip(*(column or [] for column in columns), strict=True)
        return tuple(Retention(start, None if end == -1 else end, value) for start, end, value in rows)

    def _filled(self, made: FakeRequest, response: FakeResponse, request: Any) -> dict[str, Any]:
        tokens = list(response.tokens)
        filled: dict[str, Any] = {
            "output_ids": ("INT32", [1, 1, len(tokens)], tokens),
            "sequence_length": ("INT32", [1, 1], [len(tokens)]),
        }
        if made.kind is Kind.CONTEXT_ONLY and response.hand_over is not None:
            packed = list(pack_hand_over(response.hand_over))
            filled["context_phase_params"] = ("UINT8", [1, len(packed)], packed)
        if made.perf_metrics and response.metrics is not None:
            filled["kv_cache_reused_blocks"] = ("INT32", [1, 1], [response.metrics.reused_blocks])
            filled["first_token_time_ns"] = ("INT64", [1, 1], [1])  # comes unasked, as from the real one
        return {**filled, **self.quirks.mangled}

    def _response(self, request: Any, outputs: dict[str, Any], final: bool) -> Any:
        answer = pb.ModelStreamInferResponse()
        response = answer.infer_response
        response.id, response.model_name, response.model_version = request.id, request.model_name, "1"
        if self.quirks.final_flag:
            response.parameters["triton_final_response"].bool_param = final
        for name, (datatype, shape, values) in outputs.items():
            response.outputs.add(name=name, datatype=datatype, shape=shape)
            response.raw_output_contents.append(struct.pack(f"<{len(values)}{_FORMAT[datatype]}", *values))
        return answer

    # --- the executor ---

    def _stream_ended(self, request_id: str, executor_id: int) -> None:
        with self._changed:
            unfinished = self._answers.get(executor_id)
            if unfinished is None or self._stopped:
                return
        unfinished.put(None)
        self._cancel(executor_id)
        self.cancelled.append(request_id)

    def _cancel(self, executor_id: int) -> None:
        with self._changed:
            if not self._stopped:
                self.executor.cancel_request(executor_id)
                self._news = True
                self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._news or self._may_step())
                if self._stopped:
                    return
                self._news = False
                step = self._may_step()
                self._steps -= 1 if step and not self._free else 0
            try:
                moved = step and self.executor.step()
                responses = self.executor.await_responses(0.0, only_ready=True)
            except ExecutorCrash:  # and the process with it
                threading.Thread(target=self.stop, daemon=True).start()
                return
            with self._changed:
                for response in responses:
                    self._hand_out(response)
                if step and not moved and not responses:
                    self._changed.wait(0.01)  # for KV that another executor is to give

    def _may_step(self) -> bool:
        return self.executor.has_work and (self._free or self._steps > 0)

    def _hand_out(self, response: FakeResponse) -> None:
        waiting = self._answers.get(response.request_id)
        if response.final or response.error is not None:
            self._answers.pop(response.request_id, None)
            for name in [name for name, value in self._ids.items() if value == response.request_id]:
                del self._ids[name]
        if waiting is not None:
            waiting.put(response)


def pack_hand_over(hand_over: HandOver) -> bytes:
    """The fake's own serialisation; opaque to everybody else."""
    state = base64.b64encode(hand_over.opaque_state).decode()
    return json.dumps([list(hand_over.first_tokens), hand_over.request_id, state]).encode()


def unpack_hand_over(packed: bytes) -> HandOver:
    try:
        first, request_id, state = json.loads(packed)
        return HandOver(tuple(first), request_id, base64.b64decode(state))
    except (ValueError, TypeError) as error:
        raise BadRequest(f"context_phase_params can't be deserialised: {error}") from error
