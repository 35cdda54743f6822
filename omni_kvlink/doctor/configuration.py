"""Examines a file of settings: a deploy file, or vLLM's transfer configuration, YAML or JSON.

Every key is checked by what reads it: the integrations' settings, and the reference engine's
deployment.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_kvlink.engine.entrypoints.deploy import DeployConfig
from omni_kvlink.engine.entrypoints.deploy_files import (
    PIPELINES,
    flat,
    pipeline_of_class,
    read_deploy_file,
    read_map,
)
from omni_kvlink.errors import FileError, SchemaError
from omni_kvlink.integrations.vllm.settings import EncoderSettings, EngineSettings, VllmSettings
from omni_kvlink.integrations.vllm_omni import OmniSettings
from omni_kvlink.settings import check_names, shown
from omni_kvlink.system.failures import translate_errors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omni_kvlink.doctor.findings import Area
    from omni_kvlink.doctor.inquiry import Inquiry

_CONNECTOR = "OmniKVLinkConnector"
_COMMON = (
    *("connector", "connector_extra_config", "connector_module_path"),
    *("role", "rank", "parallel_size", "ip", "port", "buffer_device", "buffer_size"),
)
_KV = {f"kv_{name}" for name in (*_COMMON, "load_failure_policy")}
_KV_FIELDS = frozenset({*_KV, "engine_id", "enable_permute_local_kv"})
_EC_FIELDS = frozenset({*(f"ec_{name}" for name in _COMMON), "engine_id"})
"""Fields of vLLM's KVTransferConfig and ECTransferConfig (0.30 to 0.32)."""
_WRAPPERS = ("kv_transfer_config", "ec_transfer_config")
"""Names under which a file of vLLM's arguments has a transfer configuration."""


def examine(area: Area, inquiry: Inquiry) -> None:
    """Add the findings of the file; none if none was given."""
    if not inquiry.config:
        return
    path = Path(inquiry.config)
    with area.guarded(path.name):
        with translate_errors(str(path), "give another --config", FileError):
            values = read_map(path)
        _examine(area, path, values)


def _examine(area: Area, path: Path, values: dict[str, Any]) -> None:
    wrapped = [values[name] for name in _WRAPPERS if isinstance(values.get(name), dict)]
    transfers = wrapped or [
        one for one in [values] if {"kv_connector", "ec_connector"} & one.keys()
    ]
    if transfers:
        for transfer in transfers:
            check_transfer(transfer)
            kind = "ec" if "ec_connector" in transfer else "kv"
            name, role = transfer[f"{kind}_connector"], transfer.get(f"{kind}_role")
            area.ok(path.name, f"{name}, {role}: every key is known")
        return
    _deployment(area, path)


def check_transfer(values: Mapping[str, Any]) -> None:
    """Check vLLM's transfer configuration, of KV caches or encoder outputs, and those within.

    SchemaError names what is unknown or wrong; the settings of other connectors are not checked.
    """
    is_encoder = "ec_connector" in values
    prefix, kind = ("ec_", EncoderSettings) if is_encoder else ("kv_", VllmSettings)
    check_names(values, sorted(_EC_FIELDS if is_encoder else _KV_FIELDS))
    extra, name = (
        values.get(f"{prefix}connector_extra_config", {}),
        values.get(f"{prefix}connector"),
    )
    if name == "MultiConnector":
        for inner in extra.get("connectors", ()):
            check_transfer(inner)
    elif name == _CONNECTOR or kind is EncoderSettings:
        _check_settings(kind, extra, str(values.get(f"{prefix}role")))


def _check_settings(kind: type[EngineSettings], extra: Any, role: str) -> None:
    word = role.partition("_")[2]
    if word not in ("producer", "consumer", "both"):
        prefix = role.partition("_")[0] if "_" in role else "kv"
        raise SchemaError(
            f"role={shown(role)}: wanted {prefix}_producer, {prefix}_consumer or {prefix}_both"
        )
    kind.of(extra, produces=word != "consumer", consumes=word != "producer")


def _deployment(area: Area, path: Path) -> None:
    """Check a deploy file: its connectors of this library, then all that this engine reads."""
    values = flat(read_deploy_file(path))
    connectors = values.get("connectors") or {}
    for name, spec in connectors.items() if isinstance(connectors, dict) else ():
        if isinstance(spec, dict) and spec.get("name") == _CONNECTOR:
            with area.guarded(f"connectors.{name}"):
                OmniSettings.of(spec.get("extra") or {})
                area.ok(f"connectors.{name}", f"{_CONNECTOR}: every key is known")
    pipeline = values.get("pipeline", pipeline_of_class(values))
    if pipeline not in PIPELINES:
        text = f"pipeline {shown(pipeline)} is vLLM-Omni's to check: the engine here has no such"
        area.note(path.name, text)
        return
    deploy = DeployConfig.load(path)
    area.ok(path.name, f"{pipeline}, {len(deploy.stages)} stages: every key is known")
    ignored = sorted({name for stage in deploy.stages for name in stage.ignored})
    if ignored:
        area.note(path.name, f"without an effect in this engine: {', '.join(ignored)}")
