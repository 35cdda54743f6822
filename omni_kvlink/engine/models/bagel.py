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
from omni_kvlink.adapters import BagelAdapter, pack_generator, unpack_generator
from omni_kvlink.engine.config import OmniARConfig, StageConfig
from omni_kvlink.engine.models.bagel_pipeline import OmniBagelPipeline, fill_params, readable
from omni_kvlink.engine.models.paged_naive_cache import PagedNaiveCache, SequenceBlocks
from omni_kvlink.engine.outputs import DiffusionOutput
from omni_kvlink.engine.worker.model import ModelUtility, PrefillSteps
from omni_kvlink.errors import SchemaError
from omni_kvlink.lowlevel import dtype_name
from omni_kvlink.models.bagel import BagelContext, BagelContexts, NaiveCache
from omni_kvlink.models.bagel.loading import load_autoencoder, load_config, load_model
from omni_kvlink.models.bagel.shards import Split
from omni_kvlink.topology import shard_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from omni_kvlink.engine.kv.block_manager import KVPools
    from omni_kvlink.engine.parallel.process_group import ProcessGroup
    from omni_kvlink.engine.request import OmniDiffusionRequest
    from omni_kvlink.models.bagel.model import Stage

BRANCHES = ("gen", "cfg_text", "cfg_img")


class BagelUtility(ModelUtility):
    """BAGEL, loaded; `config.stage` is "ar", "dit", or "all" for both in one process."""

    branches = BRANCHES

    def __init__(
        self, config: StageConfig, device: torch.device, process_group: ProcessGroup | None = None
    ):
        super().__init__(config, device, process_group)
        stage: Stage = config.stage  # type: ignore[assignment]  # checked by from_pretrained
        group = self.process_group
        rank, of = group.coords.tensor, group.parallel.tensor_parallel_size
        self._split = Split(rank, of, group.all_reduce) if of > 1 else Split()
        self._think = isinstance(config, OmniARConfig) and config.think
        self._pipeline = OmniBagelPipeline.from_pretrained(
            config.model, dtype=config.torch_dtype, device=device, stage=stage, split=self._split
        )

    @staticmethod
    def prepare(request: OmniDiffusionRequest) -> None:
        """Set the published defaults; see `ModelUtility.prepare`."""
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
        own, root = self._pipeline, Path(self.config.model)
        where = load_config(root), own.stage, self.config.torch_dtype, self.device
        model = load_model(root, *where, self._split)
        fresh = {"model": model, "autoencoder": load_autoencoder(root, *where)}
        for name, module in self.modules().items():
            tensors = fresh[name].state_dict()
            for key, old in module.state_dict(keep_vars=True).items():
                old.data = tensors[key]

    def convert(self, payload: KVPayload, request: OmniDiffusionRequest) -> BagelContexts:
        """The three contexts, those of other guidance ranks elsewhere; sets the generator."""
        group = self.process_group
        own = BRANCHES[group.coords.guidance :: group.parallel.cfg_parallel_size]
        if not isinstance(payload, KVCacheBundle):
            raise SchemaError(f"{payload!r} is one cache; BAGEL needs {', '.join(own)}")
        missing = [name for name in own if name not in payload.branches]
        if missing:
            raise SchemaError(f"the KV of {request.request_id!r} lacks {', '.join(missing)}")
        self._check_heads(payload, request)
        metadata, params = payload[own[0]].metadata, request.sampling_params
        shape, size = metadata.image_shape, (params.height, params.width)
        if size not in (shape, (None, None)):
            raise SchemaError(f"the KV of {request.request_id!r} is for {shape}, not for {size}")
        if "generator" not in metadata.extra:
            raise SchemaError(f"the KV of {request.request_id!r} came without a generator")
        params.generator = unpack_generator(metadata.extra["generator"])
        loaded = BagelAdapter().load_contexts(payload, NaiveCache)
        gen, cfg_text, cfg_img = (
            BagelContext(**loaded[name]) if name in own else BagelContext.elsewhere(name)
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

    def count_tokens(self, request: OmniDiffusionRequest) -> dict[str, int]:
        """The most tokens that a prompt can put into each context."""
        most = request.sampling_params.max_tokens
        prompt = readable(request.prompt)
        return self._pipeline.count_tokens(prompt, think=self._think, max_think_tokens=most)

    def kv_row(self) -> tuple[int, tuple[int, ...]]:
        """Layers, and `(heads of this rank, head_dim)`."""
        heads = len(self._pipeline.model.kv_heads)
        return self._pipeline.num_layers, (heads, self._pipeline.config.llm.head_dim)

    def kv_heads(self) -> int:
        """KV heads of the whole model."""
        return self._pipeline.config.llm.num_key_value_heads

    def prefill_steps(
        self, request: OmniDiffusionRequest, pools: KVPools, block_ids: Mapping[str, list[int]]
    ) -> PrefillSteps:
        """Read a prompt into blocks; see `ModelUtility.prefill_steps`."""
        params = request.sampling_params
        generator = torch.Generator().manual_seed(params.seed or 0)
        contexts = yield from self._pipeline.prefill_steps(
            readable(request.prompt),
            think=self._think,
            image_shape=_shape(params.height, params.width),
            generator=generator,
            max_think_tokens=params.max_tokens,
            do_sample=params.temperature > 0,
            temperature=params.temperature,
            top_k=max(0, params.top_k),
            top_p=params.top_p,
            repetition_penalty=params.repetition_penalty,
            caches={
                name: PagedNaiveCache(SequenceBlocks(pools, blocks))
                for name, blocks in block_ids.items()
            },
        )
        self._pipeline.release_caches()
        contexts.extra = {"generator": pack_generator(generator)}
        request.past_key_values = contexts
        return DiffusionOutput(request.request_id, text=contexts.text)

    def advance(self, passes: Sequence[Any]) -> list[Any]:
        """Read the next token of several texts in one pass."""
        return list(self._pipeline.advance(passes))

    def _shard(self) -> Shard | None:
        """The heads on this rank; None if it has all."""
        if self._split.of == 1:
            return None
        return shard_of(self._split.rank, self._split.of, heads=self.kv_heads())

    def _check_heads(self, payload: KVCacheBundle, request: OmniDiffusionRequest) -> None:
        heads = self._pipeline.model.kv_heads
        for name in payload:
            shard = payload[name].metadata.shard
            found = (0, self.kv_heads()) if shard is None else shard.heads
            if found != (heads.start, heads.stop):
                raise SchemaError(
                    f"the KV of {request.request_id!r} has heads {found[0]}…{found[1]} in {name}, "
                    f"this rank computes with {heads.start}…{heads.stop}"
                )


def _shape(height: int | None, width: int | None) -> tuple[int, int] | None:
    if height is None and width is None:
        return None
    if height is None or width is None:
        raise SchemaError(f"height {height} and width {width}: give both or none")
    return height, width


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
        elif tokens == gen.tokens:
            branches[name] = SameAs("gen", metadata)
        else:
            branches[name] = PrefixOf("gen", tokens, metadata)
    return KVCacheBundle(request_id, branches)
