"""`DeployConfig`: a deployment of several stages, read from vLLM-Omni's deploy files (YAML).

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

Fields that this engine does not use (`gpu_memory_utilization`, …) are listed in `ignored`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omni_kvlink.engine.config import (
    DiffusionParallelConfig,
    OmniARConfig,
    OmniDiffusionConfig,
)
from omni_kvlink.engine.sampling import OmniDiffusionSamplingParams
from omni_kvlink.errors import SchemaError, UnavailableError

PIPELINES = {"bagel": "ar, dit", "bagel_think": "ar, dit", "bagel_single_stage": "all"}
"""Pipelines, and the kinds of their stages; further stages are of the last kind."""

_OWN = {"stage_id", "devices", "input_connectors", "output_connectors", "default_sampling_params"}
_USED = {
    field.name
    for kind in (OmniARConfig, OmniDiffusionConfig, DiffusionParallelConfig)
    for field in dataclasses.fields(kind)
} | {"max_num_batched_tokens", "own_process"}
_USED -= {"model", "stage", "parallel_config", "distributed_timeout", "num_blocks", "think"}


@dataclasses.dataclass(frozen=True)
class ConnectorSpec:
    """One entry under `connectors:`: the name of a kind of connector, and its settings."""

    name: str
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class StageDeploy:
    """One entry under `stages:`.

    `devices` are such as "0,1"; `connector` brings its KV, and is None for the first stage;
    `sampling` has defaults of the sampling params, `settings` the other fields in use here.
    """

    stage_id: int
    devices: str
    connector: ConnectorSpec | None
    sampling: dict[str, Any]
    settings: dict[str, Any]
    ignored: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class DeployConfig:
    """All stages of one of the `PIPELINES`, in the order of their ids."""

    pipeline: str
    stages: tuple[StageDeploy, ...]

    @classmethod
    def load(cls, path: str | Path) -> DeployConfig:
        """Read a file, and its `base_config`; SchemaError names the field that is wrong."""
        return cls.from_dict(_read(Path(path)))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DeployConfig:
        """Check what a YAML parser returned; raises SchemaError as `load`."""
        pipeline = values.get("pipeline", "bagel")
        if pipeline not in PIPELINES:
            raise SchemaError(f"pipeline {pipeline!r}; there are {', '.join(PIPELINES)}")
        connectors = {}
        for name, spec in values.get("connectors", {}).items():
            if not isinstance(spec, Mapping) or not isinstance(spec.get("name"), str):
                raise SchemaError(f"connector {name!r}: must be a map with the connector's name")
            connectors[name] = ConnectorSpec(spec["name"], dict(spec.get("extra") or {}))
        entries = values.get("stages")
        if not isinstance(entries, list) or not entries:
            raise SchemaError("stages: a list with at least one stage is needed")
        stages = sorted((_stage(entry, connectors) for entry in entries), key=lambda s: s.stage_id)
        ids = [stage.stage_id for stage in stages]
        if ids != list(range(len(stages))):
            raise SchemaError(f"stage_ids {ids}: they must be 0, 1, …")
        return cls(pipeline, tuple(stages))

    def kinds(self) -> list[str]:
        """The kind of each stage: "ar", "dit" or "all"."""
        known = PIPELINES[self.pipeline].split(", ")
        return [known[min(at, len(known) - 1)] for at in range(len(self.stages))]


def _stage(entry: Any, connectors: Mapping[str, ConnectorSpec]) -> StageDeploy:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("stage_id"), int):
        raise SchemaError(f"a stage is a map with a stage_id, not {entry!r:.100}")
    stage_id, inputs = entry["stage_id"], entry.get("input_connectors") or {}
    known = f"from_stage_{stage_id - 1}"
    if unknown := sorted(set(inputs) - {known}):
        raise SchemaError(f"stage {stage_id}: input_connectors {unknown}; only {known} is known")
    names = list(inputs.values())
    if names and names[0] not in connectors:
        raise SchemaError(f"stage {stage_id}: no connector {names[0]!r} under connectors:")
    sampling = dict(entry.get("default_sampling_params") or {})
    if sampling.pop("top_k", None) == 1:  # is the same; other values have no effect
        sampling["temperature"] = 0.0
    fields = {field.name for field in dataclasses.fields(OmniDiffusionSamplingParams)}
    rest = set(entry) - _OWN
    return StageDeploy(
        stage_id=stage_id,
        devices=str(entry.get("devices") or ""),
        connector=connectors[names[0]] if names else None,
        sampling={name: value for name, value in sampling.items() if name in fields},
        settings={name: entry[name] for name in sorted(rest & _USED)},
        ignored=tuple(sorted(rest - _USED) + sorted(set(sampling) - fields)),
    )


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
        raise SchemaError(f"{path.name}: must be a map at the top level")
    base = values.pop("base_config", None)
    return values if base is None else {**_read(path.parent / base), **values}
