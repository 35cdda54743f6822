"""Makes the configuration of each stage of a deployment, and the URLs of the links."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import uuid
from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink.engine.config import (
    DiffusionParallelConfig,
    KVConfig,
    LoRAConfig,
    OmniARConfig,
    OmniDiffusionConfig,
)
from omni_kvlink.engine.entrypoints.deploy_fields import check_compilation
from omni_kvlink.engine.entrypoints.deploy_files import OWN_MODEL
from omni_kvlink.engine.errors import EngineError
from omni_kvlink.engine.models.diffusers_settings import check_settings
from omni_kvlink.engine.ray.cluster import NODE
from omni_kvlink.errors import SchemaError
from omni_kvlink.lowlevel import LinkUrl, ServeOptions
from omni_kvlink.models.bagel.attention_backends import check_attention_backend
from omni_kvlink.settings import Integer, Nested, Size, SomeOf, Text, check_names, rules

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from omni_kvlink.engine.entrypoints.deploy import ConnectorSettings, DeployConfig, StageDeploy

_SHARED_MEMORY = {"shm_threshold_bytes"}  # below it vLLM-Omni's connector sends in messages
_MOONCAKE = {
    *("host", "zmq_port", "protocol", "device_name"),
    *("memory_pool_size", "memory_pool_device"),
}
_PROTOCOLS = {"rdma": "ucx", "tcp": "zmq+tcp"}
_PORT = re.compile(r":(\d+)(?=$|[?&])")
_PARALLEL = set(rules(DiffusionParallelConfig))
_LORA = set(rules(LoRAConfig))
_BY_DEPLOYMENT = ("sources", "sinks", "sink_options", "receivers")
_KV = [name for name in rules(KVConfig) if name not in _BY_DEPLOYMENT]
"""The fields of a stage's `kv:`. What a link is, the deployment's `connectors:` say."""


def stage_configs(deploy: DeployConfig, model: str) -> list[OmniARConfig | OmniDiffusionConfig]:
    """A configuration for each stage.

    A stage's sink is what the next one's connector names. Raises SchemaError for invalid settings.
    """
    configs: list[OmniARConfig | OmniDiffusionConfig] = []
    ends = [
        _sink(receiver.connector, sender) for sender, receiver in itertools.pairwise(deploy.stages)
    ] + [("", {})]
    for stage, (sink, options) in zip(deploy.stages, ends, strict=True):
        kind = stage.kind
        values = _settings(stage)
        if deploy.pipeline in OWN_MODEL and "model_class_name" not in values:
            raise SchemaError(
                f"stage {stage.stage_id}: {deploy.pipeline} is of a model of one's own, and none "
                "is named: set model_class_name, 'module:Class' of a ModelUtility"
            )
        sinks = rank_urls(sink, values.get("tensor_parallel_size", 1)) if sink else ()
        check_compilation(values.get("compilation_config") or {}, f"stage {stage.stage_id}")
        remote = is_remote(stage, is_last=stage is deploy.stages[-1])
        _check_placement(stage, sinks, is_remote=remote)
        own_kv = {**values.pop("kv", {}), "sinks": sinks, "sink_options": options}
        values.pop("own_process", None)
        parallel = {name: values.pop(name) for name in _PARALLEL & set(values)}
        values["lora_config"] = _lora(values, f"stage {stage.stage_id}")
        values |= {"model": model, "kv": own_kv, "stage": kind, "parallel_config": parallel}
        if not remote:
            values.setdefault("device_numbers", _numbers(stage))
        elif stage.devices:
            values.setdefault("device_numbers", tuple(range(len(_numbers(stage)))))
        try:
            if kind == "ar":
                configs.append(_ar(values, think=deploy.pipeline == "bagel_think"))
            else:
                configs.append(config := OmniDiffusionConfig.read(values))
                _check_tiling(config, values)
                if kind == "diffusers":
                    check_settings(config)
            if kind != "diffusers" and configs[-1].model_class_name == "bagel":
                check_attention_backend(configs[-1].attention_backend)
        except (ValueError, EngineError) as error:
            raise SchemaError(f"stage {stage.stage_id}: {error}") from None
    for number, receiver in enumerate(configs[1:]):
        kv = dataclasses.replace(configs[number].kv, receivers=receiver.parallel_config)
        configs[number] = dataclasses.replace(configs[number], kv=kv)
    return configs


def _check_tiling(config: OmniDiffusionConfig, values: Mapping[str, Any]) -> None:
    """Raises ValueError if tiles that are to be divided are switched off."""
    degree = config.parallel_config.vae_patch_parallel_size
    if degree > 1 and values.get("vae_use_tiling") is False:
        raise ValueError(
            f"vae_patch_parallel_size {degree} with vae_use_tiling: false: ranks divide the tiles; "
            "remove one of them"
        )


def with_sources(
    config: OmniDiffusionConfig, urls: tuple[str, ...], sender_kv: KVConfig
) -> OmniDiffusionConfig:
    """A stage's configuration with the URLs that the ranks of the stage before serve."""
    sink = sender_kv.sink_options  # both ends need the two options below; keys are each end's own
    options: dict[str, Any] = {name: sink[name] for name in ("directory", "mode") if name in sink}
    options |= config.kv.source_options
    kv = dataclasses.replace(config.kv, sources=urls, source_options=options)
    return dataclasses.replace(config, kv=kv)


def rank_urls(url: str, ranks: int) -> tuple[str, ...]:
    """A URL for each tensor rank: with consecutive ports, or with the rank in the name."""
    return (url, *(_of_rank(url, rank) for rank in range(1, ranks)))


def environment(stage: StageDeploy) -> dict[str, str]:
    """Environment variables of a stage's process: its own, and those that limit its devices.

    `devices` are numbers among the devices that this process sees. Raises SchemaError if it sees
    fewer.
    """
    numbers = _numbers(stage)
    if not numbers:
        return stage.environment
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(torch.cuda.device_count())]
    if visible is not None:
        names = [name.strip() for name in visible.split(",")][: len(names)]
    chosen = ",".join(names[number] for number in numbers)
    return {**stage.environment, "CUDA_VISIBLE_DEVICES": chosen}


def _settings(stage: StageDeploy) -> dict[str, Any]:
    """A stage's settings; SchemaError if its `kv:` is no map of fields that a stage may set."""
    kv = Nested(KVConfig).read(stage.settings.get("kv", {}), f"stage {stage.stage_id}: kv")
    if kv != KVConfig():
        check_names(stage.settings["kv"], _KV, f"stage {stage.stage_id}: kv.")
    return dict(stage.settings)


def _lora(values: dict[str, Any], location: str) -> dict[str, Any]:
    """Take the fields of adapters out of a stage's, in the forms that vLLM-Omni has for them."""
    fields = {name: values.pop(name) for name in _LORA & set(values)}
    if "static_lora_scale" in values:
        scale = values.pop("static_lora_scale")
        if fields.setdefault("lora_scale", scale) != scale:
            raise SchemaError(f"{location}: lora_scale and static_lora_scale are one; say it once")
    for name in ("lora_path", "lora_scale"):
        if isinstance(fields.get(name), list):
            if len(fields[name]) != 1:
                raise SchemaError(f"{location}: {name} {fields[name]!r:.100}: one adapter a stage")
            fields[name] = fields[name][0]
        if name in fields and fields[name] is None:
            del fields[name]
    return fields


def _ar(values: dict[str, Any], *, think: bool) -> OmniARConfig:
    values = {name: value for name, value in values.items() if value is not None}
    blocks = values.pop("num_gpu_blocks_override", None)
    overrides = {} if blocks is None else {"num_blocks": blocks}
    config = OmniARConfig.read({**values, **overrides, "think": think})
    if overrides or "max_num_batched_tokens" not in values:
        return config
    blocks = -(-config.max_num_batched_tokens // config.block_size)
    if values.get("enable_chunked_prefill"):  # a prompt may be longer than a step
        blocks = max(blocks, config.num_blocks)
    return dataclasses.replace(config, num_blocks=blocks)


def _check_placement(stage: StageDeploy, sinks: Sequence[str], *, is_remote: bool) -> None:
    """Raises SchemaError if a setting of where a stage runs is unknown, or without effect there."""
    own_process, is_on_ray = stage.settings.get("own_process", False), _is_on_ray(stage)
    error = ""
    if own_process not in (True, False, "ray"):
        error = f"own_process {own_process!r}; true, false or ray"
    elif "ray" in stage.settings and not is_on_ray:
        error = "ray: is for own_process: ray, or for distributed_executor_backend: ray"
    elif not is_on_ray and any(NODE in url for url in sinks):
        error = f"{NODE} in a URL is for stages on Ray"
    elif stage.devices and is_on_ray:
        error = f"devices {stage.devices}: Ray chooses the GPUs; say how many under ray: num_gpus"
    elif stage.environment and (not is_remote or is_on_ray):
        error = "env: is for a stage in a process of its own: own_process: true"
    if error:
        raise SchemaError(f"stage {stage.stage_id}: {error}")


def is_remote(stage: StageDeploy, *, is_last: bool) -> bool:
    """Whether a stage runs in a process of its own, or in an actor."""
    return bool(stage.settings.get("own_process", not is_last)) or stage.kind == "ar"


def _is_on_ray(stage: StageDeploy) -> bool:
    names = ("own_process", "distributed_executor_backend")
    return "ray" in (stage.settings.get(name) for name in names)


def _sink(spec: ConnectorSettings | None, stage: StageDeploy) -> tuple[str, dict[str, Any]]:
    """The URL that a stage serves and its options, for a connector of any known name."""
    if spec is None and _is_on_ray(stage):  # shared memory on one node, else the network
        return f"auto://engine-{uuid.uuid4().hex[:8]}?tcp={NODE}:0", {}
    if spec is None or spec.name == "SharedMemoryConnector":
        options = {} if spec is None else _options(spec, exclude=_SHARED_MEMORY)
        return f"shm://engine-{os.getpid()}-{uuid.uuid4().hex[:8]}", options
    if spec.name == "MooncakeTransferEngineConnector":
        return _mooncake(spec)
    if spec.name == "KVLinkConnector":
        if "url" not in spec.extra:
            raise SchemaError("KVLinkConnector: extra has no url, such as zmq+tcp://127.0.0.1:0")
        url = LinkUrl().read(spec.extra["url"], f"{spec.name}: extra.url")
        return url, _options(spec, exclude={"url"})
    raise SchemaError(
        f"no connector {spec.name!r}; there are SharedMemoryConnector, "
        "MooncakeTransferEngineConnector and KVLinkConnector, which takes any URL of this library"
    )


def _mooncake(spec: ConnectorSettings) -> tuple[str, dict[str, Any]]:
    """This library's connector for the same network: UCX for rdma, ZMQ for tcp."""
    extra = spec.extra
    location, protocol = f"{spec.name}: extra", extra.get("protocol", "rdma")
    host = Text(filled=True).read(extra.get("host", "auto"), f"{location}.host")
    port = Integer(0, 65535).read(extra.get("zmq_port", 0), f"{location}.zmq_port")
    if protocol not in _PROTOCOLS or extra.get("memory_pool_device", "cpu") != "cpu":
        raise SchemaError(
            f"{spec.name}: protocol {protocol!r}, memory_pool_device "
            f"{extra.get('memory_pool_device', 'cpu')!r}; rdma or tcp, and cpu"
        )
    options = _options(spec, exclude=_MOONCAKE)
    if "memory_pool_size" in extra:
        size = Size(1).read(extra["memory_pool_size"], f"{location}.memory_pool_size")
        options["quota"] = size
    if extra.get("device_name"):
        options["ucx_devices"] = Text().read(extra["device_name"], f"{location}.device_name")
    address = "127.0.0.1" if host == "auto" else host
    return f"{_PROTOCOLS[protocol]}://{address}:{port}", options


def _of_rank(url: str, rank: int) -> str:
    authority, question, query = url.partition("?")
    address = authority if _PORT.search(authority) else f"{authority}-{rank}"
    return _PORT.sub(
        lambda port: f":{int(port[1]) and int(port[1]) + rank}", address + question + query
    )


def _options(spec: ConnectorSettings, *, exclude: Iterable[str]) -> dict[str, Any]:
    """The options of the link; raises SchemaError for a field that is none."""
    check_names(spec.extra, [*exclude, *rules(ServeOptions)], f"{spec.name}: extra.")
    values = {name: value for name, value in spec.extra.items() if name not in exclude}
    options: dict[str, Any] = SomeOf(ServeOptions).read(values, f"{spec.name}: extra")
    return options


def _numbers(stage: StageDeploy) -> tuple[int, ...]:
    """The stage's devices; empty where there are none to choose from."""
    if not stage.devices or not torch.cuda.is_available():
        return ()
    numbers, count = tuple(map(int, stage.devices.split(","))), torch.cuda.device_count()
    if max(numbers) >= count:
        raise SchemaError(
            f"stage {stage.stage_id}: devices {stage.devices}; this process sees {count}, from 0"
        )
    return numbers
