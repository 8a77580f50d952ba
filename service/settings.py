"""Settings: flags over environment over file over defaults, one frozen group per component.

    PLASERVE_SERVER__PORT=9000            environment, groups joined by two underscores
    [server] port = 9000                  TOML file, named by --config or PLASERVE_CONFIG

Unknown keys are errors, in the file and in the environment: pydantic-settings ignores unknown environment
variables whatever `extra` says, so the prefix is checked here. A bad value fails the start and names its key.
A component is handed its own group, never the whole.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from engines.executor.types import CancelMode
from service.core.settings import SchedulerSettings
from service.fleet.settings import FleetSettings
from service.policies import POLICIES, parse

PREFIX = "PLASERVE_"
CONFIG_VARIABLE = "PLASERVE_CONFIG"
OTHER_VARIABLES = frozenset(
    {CONFIG_VARIABLE, "PLASERVE_TRACES", "PLASERVE_DYNAMO_PYTHON", "PLASERVE_TRTLLM_PYTHON"}
)  # no settings


class SettingsError(Exception):
    """A setting is unknown or bad; the message names its key."""


class _Group(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ServerSettings(_Group):
    """The gRPC surface."""

    host: str = Field("127.0.0.1", description="Address to listen on; loopback, as there is no TLS yet.")
    port: int = Field(8081, ge=0, le=65535, description="gRPC port; 0 picks a free one.")
    message_bytes_max: int = Field(4 << 20, ge=1024, description="Largest message taken, gRPC's own default.")
    calls_max: int = Field(
        4096, ge=1, description="Calls open at a time, above what the queue takes: clients that never read."
    )
    drain_timeout_s: float = Field(
        20.0, ge=0, description="On SIGTERM: seconds to finish what runs; below the 30 s of Kubernetes."
    )


SimulatedPreset = Literal["h200_32b", "h200_32b_sp", "small_cpu", "padded_grid", "trtllm_like"]


class EngineSettings(_Group):
    """Which engine runs, and how."""

    backend: Literal["openvino_cpu", "simulated", "trtllm", "trtllm_torch", "triton_server"] = Field(
        "openvino_cpu",
        description="What runs passes: openvino_cpu, simulated, trtllm, trtllm_torch or triton_server.",
    )
    bundle: Path = Field(
        Path("bundles/SmolLM2-135M-Instruct"), description="Bundle directory (all but simulated)."
    )
    lp_bundle: Path | None = Field(
        None,
        description="Bundle of an engine of its own for workers of role LP; the same one: its lp/ engine. "
        "Unset: one engine serves both lanes.",
    )
    threads: int | None = Field(
        None,
        ge=1,
        description="Engine threads (openvino_cpu); unset: those that the bundle was calibrated for.",
    )
    kv_capacity_tokens: int = Field(
        32_768, ge=32, description="Tokens of KV memory (openvino_cpu); 23 kB each for the embedded model."
    )
    simulated_preset: SimulatedPreset = Field(
        "h200_32b", description="Cost model and capabilities (simulated)."
    )
    simulated_lp_preset: SimulatedPreset | None = Field(
        None, description="Those of an engine of its own for workers of role LP (simulated)."
    )
    simulated_load_s: float = Field(
        0.0, ge=0, description="Seconds that loading an engine takes (simulated)."
    )
    simulated_time_scale: float = Field(
        1.0, gt=0, description="Wall seconds per predicted second (simulated)."
    )


class ExecutorOptions(_Group):
    """An executor that forms its own batches: trtllm, trtllm_torch, triton_server."""

    python: Path | None = Field(
        None, description="Interpreter of TensorRT-LLM's environment (trtllm, trtllm_torch)."
    )
    device: int = Field(0, ge=0, description="Which of the visible GPUs (trtllm, trtllm_torch).")
    log: Path = Field(Path("var/executor.log"), description="What the child process prints goes here.")
    cancel: CancelMode = Field(
        CancelMode.ENGINE,
        description="`engine`: a cancelled request is stopped; `unheard`: it runs to its end and nobody "
        "listens, for builds that crash on an abort.",
    )
    start_timeout_s: float = Field(600.0, gt=0, description="Until the engine is loaded and answers.")
    pass_timeout_s: float = Field(60.0, gt=0, description="A pass that takes longer has failed.")
    progress_timeout_s: float = Field(
        20.0, gt=0, description="Requests wait and nothing runs for so long: the executor is restarted."
    )
    restarts_max: int = Field(3, ge=0, description="Within 10 minutes; more, and the service ends.")


class TritonSettings(_Group):
    """The server behind backend triton_server."""

    url: str = Field("127.0.0.1:8001", description="host:port of its gRPC service, or unix:path.")
    model: str = Field("tensorrt_llm", min_length=1, description="Name of the model in its repository.")
    ca: Path | None = Field(None, description="Root certificates, PEM; with it TLS is used.")
    key: Path | None = Field(None, description="Private key of a client certificate, PEM.")
    chain: Path | None = Field(None, description="Client certificate chain, PEM.")
    allow_plaintext: bool = Field(False, description="Speak to another machine without TLS.")


def _with_commas(value: Any) -> Any:
    named = isinstance(value, list | tuple) and value and all(isinstance(name, str) for name in value)
    return ",".join(value) if named else value


class FleetOptions(FleetSettings):
    """This process in its fleet; what `serve` needs none of."""

    shard: Annotated[str, BeforeValidator(_with_commas)] = Field(
        "default",
        pattern=r"^(\*|[A-Za-z0-9._:@-]{1,100}(,[A-Za-z0-9._:@-]{1,100})*)$",
        description="The shard that this process belongs to. A front end may have several, as a list or with "
        "commas, or * for all. A worker is started for it and may be moved to another.",
    )
    member_id: str = Field(
        "",
        pattern=r"^[A-Za-z0-9._:@-]{0,100}$",
        description="Its name in the fleet; empty: its kind and host name, which is one a host.",
    )
    listen: str = Field(
        "127.0.0.1:0", description="host:port for the other processes; port 0 picks one. A controller: 8083."
    )
    advertise: str = Field("", description="Host that others reach it by; empty: that of `listen`.")
    link_authority: Path | None = Field(
        None, description="PEM: who signed the certificates of the fleet's processes; with it links are TLS."
    )
    link_certificate: Path | None = Field(None, description="PEM: certificate chain of this process.")
    link_key: Path | None = Field(None, description="PEM: its private key.")
    link_server_name: str = Field("", description="Name in the others' certificates; empty: their address.")
    health_port: int = Field(0, ge=0, le=65_535, description="Plaintext port for health probes; 0: none.")
    health_host: str = Field("127.0.0.1", description="Host that health probes are answered on.")
    dry_run: bool = Field(False, description="The controller only says what it would do.")
    move_drain_s: float = Field(
        30.0,
        ge=0,
        description="A worker that is to load another engine for its role, or to go to another shard: how "
        "long its requests may go on.",
    )
    move_load_s: float = Field(
        900.0, gt=0, description="And how long it may load and verify; then its process ends."
    )

    @property
    def shards(self) -> tuple[str, ...]:
        return tuple(self.shard.split(","))

    @model_validator(mode="after")
    def _link_files_together(self) -> Self:
        given = [self.link_authority, self.link_certificate, self.link_key]
        if any(path is not None for path in given) and any(path is None for path in given):
            raise ValueError("link_authority, link_certificate and link_key go together")
        return self


class LimitSettings(_Group):
    """Bounds on one request, checked before it costs anything."""

    text_bytes_max: int = Field(
        262_144, ge=1, description="UTF-8 bytes of a prompt, checked before tokenising."
    )
    prompt_tokens_max: int = Field(
        131_072, ge=1, description="Token ids of a prompt, checked first; the engine's context may be less."
    )
    chat_messages_max: int = Field(1024, ge=1, description="Messages of a chat.")
    max_tokens_default: int = Field(128, ge=1, description="Answer length where a request names none.")
    max_tokens_max: int = Field(2048, ge=1, description="Longest answer that may be asked for.")
    name_chars_max: int = Field(64, ge=1, description="Characters of tenant, session and request_id.")
    stop_count_max: int = Field(4, ge=0, description="Stop texts of one request, as in the OpenAI API.")
    stop_chars_max: int = Field(64, ge=1, description="Characters of one stop text.")
    ttft_slo_s_max: float = Field(3600.0, gt=0, description="Longest target for the first token.")
    priority_max: int = Field(10, ge=0, description="Priorities go from minus this to this.")
    tokenizer_threads: int = Field(1, ge=1, description="Threads for tokenising, beside the event loop.")
    tokenizer_queue_max: int = Field(512, ge=1, description="Requests waiting to be tokenised; then refused.")


class TelemetryOptions(_Group):
    """Traces and metrics."""

    metrics: bool = Field(True, description="Serve Prometheus metrics.")
    metrics_host: str = Field("127.0.0.1", description="Address of the metrics endpoint.")
    metrics_port: int = Field(9464, ge=0, le=65535, description="Its port, OpenTelemetry's usual one.")
    otlp_endpoint: str = Field("", description="OTLP gRPC collector, host:port; empty: no traces.")
    sample_ratio: float = Field(
        1.0, ge=0, le=1, description="Share of traces kept where the caller decides not."
    )
    service_name: str = Field("plaserve", min_length=1, description="service.name of traces.")


def _known_knobs(value: Any) -> Any:
    if isinstance(value, dict):
        known = {field.name for field in fields(SchedulerSettings)}
        unknown = sorted(set(value) - known)
        if unknown:
            raise ValueError(f"unknown key {unknown[0]!r}")
        if "tenant_weights" in value:
            return {**value, "tenant_weights": _pairs(value["tenant_weights"])}
    return value


def _pairs(weights: Any) -> Any:
    """Of a table in a file, or of a JSON object in the environment."""
    if isinstance(weights, str):
        try:
            weights = json.loads(weights)
        except ValueError:
            weights = None
        if not isinstance(weights, dict):
            raise ValueError('tenant_weights must be a JSON object in the environment, {"gold": 4}')
    return tuple(weights.items()) if isinstance(weights, dict) else weights


class Settings(BaseSettings):
    """Everything that can be set."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True
    )

    policy: str = Field("plaserve", description="Scheduling policy: " + ", ".join(POLICIES) + ".")
    server: ServerSettings = ServerSettings()
    engine: EngineSettings = EngineSettings()
    executor: ExecutorOptions = ExecutorOptions()
    triton: TritonSettings = TritonSettings()
    fleet: FleetOptions = FleetOptions()
    scheduler: Annotated[SchedulerSettings, BeforeValidator(_known_knobs)] = SchedulerSettings()
    limits: LimitSettings = LimitSettings()
    telemetry: TelemetryOptions = TelemetryOptions()

    @field_validator("policy")
    @classmethod
    def _policy_exists(cls, value: str) -> str:
        """With knobs of its own where wanted, `plaserve:period_s=2`."""
        if value.partition(":")[0] not in POLICIES:
            raise ValueError(f"choose from {', '.join(POLICIES)}")
        parse(value, SchedulerSettings())
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)


def load_settings(config: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Settings:
    """Read settings; `overrides` maps dotted keys to values, None meaning not given.

    Raises SettingsError naming the key and where it came from.
    """
    path = config or (Path(os.environ[CONFIG_VARIABLE]) if os.environ.get(CONFIG_VARIABLE) else None)
    if path is not None:
        _check_file(path)
    _check_environment(os.environ)
    given: dict[str, Any] = {}
    for dotted, value in (overrides or {}).items():
        group, _, name = dotted.rpartition(".")
        if value is not None:
            (given.setdefault(group, {}) if group else given)[name] = value

    class FromFile(Settings):
        model_config = SettingsConfigDict(**{**Settings.model_config, "toml_file": path})

    try:
        return FromFile(**given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        message = str(first["msg"]).removeprefix("Value error, ")
        raise SettingsError(f"{key}: {message} (got {first['input']!r})") from error


def scheduler_environment(settings: SchedulerSettings) -> dict[str, str]:
    """The variables that make a process schedule by `settings`, whatever else its environment says."""
    given = {item.name: str(getattr(settings, item.name)) for item in fields(settings)}
    given["tenant_weights"] = json.dumps(dict(settings.tenant_weights))
    return {f"PLASERVE_SCHEDULER__{name.upper()}": value for name, value in given.items()}


def known_keys() -> dict[str, set[str]]:
    """Group -> its keys; the group "" holds the keys that stand alone."""
    keys: dict[str, set[str]] = {"": set()}
    for name, field in Settings.model_fields.items():
        if name == "scheduler":
            keys[name] = {knob.name for knob in fields(SchedulerSettings)}
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys[name] = set(field.annotation.model_fields)
        else:
            keys[""].add(name)
    return keys


def _check_environment(environment: Mapping[str, str]) -> None:
    keys = known_keys()
    for variable in sorted(environment):
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES:
            continue
        group, _, name = variable[len(PREFIX) :].lower().rpartition("__")
        if name not in keys.get(group, set()):
            groups = ", ".join(sorted(g for g in keys if g))
            raise SettingsError(
                f"environment variable {variable}: no such setting; "
                f"use {PREFIX}<GROUP>__<NAME> with a group of {groups}"
            )


def _check_file(path: Path) -> None:
    """pydantic-settings skips a missing file in silence; and TOML errors should name the file."""
    try:
        tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"config file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"config file {path}: not valid TOML: {error}") from error
