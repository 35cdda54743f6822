"""The worker's part: owns the links and moves bytes between them and the engine's pools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import vllm

from omni_kvlink import KVLink
from omni_kvlink.errors import SchemaError
from omni_kvlink.integrations.vllm.blocks import BlockFormat, byte_pools
from omni_kvlink.integrations.vllm.loading import Loader
from omni_kvlink.integrations.vllm.payload import Pools
from omni_kvlink.integrations.vllm.peers import Peers
from omni_kvlink.integrations.vllm.saving import Saver
from omni_kvlink.integrations.vllm.stats import Meter

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from omni_kvlink.integrations.vllm.settings import VllmSettings
    from omni_kvlink.integrations.vllm.step import StepMetadata

QUOTA = 4 << 30


class KVWorker:
    """Opens an engine's links when its pools are registered, and runs its saves and loads."""

    def __init__(
        self,
        settings: VllmSettings,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        kv_caches: Mapping[str, torch.Tensor],
    ):
        self.meter = Meter()
        transfer = vllm_config.kv_transfer_config
        pools = _pools(settings, vllm_config, kv_cache_config, kv_caches)
        self._numbers = {name: index for index, name in enumerate(pools.format.layers)}
        self._saver: Saver | None = None
        self._loader: Loader | None = None
        if transfer.is_kv_producer:
            nbytes = sum(pool.numel() for pool in pools.layers)
            options = {"quota": max(QUOTA, nbytes), **settings.serve}
            link = KVLink.serve(settings.url, **options)
            self._saver = Saver(link, pools, settings, self.meter)
        if transfer.is_kv_consumer:
            peers = Peers(settings.peers, settings.connect)
            self._loader = Loader(pools, peers, self.meter, timeout=settings.timeout)

    def begin(self, step: StepMetadata) -> None:
        """Begin the saves of a step, before its forward pass."""
        if self._saver is not None:
            for key, reason in step.failed.items():
                self._saver.fail(key, reason)
            self._saver.hold(step.held)
            self._saver.begin(step.saves)

    def load(self, step: StepMetadata) -> None:
        """Begin the loads of a step and cancel those that are no longer needed."""
        if self._loader is not None:
            for cancelled in step.cancelled:
                self._loader.cancel(cancelled)
            self._loader.start(step.loads)

    def wait_for_layer(self, layer: str) -> None:
        """Block until a layer's synchronous loads are done; the pass reads its blocks next."""
        if self._loader is not None and layer in self._numbers:
            self._loader.wait_for_layer(self._numbers[layer])

    def save_layer(self, layer: str) -> None:
        """Queue a layer whose blocks the forward pass has written."""
        if self._saver is not None and layer in self._numbers:
            self._saver.layer(self._numbers[layer])

    def wait_for_save(self) -> None:
        """Block until all saves are committed; the blocks may change afterwards."""
        if self._saver is not None:
            if self._loader is not None:  # a pass may save blocks that it loaded
                self._saver.fail_blocks(self._loader.wait_for_pass())
            self._saver.commit()

    def finished(self) -> tuple[set[str], set[str]]:
        """Requests whose sends are over, and requests whose loads are over."""
        sent = self._saver.released() if self._saver is not None else set[str]()
        return sent, self._loader.finished() if self._loader is not None else set()

    def take_invalid_blocks(self) -> set[int]:
        """Blocks of failed loads since the last call."""
        return self._loader.take_invalid_blocks() if self._loader is not None else set()

    def close(self) -> None:
        """Close the links; unread caches and unfinished loads fail."""
        if self._saver is not None:
            self._saver.close()
        if self._loader is not None:
            self._loader.close()


def _pools(
    settings: VllmSettings,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor],
) -> Pools:
    spec = _spec(kv_cache_config)
    cache_config = vllm_config.cache_config
    layers = byte_pools(
        kv_caches, num_blocks=kv_cache_config.num_blocks, block_size=spec.block_size
    )
    context = vllm_config.compilation_config.static_forward_context
    isas = {str(getattr(context.get(name), "isa", "")) for name in layers}
    first = next(iter(layers.values()))
    format = BlockFormat(
        vllm=vllm.__version__,
        model=settings.model or str(vllm_config.model_config.model),
        kind=type(spec).__name__,
        dtype=str(spec.dtype).removeprefix("torch."),
        block_size=spec.block_size,
        kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        block_nbytes=first[0].numel(),
        layout=str(cache_config.get_resolved_kv_cache_layout()),
        isa=",".join(sorted(isas)),
        layers=list(layers),
    )
    return Pools(format, list(layers.values()))


def _spec(kv_cache_config: KVCacheConfig) -> Any:
    """The spec of the single group of full-attention layers.

    Raises:
        SchemaError: there are other groups; windows and states are not whole blocks of the prompt.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if [type(spec).__name__ for spec in specs] != ["FullAttentionSpec"]:
        raise SchemaError(
            f"the engine's cache is {[type(spec).__name__ for spec in specs]}; this connector "
            "moves one group of full attention"
        )
    return specs[0]
