"""Arguments of a TensorRT-LLM build: all are named, and only such as every stratum of its API takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from build_scripts.spec import BuildError
from build_scripts.trtllm.recipe import (
    ENUMS,
    NOT_NAMED,
    WITHOUT_FLAG,
    build_arguments,
    cli_line,
    convert_arguments,
    fill,
)
from build_scripts.trtllm.spec import EngineName, TrtLlmSpec, trtllm_spec
from engines.trtllm_profiles import profile_ranges

SURFACE = Path(__file__).parents[3] / "shared" / "trtllm_api" / "surface.json"
OWN_TABLE = Path(__file__).parents[1] / "executor_fakes" / "surface.json"  # the project's own, by stratum
STRATA = ("S1", "S2", "S3")  # any of which may be what 1.2.1 has
PATHS: dict[str, str | None] = {
    "checkpoint": "a",
    "converted": "b",
    "engine": "c",
    "timing_cache_in": None,
    "timing_cache_out": "d",
    "calibration_set": "e",
}
BUILDS = [(engine, plugin) for engine in EngineName for plugin in (True, False)]


def spec(model: str = "Qwen2.5-7B", **options: Any) -> TrtLlmSpec:
    return trtllm_spec(model, Path("bundles"), **options)


SPECS = [
    spec(),
    spec("Llama-3.1-8B-Instruct", dtype="float16", requests_max=4, pass_tokens_max=2048),
    spec("Qwen2.5-32B", quantisation="fp8"),
    spec("Qwen2.5-14B", quantisation="fp8", calibration_text=Path("texts.txt"), separate_lp=True),
]


@pytest.fixture(scope="module")
def surface() -> dict[str, Any]:
    if not SURFACE.is_file():
        pytest.skip("the record of TensorRT-LLM's API is not beside this checkout")
    data: dict[str, Any] = json.loads(SURFACE.read_text(encoding="utf-8"))
    return data


def symbol(surface: dict[str, Any], stratum: str, name: str) -> dict[str, Any]:
    found = [s for s in surface["symbols"] if (s["stratum"], s["name"]) == (stratum, name)]
    assert len(found) == 1
    return dict(found[0])


def fields(surface: dict[str, Any], stratum: str, name: str) -> dict[str, str]:
    return {f["name"]: f["default"] for f in symbol(surface, stratum, name)["fields"]}


def parameters(surface: dict[str, Any], name: str, method: str) -> set[str]:
    """Of a class method in S0, the only stratum whose models were read."""
    (found,) = (m for m in symbol(surface, "S0", name)["methods"] if m["name"] == method)
    return {p["name"] for p in found["params"]}


@pytest.mark.parametrize("case", SPECS)
@pytest.mark.parametrize(("engine", "plugin"), BUILDS)
def test_every_field_is_named_and_exists_everywhere(
    surface: dict[str, Any], case: TrtLlmSpec, engine: EngineName, plugin: bool
) -> None:
    recipe = build_arguments(case, engine, plugin)
    build = set(fields(surface, "S1", "BuildConfig")) - {"auto_parallel_config"}  # gone in S2 and S3
    assert set(recipe["build_config"]) <= build
    assert build - set(recipe["build_config"]) - {"plugin_config"} <= set(NOT_NAMED)
    oldest, newer = (set(fields(surface, stratum, "PluginConfig")) for stratum in ("S0", "S2"))
    assert set(recipe["plugin_config"]) <= oldest & newer
    assert newer - set(recipe["plugin_config"]) <= set(NOT_NAMED)
    assert set(recipe["load"]) <= parameters(surface, "PretrainedModel", "from_checkpoint")


@pytest.mark.parametrize("stratum", STRATA)
@pytest.mark.parametrize("case", SPECS)
@pytest.mark.parametrize(("engine", "plugin"), BUILDS)
def test_each_stratum_takes_every_argument(
    stratum: str, case: TrtLlmSpec, engine: EngineName, plugin: bool
) -> None:
    table = json.loads(OWN_TABLE.read_text(encoding="utf-8"))
    mine = {entry["name"]: entry for entry in table["symbols"] if stratum in entry["strata"]}

    def takes(name: str) -> set[str]:
        return {parameter[0] for parameter in mine[name]["params"]}

    def method(name: str, called: str) -> set[str]:
        return {parameter[0] for parameter in mine[name]["methods"][called]}

    build, convert = build_arguments(case, engine, plugin), convert_arguments(case)
    assert set(build["build_config"]) | {"plugin_config"} <= takes("BuildConfig")
    assert set(build["plugin_config"]) <= takes("PluginConfig")
    assert set(build["load"]) <= method("PretrainedModel", "from_checkpoint")
    assert set(convert["mapping"]) <= takes("Mapping")
    assert set(convert["quant_config"] or {}) <= takes("QuantConfig")
    given = {*convert["arguments"], "mapping", "quant_config"}
    assert given <= method(convert["model_class"], convert["call"])
    assert set(convert["save"] or {}) <= method("PretrainedModel", "save_checkpoint")


def test_what_differs_from_a_default_was_chosen(surface: dict[str, Any]) -> None:
    """A slip of the pen in a field that nobody chose would show here."""
    defaults = {**fields(surface, "S1", "BuildConfig"), **fields(surface, "S2", "PluginConfig")}
    recipe = build_arguments(spec(), EngineName.SP, False)
    named = {**recipe["build_config"], **recipe["plugin_config"]}
    differing = {name for name, value in named.items() if repr(value) != defaults[name]}
    assert differing == {
        "max_input_len", "max_seq_len", "max_batch_size", "kv_cache_type", "input_timing_cache",
        "output_timing_cache", "dtype", "nccl_plugin", "use_fp8_context_fmha", "multiple_profiles",
    }  # fmt: skip


@pytest.mark.parametrize("case", SPECS)
def test_conversion_calls_what_both_model_classes_have(surface: dict[str, Any], case: TrtLlmSpec) -> None:
    recipe = convert_arguments(case)
    allowed = parameters(surface, recipe["model_class"], recipe["call"])
    given = {*recipe["arguments"], "mapping", "quant_config"}
    assert given <= allowed
    if recipe["save"] is not None:
        assert set(recipe["save"]) <= parameters(surface, "PretrainedModel", "save_checkpoint")


@pytest.mark.parametrize("case", SPECS)
@pytest.mark.parametrize(("engine", "plugin"), BUILDS)
def test_a_command_has_known_flags_and_says_the_same(
    surface: dict[str, Any], case: TrtLlmSpec, engine: EngineName, plugin: bool
) -> None:
    listed = {flag for entry in surface["cli"]["trtllm-build"]["S0"] for flag in entry["flags"]}
    recipe = build_arguments(case, engine, plugin)
    plugins = {f"--{name}": value for name, value in recipe["plugin_config"].items()}
    name, *words = cli_line(case, engine, plugin)
    assert name == "trtllm-build"
    flags = dict(zip(words[::2], words[1::2], strict=True))
    assert set(flags) <= listed | set(plugins)
    for field in WITHOUT_FLAG:
        assert f"--{field}" not in listed
    known = {f"--{name}": value for name, value in recipe["build_config"].items()} | plugins
    for flag, value in flags.items():
        if flag not in ("--checkpoint_dir", "--output_dir"):
            wanted = known[flag]
            switch = "enable" if wanted is True else "disable"
            assert value.lower() == (
                switch if wanted is None or isinstance(wanted, bool) else str(wanted).lower()
            )
    defaults = fields(surface, "S1", "BuildConfig") | fields(surface, "S2", "PluginConfig")
    unsaid = {
        flag for flag, value in known.items() if flag not in flags and repr(value) != defaults[flag[2:]]
    }
    assert unsaid <= {"--dtype", "--opt_batch_size"}  # the first is the build's own; the second has no flag


@pytest.mark.parametrize("case", SPECS)
@pytest.mark.parametrize(("engine", "plugin"), BUILDS)
def test_a_recipe_is_json_and_all_its_paths_can_be_filled(
    case: TrtLlmSpec, engine: EngineName, plugin: bool
) -> None:
    for recipe in (convert_arguments(case), build_arguments(case, engine, plugin)):
        assert json.loads(json.dumps(recipe)) == recipe
        assert "{" not in json.dumps(list(_strings(fill(recipe, PATHS))))


def _strings(value: Any) -> Any:
    for item in value.values() if isinstance(value, dict) else [value]:
        if isinstance(item, dict):
            yield from _strings(item)
        elif isinstance(item, str):
            yield item


def test_a_path_that_is_not_given_is_named() -> None:
    with pytest.raises(KeyError, match="converted"):
        fill(build_arguments(spec(), EngineName.SP, True), {"engine": "c"})


def test_recipes_know_no_machine() -> None:
    here = spec("Qwen2.5-14B", quantisation="fp8", calibration_text=Path("x.txt"), checkpoint=Path("ckpt"))
    there = spec(
        "Qwen2.5-14B",
        quantisation="fp8",
        calibration_text=Path("far/y.txt"),
        checkpoint=Path("far"),
        python=Path("py"),
        publish="s3://bucket",
    )
    assert convert_arguments(here) == convert_arguments(there)
    assert build_arguments(here, EngineName.SP, True) == build_arguments(there, EngineName.SP, True)


@pytest.mark.parametrize("case", SPECS)
@pytest.mark.parametrize(("engine", "plugin"), BUILDS)
def test_what_the_executor_and_block_reuse_rest_on(
    case: TrtLlmSpec, engine: EngineName, plugin: bool
) -> None:
    recipe = build_arguments(case, engine, plugin)
    build, plugins = recipe["build_config"], recipe["plugin_config"]
    fp8 = case.quantisation == "fp8"
    assert build["kv_cache_type"] == "PAGED"
    assert not build["gather_context_logits"]  # it would turn reuse off
    assert plugins["use_paged_context_fmha"]
    assert plugins["remove_input_padding"]
    assert plugins["context_fmha"]
    assert plugins["gpt_attention_plugin"] == "auto"
    assert plugins["use_fp8_context_fmha"] is fp8
    assert plugins["multiple_profiles"] is (engine is EngineName.SP)
    # "auto" is the model's own type, and would leave FP8 matmuls to TensorRT
    assert plugins["gemm_plugin"] == (None if not plugin else "fp8" if fp8 else "auto")
    assert plugins["tokens_per_block"] == case.block_tokens
    assert build["max_input_len"] < build["max_seq_len"] == case.context_tokens_max
    profile_ranges(  # as the builder would make them: refused where malformed
        build["max_num_tokens"],
        multiple=plugins["multiple_profiles"],
        opt_num_tokens=build["opt_num_tokens"],
        requests_max=build["max_batch_size"],
    )


def test_enum_names_are_those_of_fields_that_take_them() -> None:
    named = {
        *build_arguments(spec(), EngineName.SP, True)["build_config"],
        *convert_arguments(spec(quantisation="fp8"))["quant_config"],
    }
    assert set(ENUMS) <= named


def test_a_pass_that_is_clipped_to_nothing_useful_is_a_build_error() -> None:
    small = spec(context_tokens_max=64, requests_max=1, lengths=(8,), batches=(1,))
    with pytest.raises(BuildError, match="pass_tokens_max is 64"):
        build_arguments(small, EngineName.SP, True)
    assert build_arguments(small, EngineName.LP, True)["build_config"]["max_num_tokens"] == 64
