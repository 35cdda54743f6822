"""One rank of the stepped engine: the worker's half of the connector, and its layers' pools."""

from __future__ import annotations

import copy
import dataclasses
from itertools import chain
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.forward_context import create_forward_context, override_forward_context
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput

from omni_kvlink.topology import shard_of
from support.vllm.cache_layers import AttentionLayer, layers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from vllm.config import VllmConfig


DRAFT = "mtp"
"""What the names of a draft model's layers begin with; they are behind the target's."""


class SteppedRank:
    """A rank's part of the layers and of their KV heads; it computes when it is told to.

    With `drafts`, an engine that drafts so many tokens in each step, by the layers named `DRAFT`.
    """

    def __init__(
        self,
        config: VllmConfig,
        groups: Sequence[KVCacheGroupSpec],
        index: int,
        blocks: int,
        drafts: int = 0,
    ):
        config = copy.copy(config)
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.rank = index
        tp_size = config.parallel_config.tensor_parallel_size
        pp_size = config.parallel_config.pipeline_parallel_size
        self.cache_config = cache_config(groups, index, tp_size, pp_size, blocks)
        mine = self.cache_config.kv_cache_groups
        heads = [_heads(each.kv_cache_spec, index % tp_size, tp_size) for each in groups]
        layout = str(config.cache_config.kv_cache_layout)
        self._layers = layers_of(mine, blocks, layout, [first for first, _ in heads])
        self._tables = {name: table for table, each in enumerate(mine) for name in each.layer_names}
        role = KVConnectorRole.WORKER
        self.connector: Any = KVConnectorFactory.create_connector(config, role, self.cache_config)
        config.compilation_config = copy.copy(config.compilation_config)
        config.compilation_config.static_forward_context = dict(self._layers)
        self.pools = {name: self._layers[name].pool for name in self._tables}
        self.connector.register_kv_caches(self.pools)
        self.wrong: set[str] = set()  # requests that read other than they or theirs had written
        self._config, self._drafts = config, drafts
        self._is_last = index // tp_size == pp_size - 1  # the stage that drafts
        self.passes_of_layer = 1  # how often the model computes a layer in a pass

    def execute(self, plan: Any, requests: Any, block_ids: Callable[[str], Any]) -> Any:
        """One pass, in the order of vLLM's model runner; what the connector reports of it."""
        for layer in self._layers.values():
            if isinstance(layer, AttentionLayer):
                layer.pool[plan.new_block_ids_to_zero or []] = 0.0
        self.connector.handle_preemptions(plan.kv_connector_metadata)
        with self._forward_context():
            self.connector.bind_connector_metadata(plan.kv_connector_metadata)
            if plan.has_sync_kv_loads:
                self.connector.start_load_kv(None)
            wrong = self._forward(plan, requests, block_ids)
            if not plan.has_sync_kv_loads:
                self.connector.start_load_kv(None)
            if plan.num_scheduled_tokens and not self._drafts:
                self.connector.wait_for_save()
        results = self.connector.get_transfer_results(plan.finished_req_ids)
        invalid = self.connector.get_block_ids_with_load_errors()
        output = KVConnectorOutput(
            results.finished_sending,
            results.finished_recving,
            kv_connector_stats=self.connector.get_kv_connector_stats(),
            kv_connector_worker_meta=self.connector.build_connector_worker_meta(),
            invalid_block_ids=invalid,
            failed_recving=results.failed_recving,
        )
        if self._drafts and self._is_last:
            for token in range(self._drafts):
                with self._forward_context():
                    wrong |= self._forward(plan, requests, block_ids, drafted=token)
            self.connector.wait_for_save()
        if self._is_last or not self._drafts:  # as vLLM's runner, which forgets the other stages
            self.connector.clear_connector_metadata()
        self.wrong |= {name for name in wrong if invalid.isdisjoint(chain(*block_ids(name)))}
        return output

    def _forward_context(self) -> AbstractContextManager[None]:
        context: Any = override_forward_context(create_forward_context(None, self._config))
        return context  # type: ignore[no-any-return]

    def _forward(
        self,
        plan: Any,
        requests: Any,
        block_ids: Callable[[str], Any],
        drafted: int | None = None,
    ) -> set[str]:
        """Compute the model's layers; the requests that did not find what earlier tokens wrote.

        `drafted`: those of the draft model instead, which has drafted so many tokens before.
        """
        wrong: set[str] = set()
        scheduled = plan.num_scheduled_tokens
        for name, layer in self._layers.items() if scheduled else ():
            if name.startswith(DRAFT) == (drafted is None):
                continue
            is_reported = isinstance(layer, AttentionLayer)  # as in vLLM
            if is_reported:
                self.connector.wait_for_layer_load(name)
            for request_id, count in scheduled.items():
                tokens = requests[request_id].all_token_ids
                stop = requests[request_id].num_computed_tokens  # of the whole step
                table = block_ids(request_id)[self._tables[name]]
                seen, start = [*tokens[:stop]], stop - count
                if drafted:
                    seen, start = [*seen, *[0] * drafted], stop + drafted - 1
                    if start >= len(table) * layer.size:
                        continue
                if not layer.forward(seen, start, table):
                    wrong.add(request_id)
            for _ in range(self.passes_of_layer if is_reported else 0):
                self.connector.save_kv_layer(name, layer.pool, None)
        return wrong


def cache_config(
    groups: Sequence[KVCacheGroupSpec], index: int, tp_size: int, pp_size: int, blocks: int
) -> KVCacheConfig:
    """A rank's share of the groups: its stage's layers, and its heads."""
    names = sorted(name for group in groups for name in group.layer_names)
    stage = index // tp_size
    mine = names[stage * len(names) // pp_size : (stage + 1) * len(names) // pp_size]
    found = []
    for group in groups:
        spec: Any = group.kv_cache_spec
        if tp_size > 1 and isinstance(spec, AttentionSpec):
            spec = dataclasses.replace(spec, num_kv_heads=_heads(spec, 0, tp_size)[1])
        found.append(KVCacheGroupSpec([name for name in group.layer_names if name in mine], spec))
    return KVCacheConfig(blocks, [], found)


def _heads(spec: Any, rank: int, tp_size: int) -> tuple[int, int]:
    """A rank's first head, and how many it has."""
    if not isinstance(spec, AttentionSpec):
        return 0, 1
    start, stop = shard_of(rank, tp_size, heads=spec.num_kv_heads).heads
    return start, stop - start
