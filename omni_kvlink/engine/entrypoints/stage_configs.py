"""Makes the configuration of each stage of a deployment, and the URLs of the links."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import uuid
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from omni_kvlink.engine.config import (
    DiffusionParallelConfig,
    KVConfig,
    OmniARConfig,
    OmniDiffusionConfig,
    StageConfig,
)
from omni_kvlink.engine.ray.cluster import NODE
from omni_kvlink.errors import SchemaError
from omni_kvlink.lowlevel import Options

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from omni_kvlink.engine.entrypoints.deploy import ConnectorSpec, DeployConfig, StageDeploy

_OPTIONS = {field.name for field in dataclasses.fields(Options)}
_PORT = re.compile(r":(\d+)(?=$|[?&])")
_PARALLEL = {field.name for field in dataclasses.fields(DiffusionParallelConfig)}
_AR_FIELDS = {field.name for field in dataclasses.fields(StageConfig)} | {"block_size"}


def stage_configs(
    deploy: DeployConfig, model: str, overrides: Mapping[str, Any]
) -> list[OmniARConfig | OmniDiffusionConfig]:
    """A configuration for each stage, in which `overrides` replace the deployment's settings.

    A stage's sink is what the next one's connector names. Raises SchemaError for invalid settings.
    """
    configs: list[OmniARConfig | OmniDiffusionConfig] = []
    ends = [_sink(to.connector, by) for by, to in itertools.pairwise(deploy.stages)] + [("", {})]
    for stage, kind, (sink, options) in zip(deploy.stages, deploy.kinds(), ends, strict=True):
        values = {**stage.settings, **overrides}
        sinks = rank_urls(sink, values.get("tensor_parallel_size", 1)) if sink else ()
        _check_placement(stage, sinks)
        own_kv = {**values.pop("kv", {}), "sinks": sinks, "sink_options": options}
        values.pop("own_process", None)
        parallel = {name: values.pop(name) for name in _PARALLEL & set(values)}
        values |= {"model": model, "kv": own_kv, "stage": kind, "parallel_config": parallel}
        values.setdefault("device", _device(stage, kind))
        tokens = values.pop("max_num_batched_tokens", None)
        try:
            if kind == "ar":
                configs.append(_ar(values, tokens, think=deploy.pipeline == "bagel_think"))
            else:
                values.pop("block_size", None)
                configs.append(msgspec.convert(values, OmniDiffusionConfig))
        except (msgspec.ValidationError, ValueError) as error:
            raise SchemaError(f"stage {stage.stage_id}: {error}") from None
    for at, after in enumerate(configs[1:]):
        kv = dataclasses.replace(configs[at].kv, receivers=after.parallel_config)
        configs[at] = dataclasses.replace(configs[at], kv=kv)
    return configs


def with_sources(
    config: OmniDiffusionConfig, urls: tuple[str, ...], before: KVConfig
) -> OmniDiffusionConfig:
    """A stage's configuration with the URLs that the ranks of the stage before serve."""
    sink = before.sink_options  # of which both ends need these; keys are each end's own
    options: dict[str, Any] = {name: sink[name] for name in ("directory", "mode") if name in sink}
    options |= config.kv.source_options
    kv = dataclasses.replace(config.kv, sources=urls, source_options=options)
    return dataclasses.replace(config, kv=kv)


def rank_urls(url: str, ranks: int) -> tuple[str, ...]:
    """A URL for each tensor rank: with consecutive ports, or with the rank in the name."""
    return (url, *(_of_rank(url, rank) for rank in range(1, ranks)))


def environment(stage: StageDeploy) -> dict[str, str]:
    """Environment variables that limit a process to the stage's devices."""
    is_limited = stage.devices and torch.cuda.is_available()
    return {"CUDA_VISIBLE_DEVICES": stage.devices} if is_limited else {}


def _ar(values: dict[str, Any], tokens: int | None, *, think: bool) -> OmniARConfig:
    own = {name: value for name, value in values.items() if name in _AR_FIELDS}
    config = msgspec.convert({**own, "think": think}, OmniARConfig)
    if tokens is None:
        return config
    return dataclasses.replace(config, num_blocks=-(-tokens // config.block_size))


def _check_placement(stage: StageDeploy, sinks: Sequence[str]) -> None:
    """Raises SchemaError if a setting for Ray is unknown, or used without Ray."""
    own_process, is_on_ray = stage.settings.get("own_process", False), _is_on_ray(stage)
    error = ""
    if own_process not in (True, False, "ray"):
        error = f"own_process {own_process!r}; true, false or ray"
    elif "ray" in stage.settings and not is_on_ray:
        error = "ray: is for own_process: ray, or for distributed_executor_backend: ray"
    elif not is_on_ray and any(NODE in url for url in sinks):
        error = f"{NODE} in a URL is for stages on Ray"
    if error:
        raise SchemaError(f"stage {stage.stage_id}: {error}")


def _is_on_ray(stage: StageDeploy) -> bool:
    names = ("own_process", "distributed_executor_backend")
    return "ray" in (stage.settings.get(name) for name in names)


def _sink(spec: ConnectorSpec | None, stage: StageDeploy) -> tuple[str, dict[str, Any]]:
    """The URL that a stage serves and its options, for a connector of any known name."""
    if spec is None and _is_on_ray(stage):  # shared memory on one node, else the network
        return f"auto://engine-{uuid.uuid4().hex[:8]}?tcp={NODE}:0", {}
    if spec is None or spec.name == "SharedMemoryConnector":
        own = {} if spec is None else spec.extra
        return f"shm://engine-{os.getpid()}-{uuid.uuid4().hex[:8]}", _options(own)
    if spec.name.startswith("Mooncake"):
        return _mooncake(spec.extra)
    if spec.name == "KVLinkConnector":
        if "url" not in spec.extra:
            raise SchemaError("KVLinkConnector: extra has no url, such as zmq+tcp://127.0.0.1:0")
        return str(spec.extra["url"]), _options(spec.extra)
    raise SchemaError(
        f"no connector {spec.name!r}; there are SharedMemoryConnector, Mooncake…Connector and "
        "KVLinkConnector"
    )


def _mooncake(extra: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """This library's connector for the same network: UCX for rdma, ZMQ for tcp."""
    host, port = extra.get("host", "auto"), extra.get("zmq_port", 0)
    scheme = "ucx" if extra.get("protocol", "rdma") == "rdma" else "zmq+tcp"
    options = _options(extra)
    if "memory_pool_size" in extra:
        options["quota"] = int(extra["memory_pool_size"])
    if extra.get("device_name"):
        options["ucx_devices"] = str(extra["device_name"])
    return f"{scheme}://{'127.0.0.1' if host == 'auto' else host}:{port}", options


def _of_rank(url: str, rank: int) -> str:
    authority, question, query = url.partition("?")
    own = authority if _PORT.search(authority) else f"{authority}-{rank}"
    return _PORT.sub(
        lambda found: f":{int(found[1]) and int(found[1]) + rank}", own + question + query
    )


def _options(extra: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in extra.items() if name in _OPTIONS}


def _device(stage: StageDeploy, kind: str) -> str:
    """A stage in a process of its own sees only its devices, and selects by rank."""
    if not stage.devices or kind == "ar" or _is_on_ray(stage) or not torch.cuda.is_available():
        return "auto"
    return f"cuda:{stage.devices.split(',')[0]}"
