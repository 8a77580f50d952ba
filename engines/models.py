"""Models with known shape and cost: fitted ones, and ones derived from them by scaling.

`models.json` beside this file holds every shape, and the coefficients of the models that were fitted. A model
without coefficients is *derived*: each coefficient of a fitted model follows what it costs physically,

    weights   bytes of all weights                    gamma_w   hidden size x layers (activations of a token)
    alpha     layers x heads x head size              gamma_r   KV bytes a token
    beta      matmul flops a token, LM head left out  launch    layers (kernels a pass)

so, on the same GPU, type and engine, it grows by the ratio of the two shapes (`scale_cost`). A shape between
the two nearest fitted models by parameters takes the geometric mean of both predictions, weighted by how near
each is in log parameters; one outside the fitted sizes takes the nearest alone (`derive_cost`). Fitted shapes
so give back what was fitted. docs/cost-model.md says how far one fitted model misses the other by this rule.

A file that `plaserve calibrate --out` wrote is read by `load_model` too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from engines.cost_model import CostModel

SCHEMA_VERSION = 1
_VALUE_BYTES = 2  # bf16


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a dense decoder with grouped-query attention and a gated MLP, in bf16.

    ffn: width of the MLP. tied: the LM head is the embedding. Norms and biases are left out (under 0.1 %).
    """

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"model shape {self.name!r}: {name} must be a whole number above 0, got {value!r}"
                )

    @property
    def block_parameters(self) -> int:
        """Weights of the matmuls that every token passes: all but embedding and LM head."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.ffn)

    @property
    def parameters(self) -> int:
        return self.block_parameters + self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def weight_bytes(self) -> int:
        return _VALUE_BYTES * self.parameters

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of every layer."""
        return 2 * self.layers * self.kv_heads * self.head_dim * _VALUE_BYTES

    @property
    def flops_per_token(self) -> int:
        """Matmul flops of a prefill token, without the LM head, which only a request's last token needs."""
        return 2 * self.block_parameters

    @property
    def attention_width(self) -> int:
        """layers x heads x head size: attention flops are 4 times this for every pair of tokens."""
        return self.layers * self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model's cost and where it comes from.

    shape: None where a calibration was not told it. derived: scaled from fitted models, never measured.
    fit_error_median, fit_error_worst: |predicted / measured - 1| over the fitted samples; None if derived.
    """

    name: str
    shape: ModelShape | None
    cost: CostModel
    derived: bool
    source: str
    fit_error_median: float | None = None
    fit_error_worst: float | None = None


def known_models() -> Mapping[str, KnownModel]:
    """Shipped models by name, the fitted ones first."""
    return _catalog()[0]


def load_model(name_or_path: str | Path) -> KnownModel:
    """A shipped model by its name or its usual name on a hub, in any case, or a file of `plaserve calibrate`.

    Raises ValueError saying what there is, or which field of the file is wrong.
    """
    models, aliases = _catalog()
    text = str(name_or_path)
    if (name := aliases.get(text.lower())) is not None:
        return models[name]
    path = Path(name_or_path)
    if path.is_file():
        return _read_file(path)
    raise ValueError(
        f"model {text!r} is not known and no such file exists; known are {', '.join(models)}, "
        "or give a file that `plaserve calibrate --out` wrote"
    )


def known_shape(name: str) -> ModelShape | None:
    """The shape of a shipped model by name or hub name, in any case; None if there is none."""
    models, aliases = _catalog()
    found = aliases.get(name.lower())
    return None if found is None else models[found].shape


def model_to_json(model: KnownModel) -> dict[str, Any]:
    """What `load_model` reads back."""
    return {"schema_version": SCHEMA_VERSION, **asdict(model)}


def scale_cost(cost: CostModel, old: ModelShape, new: ModelShape) -> CostModel:
    """The cost of a model of shape `new`, on the same machine, from that of a model of shape `old`."""
    return replace(
        cost,
        launch_s=cost.launch_s * (new.layers / old.layers),
        weights_s=cost.weights_s * (new.weight_bytes / old.weight_bytes),
        alpha=cost.alpha * (new.attention_width / old.attention_width),
        beta=cost.beta * (new.flops_per_token / old.flops_per_token),
        gamma_w=cost.gamma_w * (new.layers * new.hidden / (old.layers * old.hidden)),
        gamma_r=cost.gamma_r * (new.kv_bytes_per_token / old.kv_bytes_per_token),
    )


def derive_cost(shape: ModelShape, fitted: Sequence[tuple[ModelShape, CostModel]]) -> CostModel:
    """The cost of `shape` by the rule of the module text. `fitted`: models of one machine, at least one."""
    if not fitted:
        raise ValueError("fitted: at least one fitted model is needed to derive another")
    by_size = sorted(fitted, key=lambda pair: pair[0].parameters)
    smaller = [pair for pair in by_size if pair[0].parameters <= shape.parameters]
    larger = [pair for pair in by_size if pair[0].parameters >= shape.parameters]
    below, above = (smaller or larger[:1])[-1], (larger or smaller[-1:])[0]
    low, high = (scale_cost(cost, old, shape) for old, cost in (below, above))
    span = math.log(above[0].parameters / below[0].parameters)
    weight = math.log(shape.parameters / below[0].parameters) / span if span > 0.0 else 0.0
    names = ("launch_s", "weights_s", "alpha", "beta", "gamma_w", "gamma_r", "smooth_p")
    mean = {name: _geometric(getattr(low, name), getattr(high, name), weight) for name in names}
    used = [below[0].name] if weight == 0.0 else [below[0].name, above[0].name]
    return replace(
        low,
        **mean,
        tokens_max=min(low.tokens_max, high.tokens_max),
        origin=f"derived by scaling from {' and '.join(used)}; not measured",
    )


def _geometric(low: float, high: float, weight: float) -> float:
    return low if low == high else low ** (1.0 - weight) * high**weight


@cache
def _catalog() -> tuple[Mapping[str, KnownModel], Mapping[str, str]]:
    """(models by name, name by any accepted name in lower case)."""
    data = json.loads(resources.files("engines").joinpath("models.json").read_text(encoding="utf-8"))
    entries: list[dict[str, Any]] = data["models"]
    bases = [entry for entry in entries if entry.get("base_of_derived")]
    fitted = [(ModelShape(**entry["shape"]), CostModel(**entry["cost"])) for entry in bases]
    models: dict[str, KnownModel] = {}
    aliases: dict[str, str] = {}
    for entry in sorted(entries, key=lambda entry: "cost" not in entry):
        shape = ModelShape(**entry["shape"])
        derived = "cost" not in entry
        cost = derive_cost(shape, fitted) if derived else CostModel(**entry["cost"])
        models[shape.name] = KnownModel(
            shape.name,
            shape,
            cost,
            derived,
            cost.origin,
            entry.get("fit_error_median"),
            entry.get("fit_error_worst"),
        )
        aliases.update({name.lower(): shape.name for name in (shape.name, *entry["aliases"])})
    return MappingProxyType(models), MappingProxyType(aliases)


def _read_file(path: Path) -> KnownModel:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not a JSON file: {error}") from None
    if not isinstance(data, dict) or data.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(
            f"{path}: schema_version is not {SCHEMA_VERSION}; write it anew with `plaserve calibrate --out`"
        )
    body = {key: value for key, value in data.items() if key != "schema_version"}
    _check_fields(path, KnownModel, body, "file")
    _check_fields(path, CostModel, body["cost"], "cost")
    if body["shape"] is not None:
        _check_fields(path, ModelShape, body["shape"], "shape")
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(KnownModel).validate_python(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _check_fields(path: Path, kind: type[Any], data: Any, what: str) -> None:
    """Refuse `data` unless it has the fields of `kind` and no other; those with a default may be missing."""
    if not isinstance(data, dict):
        raise ValueError(f"{path}: {what} is not an object")
    names = {field.name for field in fields(kind)}
    needed = {field.name for field in fields(kind) if field.default is MISSING}
    for wrong, state in ((set(data) - names, "is not known"), (needed - set(data), "is missing")):
        if wrong:
            raise ValueError(f"{path}: field {min(wrong)!r} of {what} {state}")
