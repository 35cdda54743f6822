"""`BagelUtility`: BAGEL for the engine; its cache is converted to and from the schema."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink import (
    BundleBranch,
    KVCacheBundle,
    KVCacheTransferData,
    KVMetadata,
    KVPayload,
    PrefixOf,
    SameAs,
    Shard,
)
from omni_kvlink.adapters import BagelAdapter, unpack_generator
from omni_kvlink.engine.config import OmniARConfig
from omni_kvlink.engine.lora.adapter import (
    LoRATarget,
    LoRATargets,
    check_identity,
)
from omni_kvlink.engine.models.bagel_pipeline import OmniBagelPipeline, fill_params
from omni_kvlink.engine.models.bagel_prefill import BagelPrefill
from omni_kvlink.engine.models.bagel_text import check_modalities
from omni_kvlink.engine.models.bagel_warm_up import warm_up
from omni_kvlink.engine.models.paged_naive_cache import PagedNaiveCache
from omni_kvlink.errors import SchemaError
from omni_kvlink.lowlevel import dtype_name
from omni_kvlink.models.bagel import BagelContext, BagelContexts, NaiveCache, Tiling
from omni_kvlink.models.bagel.attention_backends import attention_backend
from omni_kvlink.models.bagel.layers import LayerSplit
from omni_kvlink.models.bagel.loading import load_autoencoder, load_config, load_model
from omni_kvlink.models.bagel.lora import ROOTS, lora_layers
from omni_kvlink.models.bagel.pipeline import VAE_DTYPE
from omni_kvlink.models.bagel.sampling import BRANCHES
from omni_kvlink.models.bagel.sequence import SequenceSplit
from omni_kvlink.models.bagel.shards import WHOLE, Split
from omni_kvlink.topology import shard_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from omni_kvlink.engine.config import StageConfig
    from omni_kvlink.engine.parallel.process_group import ProcessGroup
    from omni_kvlink.engine.request import OmniDiffusionRequest
    from omni_kvlink.models.bagel.model import Stage


class BagelUtility(BagelPrefill):
    """BAGEL, loaded; `config.stage` is "ar", "dit", or "all" for both in one process."""

    branches, supports_tp, supports_sp, supports_pp = BRANCHES, True, True, True
    supports_vae_patch_parallel = supports_attention_backend = True

    def __init__(
        self, config: StageConfig, device: torch.device, process_group: ProcessGroup | None = None
    ):
        super().__init__(config, device, process_group)
        stage: Stage = config.stage  # type: ignore[assignment]  # checked by from_pretrained
        self._split = _split(self.process_group)
        self._think = isinstance(config, OmniARConfig) and config.think
        transfer = config.kv_transfer if isinstance(config, OmniARConfig) else None
        self._reads_prefixes = transfer is not None and transfer.is_producer
        llm, dtype = load_config(Path(config.model)).llm, config.torch_dtype
        # Before the weights are read: an error comes at once.
        dense = attention_backend(config.attention_backend, llm, device, dtype)
        # What is offloaded need not fit on the device as a whole.
        self._load_device = torch.device("cpu") if config.offloads else device
        self._pipeline = OmniBagelPipeline.from_pretrained(
            config.model,
            dtype=dtype,
            vae_dtype=config.torch_vae_dtype or VAE_DTYPE,
            device=self._load_device,
            stage=stage,
            split=self._split,
        )
        self._pipeline.model.set_attention(dense)
        if config.vae_use_tiling:
            self._pipeline.autoencoder.enable_tiling(Tiling())

    @staticmethod
    def prepare(request: OmniDiffusionRequest) -> None:
        """Set the published defaults; see `ModelUtility.prepare`."""
        check_modalities(request)
        fill_params(request.sampling_params, request.prompt)

    @property
    def pipeline(self) -> OmniBagelPipeline:
        """The loaded pipeline."""
        return self._pipeline

    def modules(self) -> Mapping[str, torch.nn.Module]:
        """The language model and the autoencoder."""
        return {"model": self._pipeline.model, "autoencoder": self._pipeline.autoencoder}

    def reload(self) -> None:
        """Read the weights from the checkpoint again, into the existing modules."""
        pipeline, root = self._pipeline, Path(self.config.model)
        source, device = (root, load_config(root), pipeline.stage), self._load_device
        vae_dtype = self.config.torch_vae_dtype or VAE_DTYPE
        fresh = {
            "model": load_model(*source, self.config.torch_dtype, device, self._split),
            "autoencoder": load_autoencoder(*source, vae_dtype, device),
        }
        for name, module in self.modules().items():
            tensors = fresh[name].state_dict()
            for key, old in module.state_dict(keep_vars=True).items():
                old.data = tensors[key]

    def compile(self, **options: Any) -> None:
        """Compile the language model's layers; see `ModelUtility.compile`."""
        self._pipeline.model.compile_layers(**options)

    def warm_up(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Run images of these sizes once; see `ModelUtility.warm_up`."""
        for size in sizes:
            warm_up(self._pipeline, size, sorted({1, self.config.max_num_seqs}))

    def encoders_and_decoders(self) -> Sequence[torch.nn.Module]:
        """This stage's networks among ViT, connector, and the autoencoder's two halves."""
        model, autoencoder = self._pipeline.model, self._pipeline.autoencoder
        parts = [getattr(model, name, None) for name in ("vit_model", "connector")]
        parts += [getattr(autoencoder, name, None) for name in ("encoder", "decoder")]
        return [part for part in parts if part is not None]

    def layers(self) -> Sequence[torch.nn.Module]:
        """The language model's layers on this rank."""
        return self._pipeline.model.language_model.model.own_layers

    def lora_targets(self) -> LoRATargets:
        """The linear layers of the whole model, and this rank's part of each."""
        parts = lora_layers(self._pipeline.model)
        layers = {
            name: LoRATarget(part.module, part.cut.full_shape, *part.cut.index)
            for name, part in parts.items()
        }
        return LoRATargets(layers, self.device, ROOTS)

    def convert(self, payload: KVPayload, request: OmniDiffusionRequest) -> BagelContexts:
        """The three contexts, those of other guidance ranks elsewhere; sets the generator."""
        branches = self.own_branches
        if not isinstance(payload, KVCacheBundle):
            raise SchemaError(f"{payload!r} is one cache; BAGEL needs {', '.join(branches)}")
        missing = [name for name in branches if name not in payload.branches]
        if missing:
            raise SchemaError(f"the KV of {request.request_id!r} lacks {', '.join(missing)}")
        self._check_heads(payload, request)
        self._check_layers(payload, request)
        metadata, params = payload[branches[0]].metadata, request.sampling_params
        shape, size = metadata.image_shape, (params.height, params.width)
        if size not in (shape, (None, None)):
            raise SchemaError(f"the KV of {request.request_id!r} is for {shape}, not for {size}")
        if "generator" not in metadata.extra:
            raise SchemaError(f"the KV of {request.request_id!r} came without a generator")
        if request.lora is not None or "lora" in metadata.extra:
            check_identity(metadata.extra.get("lora"), request.lora, request.request_id)
        params.generator = unpack_generator(metadata.extra["generator"])
        loaded = BagelAdapter().load_contexts(payload, NaiveCache)
        gen, cfg_text, cfg_img = (
            BagelContext(**loaded[name]) if name in branches else BagelContext.elsewhere(name)
            for name in BRANCHES
        )
        return BagelContexts(gen, cfg_text, cfg_img, shape, extra=metadata.extra)

    def extract(self, request: OmniDiffusionRequest) -> KVCacheBundle:
        """The three contexts, by name; see `ModelUtility.extract`."""
        contexts = request.past_key_values
        if not isinstance(contexts, BagelContexts):
            raise SchemaError(f"request {request.request_id!r} has no KV to send")
        if isinstance(contexts.gen.past_key_values, PagedNaiveCache):
            return _paged_bundle(request.request_id, contexts, self._shard())
        return BagelAdapter().export_contexts(
            {name: getattr(contexts, name) for name in BRANCHES},
            request_id=request.request_id,
            image_shape=contexts.image_shape,
            extra=contexts.extra,
            shard=self._shard(),
        )

    def kv_row(self) -> tuple[int, tuple[int, ...]]:
        """Layers, and `(heads of this rank, head_dim)`."""
        heads = len(self._pipeline.model.kv_heads)
        return self._pipeline.num_layers, (heads, self._pipeline.config.llm.head_dim)

    def kv_heads(self) -> int:
        """KV heads of the whole model."""
        return self._pipeline.config.llm.num_key_value_heads

    def _shard(self) -> Shard | None:
        """The heads on this rank; None if it has all."""
        if self._split.degree == 1:
            return None
        return shard_of(self._split.rank, self._split.degree, heads=self.kv_heads())

    def _check_heads(self, payload: KVCacheBundle, request: OmniDiffusionRequest) -> None:
        heads = self._pipeline.model.kv_heads
        for name in payload:
            shard = payload[name].metadata.shard
            sent_heads = (0, self.kv_heads()) if shard is None else shard.heads
            if sent_heads != (heads.start, heads.stop):
                raise SchemaError(
                    f"the KV of {request.request_id!r} has heads {sent_heads[0]}…{sent_heads[1]} "
                    f"in {name}, this rank computes with {heads.start}…{heads.stop}"
                )

    def _check_layers(self, payload: KVCacheBundle, request: OmniDiffusionRequest) -> None:
        layers, is_part = self._pipeline.model.kv_layers, self._split.pipeline.degree > 1
        expected = [layers.start, layers.stop] if is_part else None
        for name in payload:
            sent_layers = payload[name].metadata.extra.get("layers")
            if sent_layers != expected:
                raise SchemaError(
                    f"the KV of {request.request_id!r} has layers {sent_layers or 'all'} in "
                    f"{name}, this rank computes {expected or 'all'}"
                )


def _split(group: ProcessGroup) -> Split:
    """This rank's part of the language model."""
    coords, parallel = group.coords, group.parallel
    ulysses, ring = parallel.ulysses_degree, parallel.ring_degree
    sequence = SequenceSplit(
        coords.ulysses, ulysses, coords.ring, ring, group if ulysses * ring > 1 else None
    )
    stages = parallel.pipeline_parallel_size
    pipeline = LayerSplit(coords.pipeline, stages, group if stages > 1 else None)
    ranks = parallel.tensor_parallel_size
    total = group.all_reduce if ranks > 1 else WHOLE.total
    return Split(coords.tensor, ranks, total, sequence=sequence, pipeline=pipeline)


def _paged_bundle(request_id: str, contexts: BagelContexts, shard: Shard | None) -> KVCacheBundle:
    """The contexts in their blocks; a prefix of `gen` is a reference to it."""
    gen = contexts.gen.past_key_values
    assert isinstance(gen, PagedNaiveCache)
    branches: dict[str, BundleBranch] = {}
    for name in BRANCHES:
        context: BagelContext = getattr(contexts, name)
        cache = context.past_key_values
        metadata = KVMetadata(
            kv_lens=tuple(context.kv_lens),
            ropes=tuple(context.ropes),
            num_layers=len(cache.key_cache),
            dtype=dtype_name(gen.table.pools.dtype),
            image_shape=contexts.image_shape,
            extra=contexts.extra if name == "gen" else {},
            shard=shard,
        )
        tokens = metadata.seq_len
        if not tokens:
            empty = [None] * metadata.num_layers
            blocks = {"key_cache": empty, "value_cache": empty}
            branches[name] = KVCacheTransferData(request_id, blocks, (), metadata)
        elif not isinstance(cache, PagedNaiveCache):
            raise SchemaError(f"{name} of {request_id!r} is not in its blocks")
        elif name == "gen" or cache.table is not gen.table:
            branches[name] = cache.export(request_id, metadata)
        elif tokens == contexts.gen.kv_lens[0]:
            branches[name] = SameAs("gen", metadata)
        else:
            branches[name] = PrefixOf("gen", tokens, metadata)
    return KVCacheBundle(request_id, branches)
