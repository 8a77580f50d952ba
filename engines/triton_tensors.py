"""Tensors, parameters and request parameters of the `tensorrtllm` backend's model in a Triton server.

The table (triton_tensors.json) is what a model's config.pbtxt must declare: the repository is written from
it, an adapter checks a server against it. Types of two inputs and two outputs are the choice of whoever
writes the configuration; `CHOSEN_TYPES` has ours. Its source is noted in the file; the image that has
TensorRT-LLM 1.2.1 was not read. Files of the 1.x line were seen to declare two inputs more,
return_num_input_tokens and return_num_output_tokens; they are optional and this project does not send them.

Shapes: the model's `max_batch_size` is above 0, so on the wire every tensor has a batch dimension before its
`dims`. A scalar (`dims` [1]) is [1, 1] there; the backend sees it reshaped to [1].
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("triton_tensors.json")
BACKEND = "tensorrtllm"  # name of the C++ backend in config.pbtxt
CHOSEN_TYPES = {
    "${logits_datatype}": "TYPE_FP32",  # logits are never asked for
    "${encoder_input_features_data_type}": "TYPE_FP16",  # decoder-only models
}
FINGERPRINT = "plaserve_fingerprint"  # parameter of ours; the backend reads only those that it knows
BLOCK_TOKENS = "plaserve_block_tokens"


@dataclass(frozen=True, slots=True)
class Tensor:
    """One input or output. datatype: as in config.pbtxt; dims: -1 is any size, without the batch dimension.

    ragged: may differ in size between the requests of a batch. scalar: reshaped to no dimension.
    """

    name: str
    datatype: str
    dims: tuple[int, ...]
    optional: bool = False
    ragged: bool = False
    scalar: bool = False

    @property
    def wire_type(self) -> str:
        """As in a request: INT32 for TYPE_INT32, BYTES for TYPE_STRING."""
        name = self.datatype.removeprefix("TYPE_")
        return "BYTES" if name == "STRING" else name

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape, batch dimension 1 first, may be sent for it."""
        return (
            len(shape) == len(self.dims) + 1
            and shape[0] == 1
            and all(want in (-1, have) for want, have in zip(self.dims, shape[1:], strict=True))
        )


@dataclass(frozen=True, slots=True)
class TensorTable:
    """What the backend documents. parameters: names of those in config.pbtxt."""

    source: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    parameters: tuple[str, ...]
    request_types: tuple[str, ...]  # values of the request parameter request_type

    def input(self, name: str) -> Tensor:
        return next(tensor for tensor in self.inputs if tensor.name == name)


@cache
def tensor_table() -> TensorTable:
    """The table that ships with this project."""
    data = json.loads(FILE.read_text(encoding="utf-8"))
    return TensorTable(
        source=data["source"],
        inputs=tuple(_tensor(row) for row in data["inputs"]),
        outputs=tuple(_tensor(row) for row in data["outputs"]),
        parameters=tuple(data["parameters"]),
        request_types=tuple(data["request_parameters"]["request_type"]),
    )


def _tensor(row: dict[str, object]) -> Tensor:
    dims = row["dims"]
    datatype = str(row["data_type"])
    return Tensor(
        name=str(row["name"]),
        datatype=CHOSEN_TYPES.get(datatype, datatype),
        dims=tuple(int(size) for size in dims) if isinstance(dims, list) else (),
        optional=bool(row.get("optional", False)),
        ragged=bool(row.get("ragged", False)),
        scalar=bool(row.get("scalar", False)),
    )
