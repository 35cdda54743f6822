"""Stages of a deployment that a pipeline of diffusers runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omni_kvlink.engine.entrypoints.deploy_files import DIFFUSERS_PIPELINES
from omni_kvlink.engine.executor.pipeline_classes import PIPELINE_CLASSES, VIDEO_CLASSES
from omni_kvlink.errors import SchemaError

if TYPE_CHECKING:
    from collections.abc import Mapping


def pipeline_of_class(values: Mapping[str, Any]) -> str | None:
    """The pipeline of a deployment that names none, but the class of its only stage."""
    stages = values.get("stages")
    if not isinstance(stages, list) or len(stages) != 1:
        return None
    name: Any = stages[0].get("model_class_name")
    return name if name in PIPELINE_CLASSES else None


def with_pipeline(entry: Mapping[str, Any], kind: str, pipeline: str) -> tuple[dict[str, Any], str]:
    """A stage's fields with those that its pipeline of diffusers implies, and its kind.

    In a pipeline of BAGEL a stage that names diffusers, or a class of diffusers, is run by it, too.
    "mp" becomes a process of the stage, because such a pipeline has no workers. Raises SchemaError
    for fields that contradict the pipeline.
    """
    location, fields = f"stage {entry['stage_id']}", dict(entry)
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
    """Raises SchemaError if a stage is to give what its pipeline does not generate."""
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
