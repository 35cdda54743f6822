"""Settings of a stage that become calls of diffusers on its loaded pipeline."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from omni_kvlink.engine.errors import EngineError
from omni_kvlink.errors import UnavailableError

if TYPE_CHECKING:
    import torch

    from omni_kvlink.engine.config import OmniDiffusionConfig

_BACKENDS = {
    "TORCH_SDPA": "native",
    "SDPA": "native",
    "FLASH_ATTN": "flash",
    "SAGE_ATTN": "sage",
}
"""vLLM-Omni's names of attention backends, and diffusers' names."""

_PACKAGES = {"flash": "flash-attn", "sage": "sageattention", "xformers": "xformers"}


def check_settings(config: OmniDiffusionConfig) -> None:
    """Raises EngineError if a setting is used that a pipeline of diffusers would ignore."""
    useless = {
        "kv.sources": config.kv.sources,
        "kv.sinks": config.kv.sinks,
        "worker_cls": config.worker_cls,
        "quantization": config.quantization,
        "vae_dtype": config.vae_dtype != "auto",
        "enforce_eager: false": not config.enforce_eager,
        "warmup_sizes": config.warmup_sizes,
        "enable_layerwise_offload": config.enable_layerwise_offload,
        "step_execution": config.step_execution,
        "max_concurrent_batches": config.max_concurrent_batches > 1,
        "parallel_config": config.parallel_config.world_size > 1,
    }
    names = ", ".join(name for name, value in useless.items() if value)
    if names:
        raise EngineError(f"a pipeline of diffusers has no use for {names}: leave it out")


def apply_settings(pipe: Any, config: OmniDiffusionConfig, device: torch.device) -> Any:
    """Move a pipeline to its device and apply what the configuration says of it.

    Raises:
        EngineError: the pipeline, or the device, does not have what a setting needs.
        UnavailableError: a package that a setting needs is missing; the text names it.
    """
    if config.enable_cpu_offload:
        _offload(pipe, device)
    else:
        pipe = pipe.to(device)
    for name in ("slicing", "tiling"):
        if getattr(config, f"vae_use_{name}"):
            _enable(pipe, name)
    if config.attention_backend not in ("", "auto"):
        _set_attention(pipe, config.attention_backend)
    return pipe


def transformers_of(pipe: Any) -> list[Any]:
    """The networks that denoise: one, or Wan2.2's two."""
    names = ("transformer", "transformer_2", "unet")
    return [network for name in names if (network := getattr(pipe, name, None)) is not None]


def _offload(pipe: Any, device: torch.device) -> None:
    if device.type == "cpu":
        raise EngineError(
            "enable_cpu_offload: the stage runs on the CPU, where all networks are anyway; "
            "leave it off, or use a GPU"
        )
    try:
        pipe.enable_model_cpu_offload(device=device)
    except ImportError as error:
        raise UnavailableError(f"enable_cpu_offload: {error}: pip install accelerate") from error


def _enable(pipe: Any, name: str) -> None:
    """Call `enable_slicing` or `enable_tiling` of the pipeline's autoencoder."""
    vae = getattr(pipe, "vae", None)
    try:
        getattr(vae, f"enable_{name}")()
    except (AttributeError, NotImplementedError) as error:
        text = f"vae_use_{name}: the autoencoder of {type(pipe).__name__} has none ({error})"
        raise EngineError(f"{text}: leave it off") from error


def _set_attention(pipe: Any, backend: str) -> None:
    """Set diffusers' attention backend of all networks that denoise, and of no other pipeline."""
    name, setting = _BACKENDS.get(backend, backend), f"attention_backend {backend!r}"
    if name.endswith("_hub"):
        raise EngineError(
            f"{setting}: diffusers downloads it, and nothing is fetched here: another"
        )
    dispatch = importlib.import_module("diffusers.models.attention_dispatch")
    names = [member.value for member in dispatch.AttentionBackendName]
    if name not in names:
        raise EngineError(f"{setting}: there are auto, {', '.join([*_BACKENDS, *names])}")
    for network in transformers_of(pipe):
        try:
            with dispatch.attention_backend("native"):  # restores the process's own backend
                network.set_attention_backend(name)
        except RuntimeError as error:
            package = _PACKAGES.get(name.strip("_").split("_")[0])
            cure = f": pip install {package}" if package else ""
            raise UnavailableError(f"{setting}: {error}{cure}") from error
        if not any(_backend_of(module) == name for module in network.modules()):
            raise EngineError(
                f"{setting}: the attention of {type(network).__name__} does not go through "
                "diffusers' dispatcher: leave it 'auto'"
            )


def _backend_of(module: Any) -> str | None:
    backend = getattr(getattr(module, "processor", None), "_attention_backend", None)
    return getattr(backend, "value", backend)
