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
from pathlib import Path
from typing import Any

from omni_kvlink.engine.config import (
    DiffusionParallelConfig,
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
from omni_kvlink.settings import Json, ListOf, MapOf, Text

_OWN = {
    *("stage_id", "devices", "env", "input_connectors", "output_connectors", "omni_kv_config"),
    *("engine_input_source", "default_sampling_params"),
}
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

_MAP = MapOf(Json())
_ANY_NUMBER = ("auto", "cpu", "cuda")
_TOP = {"pipeline", "stages", "connectors", "edges"}
_EVERY_STAGE = {
    *("dtype", "distributed_executor_backend", "quantization", "data_parallel_size"),
    *("pipeline_parallel_size", "trust_remote_code", "enable_prefix_caching"),
    *("enable_chunked_prefill", "model_class_name"),
}
"""Fields of the deployment that are each stage's, unless the stage has its own."""


@dataclasses.dataclass(frozen=True)
class ConnectorSpec:
    """One entry under `connectors:`: the name of a kind of connector, and its settings."""

    name: str
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


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
    connector: ConnectorSpec | None
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
        """Read a file, and its `base_config`; SchemaError names the field that is wrong."""
        return cls.from_dict(read_deploy_file(Path(path)))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DeployConfig:
        """Check what a YAML parser returned; raises SchemaError as `load`."""
        values = flat(values)
        pipeline = values.get("pipeline", pipeline_of_class(values))
        if pipeline not in PIPELINES:
            reason = f"pipeline {pipeline!r}" if "pipeline" in values else "no pipeline is named"
            raise SchemaError(f"{reason}; this engine runs {', '.join(PIPELINES)}")
        other_fields = {name: values[name] for name in values.keys() - _TOP - _EVERY_STAGE}
        unused_fields("", other_fields, "the deployment")
        connectors = _connectors(values.get("connectors") or {})
        entries = values.get("stages")
        if not isinstance(entries, list) or not entries:
            raise SchemaError("stages: a list with at least one stage is needed")
        entries = sorted(entries, key=lambda entry: entry["stage_id"])
        ids = [entry["stage_id"] for entry in entries]
        if ids != list(range(len(entries))):
            raise SchemaError(f"stage_ids {ids}: they must be 0, 1, …")
        _check_edges(values.get("edges") or [], len(entries))
        shared_fields = {name: values[name] for name in values.keys() & _EVERY_STAGE}
        kinds, stages = PIPELINES[pipeline].split(", "), list[StageDeploy]()
        if len(entries) > 1 and kinds in (["all"], ["diffusers"]):
            raise SchemaError(f"{pipeline} has one stage, not {len(entries)}")
        for number, raw_entry in enumerate(entries):
            entry, kind = raw_entry, kinds[min(number, len(kinds) - 1)]
            previous = entries[number - 1] if number else None
            is_last = number == len(entries) - 1
            connector = _connector(entry, previous, connectors, is_last=is_last)
            entry, kind = with_pipeline({**shared_fields, **entry}, kind, pipeline)
            stages.append(_stage(entry, kind, connector, is_last=is_last))
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


def _connectors(entries: Any) -> dict[str, ConnectorSpec]:
    if not isinstance(entries, Mapping):
        raise SchemaError(f"connectors: a map is needed, not {entries!r:.100}")
    connectors = {}
    for name, spec in entries.items():
        if not isinstance(spec, Mapping) or not isinstance(spec.get("name"), str):
            raise SchemaError(f"connector {name!r}: must be a map with the connector's name")
        extra = _MAP.read(spec.get("extra") or {}, f"connectors.{name}.extra")
        connectors[name] = ConnectorSpec(spec["name"], extra)
    return connectors


def _connector(
    entry: Mapping[str, Any],
    previous: Mapping[str, Any] | None,
    connectors: Mapping[str, ConnectorSpec],
    *,
    is_last: bool,
) -> ConnectorSpec | None:
    """The connector over which a stage receives, as it and the stage before it name it."""
    number = entry["stage_id"]
    _check_ends(entry, "input_connectors", "from", number - 1 if number else None)
    _check_ends(entry, "output_connectors", "to", None if is_last else number + 1)
    names = set(_names(entry, "input_connectors").values())
    if previous is not None:
        names |= set(_names(previous, "output_connectors").values())
    if len(names) > 1:
        raise SchemaError(
            f"stage {number}: it receives over {' or '.join(sorted(map(str, names)))}; "
            f"output_connectors of stage {number - 1} and its own input_connectors differ"
        )
    for name in names:
        if name not in connectors:
            raise SchemaError(f"stage {number}: no connector {name!r} under connectors:")
    return connectors[names.pop()] if names else None


def _names(entry: Mapping[str, Any], field: str) -> dict[str, str]:
    """The connectors that a stage names, by the stage at their other end."""
    location = f"stage {entry['stage_id']}: {field}"
    names: dict[str, str] = MapOf(Text(filled=True)).read(entry.get(field) or {}, location)
    return names


def _check_ends(entry: Mapping[str, Any], field: str, word: str, neighbour: int | None) -> None:
    ends = set() if neighbour is None else {f"{word}_stage_{neighbour}"}
    unknown = sorted(set(_names(entry, field)) - ends)
    if unknown:
        hint = f"only {ends.pop()} is known" if ends else "there is no such stage"
        raise SchemaError(f"stage {entry['stage_id']}: {field} {unknown}; {hint}")


def _check_edges(edges: Any, stages: int) -> None:
    """Raises SchemaError unless each stage hands on to the next."""
    for edge in ListOf(_MAP).read(edges, "edges"):
        ends = edge.get("from"), edge.get("to")
        if ends not in [(number, number + 1) for number in range(stages - 1)]:
            raise SchemaError(f"an edge from {ends[0]} to {ends[1]}: a stage is read by the next")
        other_fields = {name: value for name, value in edge.items() if name not in ("from", "to")}
        unused_fields("", other_fields, f"the edge from {ends[0]} to {ends[1]}")


def _check_kv(entry: Mapping[str, Any], *, is_last: bool) -> None:
    """Raise SchemaError if the KV's settings contradict that each stage hands on to the next."""
    number = entry["stage_id"]
    source = entry.get("engine_input_source")
    if source not in (None, [], [number - 1] if number else []):
        raise SchemaError(f"stage {number}: engine_input_source {source}: it is the stage before")
    kv_config = _MAP.read(entry.get("omni_kv_config") or {}, f"stage {number}: omni_kv_config")
    criteria = kv_config.pop("kv_transfer_criteria", None)
    if criteria not in (None, {"type": "prefill_finished"}):
        raise SchemaError(f"stage {number}: kv_transfer_criteria {criteria}: prefill_finished")
    flags = {"need_send_cache": not is_last, "need_recv_cache": number > 0}
    for name, value in kv_config.items():
        if name not in flags or value != flags[name]:
            raise SchemaError(
                f"stage {number}: omni_kv_config has {name} {value!r}; here a stage sends to the "
                "next one, and nothing else can be set; remove it"
            )


def _stage(
    entry: Mapping[str, Any], kind: str, connector: ConnectorSpec | None, *, is_last: bool
) -> StageDeploy:
    location = f"stage {entry['stage_id']}"
    _check_kv(entry, is_last=is_last)
    _check_device(entry, location)
    sampling, unused = _sampling(entry.get("default_sampling_params") or {}, kind, location)
    settings = {
        name: entry[name]
        for name in sorted(entry.keys() & _SETTINGS[kind])
        if not is_default(kind, name, entry[name])
    }
    other_fields = {name: entry[name] for name in entry.keys() - _OWN - settings.keys()}
    environment = _MAP.read(entry.get("env") or {}, f"{location}: env")
    return StageDeploy(
        stage_id=entry["stage_id"],
        kind=kind,
        devices=_devices(entry.get("devices"), location),
        connector=connector,
        sampling=sampling,
        settings=settings,
        environment={str(name): str(value) for name, value in environment.items()},
        ignored=unused_fields(kind, other_fields, location) + unused,
    )


def _check_device(entry: Mapping[str, Any], location: str) -> None:
    if entry.get("devices") not in (None, "") and entry.get("device", "auto") not in _ANY_NUMBER:
        raise SchemaError(f"{location}: devices, and device {entry['device']!r}: one of them")


def _devices(devices: Any, location: str) -> str:
    text = "" if devices is None else str(devices).replace(" ", "")
    numbers = text.split(",") if text else []
    if len(set(numbers)) != len(numbers) or not all(number.isdecimal() for number in numbers):
        raise SchemaError(
            f'{location}: devices {devices!r}; numbers of different ones, such as "0,1"'
        )
    return text


def _sampling(params: Any, kind: str, location: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Split `default_sampling_params` into those in use here, and the names of the others."""
    if not isinstance(params, Mapping):
        raise SchemaError(f"{location}: default_sampling_params is a map, not {params!r:.100}")
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
