"""A deployment of several stages, read from YAML in the shape of vLLM-Omni's deploy files.

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

Fields that mean nothing here (`enforce_eager`, `gpu_memory_utilization`, …) are kept in `ignored`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omni_kvlink.engine.sampling import OmniDiffusionSamplingParams
from omni_kvlink.errors import SchemaError, UnavailableError

PIPELINES = {"bagel": "ar, dit", "bagel_think": "ar, dit", "bagel_single_stage": "all"}
"""Known topologies: the kinds of their stages. More stages than kinds repeat the last."""

_OWN = {"stage_id", "devices", "input_connectors", "output_connectors", "default_sampling_params"}
_USED = {
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "dtype",
    "device",
    "num_threads",
    "request_batch_max_wait_ms",
    "step_execution",
    "cache_backend",
    "cache_config",
    "distributed_executor_backend",
    "distributed_init_method",
    "data_parallel_size",
    "cfg_parallel_size",
    "tensor_parallel_size",
    "sequence_parallel_size",
    "model_class_name",
    "kv",
    "own_process",
    "ray",
}


@dataclasses.dataclass(frozen=True)
class ConnectorSpec:
    """One entry under `connectors:`.

    Attributes:
        name: of the kind of connector.
        extra: its settings.
    """

    name: str
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class StageDeploy:
    """One entry under `stages:`.

    Attributes:
        devices: such as "0" or "0,1".
        connector: what its KV comes by; None for the first stage.
        sampling: wishes that requests leave open.
        settings: what this engine uses of the rest.
        ignored: names of what it does not.
    """

    stage_id: int
    devices: str
    connector: ConnectorSpec | None
    sampling: dict[str, Any]
    settings: dict[str, Any]
    ignored: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class DeployConfig:
    """All stages, in the order of their ids.

    Attributes:
        pipeline: one of `PIPELINES`.
    """

    pipeline: str
    stages: tuple[StageDeploy, ...]

    @classmethod
    def load(cls, path: str | Path) -> DeployConfig:
        """Read a file, and the `base_config` that it builds upon.

        Raises:
            FileNotFoundError
            SchemaError: it is no such file; says what is wrong.
            UnavailableError: PyYAML is not installed.
        """
        return cls.from_dict(_read(Path(path)))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DeployConfig:
        """The same from what a YAML parser gives."""
        pipeline = values.get("pipeline", "bagel")
        if pipeline not in PIPELINES:
            raise SchemaError(f"pipeline {pipeline!r}; there are {', '.join(PIPELINES)}")
        connectors = {
            name: _connector(name, spec) for name, spec in values.get("connectors", {}).items()
        }
        entries = values.get("stages")
        if not isinstance(entries, list) or not entries:
            raise SchemaError("stages: wanted a list with at least one stage")
        stages = sorted((_stage(entry, connectors) for entry in entries), key=lambda s: s.stage_id)
        if [stage.stage_id for stage in stages] != list(range(len(stages))):
            raise SchemaError(f"stage_ids {[stage.stage_id for stage in stages]}: wanted 0, 1, …")
        return cls(pipeline, tuple(stages))

    def kinds(self) -> list[str]:
        """The kind of each stage: "ar", "dit" or "all"."""
        known = PIPELINES[self.pipeline].split(", ")
        return [known[min(at, len(known) - 1)] for at in range(len(self.stages))]


def _stage(entry: Any, connectors: Mapping[str, ConnectorSpec]) -> StageDeploy:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("stage_id"), int):
        raise SchemaError(f"a stage is a map with a stage_id, not {entry!r:.100}")
    stage_id, wired = entry["stage_id"], entry.get("input_connectors") or {}
    strange = sorted(set(wired) - {f"from_stage_{stage_id - 1}"})
    if strange:
        raise SchemaError(
            f"stage {stage_id}: input_connectors {strange}; wanted from_stage_{stage_id - 1}"
        )
    names = list(wired.values())
    if names and names[0] not in connectors:
        raise SchemaError(f"stage {stage_id}: no connector {names[0]!r} under connectors:")
    sampling = entry.get("default_sampling_params") or {}
    fields = {field.name for field in dataclasses.fields(OmniDiffusionSamplingParams)}
    rest = set(entry) - _OWN
    return StageDeploy(
        stage_id=stage_id,
        devices=str(entry.get("devices") or ""),
        connector=connectors[names[0]] if names else None,
        sampling=_sampling({k: v for k, v in sampling.items() if k in fields | {"top_k"}}),
        settings={name: entry[name] for name in sorted(rest & _USED)},
        ignored=tuple(sorted(rest - _USED) + sorted(set(sampling) - fields - {"top_k"})),
    )


def _sampling(values: dict[str, Any]) -> dict[str, Any]:
    """`top_k: 1` is the likeliest token, whatever the temperature; other values have no effect."""
    if values.pop("top_k", None) == 1:
        values["temperature"] = 0.0
    return values


def _connector(name: str, spec: Any) -> ConnectorSpec:
    if not isinstance(spec, Mapping) or not isinstance(spec.get("name"), str):
        raise SchemaError(f"connector {name!r}: wanted a map with the connector's name")
    return ConnectorSpec(spec["name"], dict(spec.get("extra") or {}))


def _read(path: Path) -> dict[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise UnavailableError(
            f"deploy files are YAML: pip install 'omni-kvlink[engine]' ({error})"
        ) from error
    try:
        values = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise SchemaError(f"{path.name}: {error}") from None
    if not isinstance(values, dict):
        raise SchemaError(f"{path.name}: wanted a map at the top")
    base = values.pop("base_config", None)
    return values if base is None else {**_read(path.parent / base), **values}
