"""Reads deploy files, and brings their several forms to one: `stages:` with flat fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink.engine.executor.pipeline_classes import PIPELINE_CLASSES, VIDEO_CLASSES
from omni_kvlink.errors import SchemaError, UnavailableError
from omni_kvlink.settings import Integer, shown

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

DIFFUSERS_PIPELINES = {**PIPELINE_CLASSES, "wan2_2_ti2v": "WanPipeline"}
"""Pipelines of one stage that diffusers runs, and their classes there."""

PIPELINES = {
    "bagel": "ar, dit",
    "bagel_think": "ar, dit",
    "bagel_single_stage": "all",
    "ar_dit": "ar, dit",
    "single_stage": "all",
    **dict.fromkeys(DIFFUSERS_PIPELINES, "diffusers"),
}
"""Pipelines, and the kinds of their stages; further stages are of the last kind."""

OWN_MODEL = ("ar_dit", "single_stage")
"""Pipelines of the model that each stage names as `model_class_name`."""

BAGEL_ARCHITECTURES = ("BagelForConditionalGeneration", "OmniBagelForConditionalGeneration")
"""Names of BAGEL's model in vLLM-Omni."""

_NESTED = ("runtime", "engine_args", "engine_extras", "parallel_config")
"""Maps within a stage whose fields are the stage's; in the order in which they may be nested."""

_RENAMED = {"max_batch_size": "max_num_seqs", "process": "own_process"}


def read_deploy_file(path: Path) -> dict[str, Any]:
    """Read a YAML file upon its `base_config`, with flat stages.

    A file named as a pipeline is of that pipeline, as vLLM-Omni's `bagel.yaml`, which names none.

    Raises:
        SchemaError: the file is no deploy file, or the files are each other's base.
        UnavailableError: PyYAML is missing.
        OSError: a file cannot be read.
    """
    return _read(path, ())


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deployment with `stages:` of flat fields, for this machine's platform.

    It takes nested fields (`parallel_config:`, `engine_args:`, …) out of their maps, and reads the
    form with `stage_args:` of vLLM-Omni's earlier releases.

    Raises:
        SchemaError: one field has two values, or the form is neither of the two.
    """
    deployment = _flat(values, "")
    overrides = deployment.pop("platforms", {}).get(_platform())
    return _merge(deployment, overrides) if overrides else deployment


def _read(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    path = path.resolve()
    if path in above:
        raise SchemaError(f"{path.name}: its base_config leads back to it")
    values = read_map(path)
    base = values.pop("base_config", None)
    values = _flat(values, path.stem)
    if base is not None:
        values = _merge(_read(path.parent / str(base), (*above, path)), values)
    if path.stem in PIPELINES:
        values.setdefault("pipeline", path.stem)
    return values


def _flat(values: Mapping[str, Any], file_name: str) -> dict[str, Any]:
    """Flatten a deployment as `flat`, but for all platforms; `file_name` may be a pipeline's."""
    deployment = _from_stage_args(values, file_name) if "stage_args" in values else dict(values)
    if isinstance(deployment.get("stages"), list):
        deployment["stages"] = [_flat_stage(stage) for stage in deployment["stages"]]
    deployment = _with_class_name(deployment, "the deployment")
    platforms = deployment.pop("platforms", None)
    if isinstance(platforms, Mapping):
        deployment["platforms"] = {
            name: _flat(overrides or {}, "") for name, overrides in platforms.items()
        }
    elif platforms is not None:
        raise SchemaError(f"platforms: a map is needed, not {platforms!r:.100}")
    return deployment


def read_map(path: Path) -> dict[str, Any]:
    """Read the map that a YAML or JSON file has at its top level; raises as `read_deploy_file`."""
    try:
        import yaml
    except ImportError as error:
        raise UnavailableError(
            f"deploy files are YAML: pip install 'omni-kvlink[engine]' ({error})"
        ) from error
    try:
        values = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SchemaError(f"{path.name}: {error}") from None
    if not isinstance(values, dict):
        raise SchemaError(f"{path.name}: must be a map at the top level")
    return values


def _merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the fields of `overrides`; stages are merged by id, connectors by name."""
    merged = {**base, **overrides}
    if base.get("connectors") and overrides.get("connectors"):
        merged["connectors"] = _deep(base["connectors"], overrides["connectors"])
    platforms = base.get("platforms") or {}
    for name, values in (overrides.get("platforms") or {}).items():
        merged["platforms"] = {**platforms, name: _merge(platforms.get(name, {}), values)}
        platforms = merged["platforms"]
    if isinstance(base.get("stages"), list) and isinstance(overrides.get("stages") or [], list):
        merged["stages"] = _merge_stages(base["stages"], overrides.get("stages") or [])
    return merged


def _merge_stages(base: Sequence[Any], overrides: Sequence[Any]) -> list[Any]:
    stages = {_stage_id(stage): stage for stage in base}
    for stage in overrides:
        old = stages.get(_stage_id(stage), {})
        sampling = _deep(
            old.get("default_sampling_params") or {}, stage.get("default_sampling_params") or {}
        )
        merged = {"default_sampling_params": sampling} if sampling else {}
        stages[_stage_id(stage)] = {**old, **stage, **merged}
    return list(stages.values())


def _stage_id(stage: Any) -> int:
    if not isinstance(stage, Mapping) or "stage_id" not in stage:
        raise SchemaError(f"a stage is a map with a stage_id, not {shown(stage)}")
    number: int = Integer(0).read(stage["stage_id"], "stage_id")
    return number


def _deep(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in overrides.items():
        old = merged.get(name)
        are_maps = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[name] = _deep(old, value) if are_maps else value  # type: ignore[arg-type]
    return merged


def _flat_stage(stage: Any) -> dict[str, Any]:
    number, fields = _stage_id(stage), dict(stage)
    for name in _NESTED:
        inner = fields.pop(name, None)
        if inner is None:
            continue
        if not isinstance(inner, Mapping):
            raise SchemaError(f"stage {number}: {name} is a map, not {inner!r:.100}")
        for key, value in inner.items():
            field = _RENAMED.get(key, key) if name == "runtime" else key
            if field in fields and fields[field] != value:
                raise SchemaError(
                    f"stage {number}: {field} is {fields[field]!r}, and {value!r} under {name}; "
                    "say it once"
                )
            fields[field] = value
    return _with_class_name(fields, f"stage {number}")


def _with_class_name(fields: dict[str, Any], location: str) -> dict[str, Any]:
    """Take `model_cls`, the RFC's word, for `model_class_name`."""
    name = fields.pop("model_cls", None)
    if name is not None and fields.setdefault("model_class_name", name) != name:
        other = fields["model_class_name"]
        raise SchemaError(
            f"{location}: model_cls {name!r} and model_class_name {other!r}: one of them"
        )
    return fields


def _from_stage_args(values: Mapping[str, Any], file_name: str) -> dict[str, Any]:
    """Bring the form of vLLM-Omni's RFC to `stages:`; its file says what the pipeline is."""
    deployment = dict(values)
    stages, runtime = deployment.pop("stage_args"), dict(deployment.pop("runtime", None) or {})
    if "stages" in deployment:
        raise SchemaError("stage_args and stages: one of them")
    if not isinstance(stages, list) or not stages:
        raise SchemaError("stage_args: a list with at least one stage is needed")
    runtime.pop("enabled", None)
    runtime.pop("defaults", None)  # of queues between stages, of which there are none here
    for name in ("connectors", "edges"):
        if name in runtime:
            deployment[name] = runtime.pop(name)
    if runtime:
        raise SchemaError(f"runtime: no use is known for {', '.join(sorted(map(str, runtime)))}")
    deployment["stages"] = [_flat_stage(stage) for stage in stages]
    deployment.setdefault("pipeline", _pipeline_of(deployment["stages"], file_name))
    return deployment


def _pipeline_of(stages: Sequence[Mapping[str, Any]], file_name: str) -> str:
    """Return the pipeline of stages by their model; by the file's name if they name none."""
    models = [stage["model_arch"] for stage in stages if "model_arch" in stage]
    if not models and file_name in PIPELINES:
        return file_name
    if not models or any(model not in BAGEL_ARCHITECTURES for model in models):
        raise SchemaError(
            f"stage_args: the model is {', '.join(map(str, models)) or 'not named'}, and this "
            f"engine runs BAGEL: model_arch: {BAGEL_ARCHITECTURES[0]}"
        )
    if len(stages) == 1:
        return "bagel_single_stage"
    kv = stages[0].get("omni_kv_config")
    if isinstance(kv, Mapping) and "kv_transfer_criteria" in kv:
        return "bagel"
    prompts = str(stages[0].get("prompt_expand_func") or "think")
    if not prompts.endswith("think"):
        raise SchemaError(
            f"stage 0: prompt_expand_func {prompts!r} with no kv_transfer_criteria in "
            "omni_kv_config: the prompts of guidance would be continued by texts; the function "
            "for think mode is expand_cfg_prompts_think"
        )
    return "bagel_think"


def _platform() -> str:
    """Return this machine's name under `platforms:`; "" for a CPU."""
    if not torch.cuda.is_available():
        return ""
    return "rocm" if torch.version.hip else "cuda"


def pipeline_of_class(values: Mapping[str, Any]) -> str | None:
    """The pipeline of a deployment that names none, but the class of its only stage."""
    stages = values.get("stages")
    if not isinstance(stages, list) or len(stages) != 1:
        return None
    name: Any = stages[0].get("model_class_name")
    return name if name in PIPELINE_CLASSES else None


def with_pipeline(
    entry: Mapping[str, Any], kind: str, pipeline: str, number: int
) -> tuple[dict[str, Any], str]:
    """A stage's fields with those that its pipeline of diffusers implies, and its kind.

    In a pipeline of BAGEL a stage that names diffusers, or a class of diffusers, is run by it, too.
    "mp" becomes a process of the stage, because such a pipeline has no workers. Raises SchemaError
    for fields that contradict the pipeline.
    """
    location, fields = f"stage {number}", dict(entry)
    backend, name = fields.get("distributed_executor_backend"), fields.get("model_class_name")
    if kind == "all" and (backend == "diffusers" or name in PIPELINE_CLASSES):
        kind = "diffusers"
    if kind != "diffusers":
        return fields, kind
    expected = DIFFUSERS_PIPELINES.get(pipeline)
    if expected is not None and name is not None and PIPELINE_CLASSES.get(name, name) != expected:
        raise SchemaError(
            f"{location}: model_class_name {name!r} in the pipeline {pipeline}: {expected}"
        )
    if expected is not None:
        fields["model_class_name"] = expected
    if backend == "ray":
        raise SchemaError(f"{location}: {pipeline} has no workers for Ray: use own_process: ray")
    if backend in (None, "", "uni", "mp"):
        fields["distributed_executor_backend"] = "diffusers"
    if backend == "mp":
        fields.setdefault("own_process", True)
    _check_output(fields, location)
    return fields, kind


def _check_output(entry: Mapping[str, Any], location: str) -> None:
    """Raise SchemaError if a stage's output or architecture is not that of its pipeline."""
    name = entry.get("model_class_name")
    if name not in PIPELINE_CLASSES:
        return
    output = "video" if PIPELINE_CLASSES[name] in VIDEO_CLASSES else "image"
    for field in ("engine_output_type", "final_output_type"):
        if entry.get(field, output) != output:
            raise SchemaError(f"{location}: {field} {entry[field]!r}: {name} generates {output}s")
    arch = entry.get("model_arch", name)
    if PIPELINE_CLASSES.get(arch, arch) != PIPELINE_CLASSES[name]:
        raise SchemaError(f"{location}: model_arch {arch!r} with model_class_name {name}")
