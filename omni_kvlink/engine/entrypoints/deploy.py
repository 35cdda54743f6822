"""`DeployConfig`: a deployment of several stages, read from vLLM-Omni's deploy files (YAML).

    pipeline: bagel
    stages:
      - stage_id: 0
        devices: "0"
        max_num_seqs: 3
        default_sampling_params: {seed: 52}
      - stage_id: 1
        devices: "0"
        input_connectors: {from_stage_0: shared_memory_connector}
    connectors:
      shared_memory_connector: {name: SharedMemoryConnector}

Fields on which neither a result nor a placement depends (`gpu_memory_utilization`, …) are listed in
`ignored`; any other field that this engine has no use for is an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from omni_kvlink.engine.config import (
    DiffusionParallelConfig,
    KVTransferConfig,
    LoRAConfig,
    OmniARConfig,
    OmniDiffusionConfig,
)
from omni_kvlink.engine.entrypoints.deploy_fields import (
    is_default,
    unused_fields,
    unused_sampling,
)
from omni_kvlink.engine.entrypoints.deploy_files import (
    PIPELINES,
    flat,
    pipeline_of_class,
    read_deploy_file,
    with_pipeline,
)
from omni_kvlink.engine.lora.request import LoRARequest
from omni_kvlink.engine.sampling import (
    PIPELINE_PARAMS,
    TEXT_PARAMS,
    OmniDiffusionSamplingParams,
)
from omni_kvlink.errors import SchemaError
from omni_kvlink.settings import Instance, Json, ListOf, MapOf, Settings, Text, check_names, rules

_NO_FIELDS = {
    *("model", "stage", "parallel_config", "distributed_timeout", "num_blocks", "think"),
    *("device_numbers", "lora_config", "kv_transfer"),
}


def _fields(*kinds: type[Any]) -> frozenset[str]:
    return frozenset(field.name for kind in kinds for field in dataclasses.fields(kind))


_NESTED = DiffusionParallelConfig, LoRAConfig
_SETTINGS = {
    "ar": _fields(OmniARConfig, *_NESTED) | {"num_gpu_blocks_override", "static_lora_scale"},
    "dit": _fields(OmniDiffusionConfig, *_NESTED) | {"static_lora_scale"},
}
_SETTINGS = {kind: (names | {"own_process"}) - _NO_FIELDS for kind, names in _SETTINGS.items()}
_SETTINGS["diffusers"] = _SETTINGS["dit"]
_SETTINGS["dit"] -= {"vae_use_slicing"}
_SETTINGS["all"] = _SETTINGS["dit"]
"""Fields of a stage that are settings of this engine, by the stage's kind."""

Map: TypeAlias = Annotated[dict[str, Any], MapOf(Json())]
Names: TypeAlias = Annotated[dict[str, str], MapOf(Text(filled=True))]
_ANY_NUMBER = ("auto", "cpu", "cuda")
_TOP = {"pipeline", "stages", "connectors", "edges"}
_EVERY_STAGE = {
    *("dtype", "distributed_executor_backend", "quantization", "data_parallel_size"),
    *("pipeline_parallel_size", "trust_remote_code", "enable_prefix_caching"),
    *("enable_chunked_prefill", "model_class_name"),
}
"""Fields of the deployment that are each stage's, unless the stage has its own."""


@dataclasses.dataclass(frozen=True)
class ConnectorSettings(Settings):
    """One entry under `connectors:`: the name of a kind of connector, and its settings."""

    name: str
    extra: Map = field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class KVCriteriaSettings(Settings):
    """The moment at which a stage sends its KV."""

    type: Literal["prefill_finished"] = "prefill_finished"


@dataclasses.dataclass(frozen=True)
class OmniKVConfig(Settings):
    """`omni_kv_config:`, which may say what holds anyway: a stage sends to the next one."""

    need_send_cache: bool | None = None
    need_recv_cache: bool | None = None
    kv_transfer_criteria: KVCriteriaSettings | None = None


@dataclasses.dataclass(frozen=True)
class KVTransferSettings(Settings):
    """`kv_transfer_config:` of an AR stage, in vLLM's words, for a `KVTransferConfig`."""

    kv_role: Literal["kv_producer", "kv_consumer"]
    kv_connector: Literal["OmniKVLinkConnector"] = "OmniKVLinkConnector"
    kv_connector_extra_config: Map = field(default_factory=dict)  # its `url`, `peers`, …


@dataclasses.dataclass(frozen=True)
class StageSettings(Settings):
    """The fields of an entry under `stages:` that are no settings of the stage's engine."""

    stage_id: int
    devices: Annotated[Any, Json()] | None = None
    env: Map = field(default_factory=dict)
    input_connectors: Names = field(default_factory=dict)
    output_connectors: Names = field(default_factory=dict)
    omni_kv_config: OmniKVConfig = field(default_factory=OmniKVConfig)
    kv_transfer_config: KVTransferSettings | None = None
    engine_input_source: tuple[int, ...] = ()
    default_sampling_params: Annotated[dict[str, Any], Instance(dict)] = field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class StageDeploy:
    """One entry under `stages:`.

    `kind` is "ar", "dit", "all" or "diffusers"; `devices` are such as "0,1"; `connector` brings its
    KV, and is None for the first stage; `sampling` has defaults of the sampling params, `settings`
    the other fields in use here, `environment` variables of the stage's process.
    """

    stage_id: int
    kind: str
    devices: str
    connector: ConnectorSettings | None
    sampling: dict[str, Any]
    settings: dict[str, Any]
    environment: dict[str, str]
    ignored: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class DeployConfig:
    """All stages of one of the `PIPELINES`, in the order of their ids."""

    pipeline: str
    stages: tuple[StageDeploy, ...]

    @classmethod
    def load(cls, path: str | Path) -> DeployConfig:
        """Read a file, and its `base_config`; SchemaError names the file and the wrong field."""
        values = read_deploy_file(Path(path))
        try:
            return cls.from_dict(values)
        except SchemaError as error:
            raise SchemaError(f"{Path(path).name}: {error}") from None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DeployConfig:
        """Check what a YAML parser returned; raises SchemaError as `load`."""
        values = flat(values)
        pipeline = values.get("pipeline", pipeline_of_class(values))
        if pipeline not in PIPELINES:
            reason = f"pipeline {pipeline!r}" if "pipeline" in values else "no pipeline is named"
            raise SchemaError(f"{reason}; this engine runs {', '.join(PIPELINES)}")
        other_fields = {name: values[name] for name in values.keys() - _TOP - _EVERY_STAGE}
        unused_fields("", other_fields, "the deployment", _TOP | _EVERY_STAGE)
        connectors = _connectors(values.get("connectors") or {})
        entries = values.get("stages")
        if not isinstance(entries, list) or not entries:
            raise SchemaError("stages: a list with at least one stage is needed")
        entries = sorted(entries, key=lambda entry: entry["stage_id"])
        ids = [entry["stage_id"] for entry in entries]
        if ids != list(range(len(entries))):
            raise SchemaError(f"stage_ids {ids}: they must be 0, 1, …")
        _check_edges(values.get("edges") or [], len(entries))
        kinds = PIPELINES[pipeline].split(", ")
        if len(entries) > 1 and kinds in (["all"], ["diffusers"]):
            raise SchemaError(f"{pipeline} has one stage, not {len(entries)}")
        shared_fields = {name: values[name] for name in values.keys() & _EVERY_STAGE}
        stages, previous = list[StageDeploy](), None
        for number, fields in enumerate(entries):
            own_fields = {name: fields[name] for name in fields if name in rules(StageSettings)}
            entry = StageSettings.read(_given(own_fields), f"stage {number}: ")
            is_last = number == len(entries) - 1
            connector = _connector(entry, previous, connectors, is_last=is_last)
            _check_kv(entry, is_last=is_last)
            other_fields = {n: v for n, v in fields.items() if n not in own_fields}
            kind = kinds[min(number, len(kinds) - 1)]
            settings, kind = with_pipeline(
                {**shared_fields, **other_fields}, kind, pipeline, number
            )
            stages.append(_stage(entry, settings, kind, connector))
            previous = entry
        return cls(pipeline, tuple(stages))

    def overridden(self, overrides: Mapping[str, Any]) -> DeployConfig:
        """Return the deployment with fields that replace those of every stage that has them.

        Raises SchemaError if no stage has a field.
        """
        settings = set[str]().union(*(_SETTINGS[kind] for kind in self.kinds()))
        unknown = sorted(overrides.keys() - settings)
        if unknown:
            names = ", ".join(sorted(settings))
            raise SchemaError(f"no stage has {', '.join(unknown)}; there are {names}")
        stages = [
            dataclasses.replace(
                stage,
                settings={
                    **stage.settings,
                    **{name: overrides[name] for name in overrides.keys() & _SETTINGS[stage.kind]},
                },
            )
            for stage in self.stages
        ]
        return dataclasses.replace(self, stages=tuple(stages))

    def kinds(self) -> list[str]:
        """The kind of each stage: "ar", "dit", "all" or "diffusers"."""
        return [stage.kind for stage in self.stages]


def _given(values: Any) -> Any:
    """A map without the keys that have no value, such as `env:`."""
    if not isinstance(values, Mapping):
        return values
    return {name: value for name, value in values.items() if value is not None}


def _connectors(entries: Any) -> dict[str, ConnectorSettings]:
    if not isinstance(entries, Mapping):
        raise SchemaError(f"connectors: a map is needed, not {entries!r:.100}")
    return {
        name: ConnectorSettings.read(_given(spec), f"connectors.{name}.")
        for name, spec in entries.items()
    }


def _connector(
    entry: StageSettings,
    previous: StageSettings | None,
    connectors: Mapping[str, ConnectorSettings],
    *,
    is_last: bool,
) -> ConnectorSettings | None:
    """The connector over which a stage receives, as it and the stage before it name it."""
    number, names = entry.stage_id, set(entry.input_connectors.values())
    _check_ends(number, "input_connectors", entry.input_connectors, "from", number - 1)
    following = -1 if is_last else number + 1
    _check_ends(number, "output_connectors", entry.output_connectors, "to", following)
    if previous is not None:
        names |= set(previous.output_connectors.values())
    if len(names) > 1:
        raise SchemaError(
            f"stage {number}: it receives over {' or '.join(sorted(names))}; "
            f"output_connectors of stage {number - 1} and its own input_connectors differ"
        )
    for name in names:
        if name not in connectors:
            raise SchemaError(f"stage {number}: no connector {name!r} under connectors:")
    return connectors[names.pop()] if names else None


def _check_ends(number: int, field: str, names: Mapping[str, str], word: str, other: int) -> None:
    """Raise SchemaError if a field names an end at a stage that is not `other`; -1 allows none."""
    end = "" if other < 0 else f"{word}_stage_{other}"
    if unknown := sorted(names.keys() - {end}):
        hint = f"only {end} is known" if end else "there is no such stage"
        raise SchemaError(f"stage {number}: {field} {unknown}; {hint}")


def _check_edges(edges: Any, stages: int) -> None:
    """Raise SchemaError unless each edge goes from a stage to the next."""
    for edge in ListOf(MapOf(Json())).read(edges, "edges"):
        ends = edge.get("from"), edge.get("to")
        if ends not in [(number, number + 1) for number in range(stages - 1)]:
            raise SchemaError(f"an edge from {ends[0]} to {ends[1]}: a stage is read by the next")
        other_fields = {name: value for name, value in edge.items() if name not in ("from", "to")}
        unused_fields("", other_fields, f"the edge from {ends[0]} to {ends[1]}")


def _check_kv(entry: StageSettings, *, is_last: bool) -> None:
    """Raise SchemaError if the KV's settings contradict that each stage hands on to the next."""
    number, source = entry.stage_id, entry.engine_input_source
    if source not in ((), (number - 1,) if number else ()):
        raise SchemaError(
            f"stage {number}: engine_input_source {[*source]}: it is the stage before"
        )
    for name, value in (("need_send_cache", not is_last), ("need_recv_cache", number > 0)):
        given = getattr(entry.omni_kv_config, name)
        if given not in (None, value):
            raise SchemaError(
                f"stage {number}: omni_kv_config has {name} {given!r}; here a stage sends to the "
                "next one, and nothing else can be set; remove it"
            )


def _kv_transfer(spec: KVTransferSettings, kind: str, location: str) -> KVTransferConfig:
    """The settings of `kv_transfer_config:`."""
    location += ": kv_transfer_config"
    if kind != "ar":
        raise SchemaError(
            f"{location}: of an AR stage alone; this stage's KV comes over its input_connectors: "
            "remove it"
        )
    extra, prefix = spec.kv_connector_extra_config, f"{location}.kv_connector_extra_config."
    check_names(extra, rules(KVTransferConfig).keys() - {"kv_role"}, prefix)
    return KVTransferConfig.read({**extra, "kv_role": spec.kv_role}, prefix)


def _stage(
    entry: StageSettings, fields: Mapping[str, Any], kind: str, connector: ConnectorSettings | None
) -> StageDeploy:
    location = f"stage {entry.stage_id}"
    if entry.devices not in (None, "") and fields.get("device", "auto") not in _ANY_NUMBER:
        raise SchemaError(f"{location}: devices, and device {fields['device']!r}: one of them")
    sampling, unused = _sampling(entry.default_sampling_params, kind, location)
    settings = {
        name: fields[name]
        for name in sorted(fields.keys() & _SETTINGS[kind])
        if not is_default(kind, name, fields[name])
    }
    other_fields = {name: fields[name] for name in fields.keys() - settings.keys()}
    if entry.kv_transfer_config is not None:
        settings["kv_transfer"] = _kv_transfer(entry.kv_transfer_config, kind, location)
    return StageDeploy(
        stage_id=entry.stage_id,
        kind=kind,
        devices=_devices(entry.devices, location),
        connector=connector,
        sampling=sampling,
        settings=settings,
        environment={name: str(value) for name, value in entry.env.items()},
        ignored=unused_fields(kind, other_fields, location, _SETTINGS[kind]) + unused,
    )


def _devices(devices: Any, location: str) -> str:
    text = "" if devices is None else str(devices).replace(" ", "")
    numbers = text.split(",") if text else []
    if len(set(numbers)) != len(numbers) or not all(number.isdecimal() for number in numbers):
        raise SchemaError(
            f'{location}: devices {devices!r}; numbers of different ones, such as "0,1"'
        )
    return text


def _sampling(
    params: Mapping[str, Any], kind: str, location: str
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Split `default_sampling_params` into those in use here, and the names of the others."""
    fields = {field.name for field in dataclasses.fields(OmniDiffusionSamplingParams)}
    used = {name: value for name, value in params.items() if name in fields - {"generator"}}
    of_texts = {"modalities", *TEXT_PARAMS}
    exclusions = {"ar": PIPELINE_PARAMS, "dit": of_texts, "diffusers": of_texts}
    used = {name: value for name, value in used.items() if name not in exclusions.get(kind, ())}
    try:
        if isinstance(used.get("lora_request"), Mapping):
            used["lora_request"] = LoRARequest(**used["lora_request"])
        OmniDiffusionSamplingParams(**used)
    except (TypeError, ValueError) as error:
        raise SchemaError(f"{location}: default_sampling_params: {error}") from None
    other_params = {name: params[name] for name in params.keys() - used.keys()}
    return used, unused_sampling(kind, other_params, location)
