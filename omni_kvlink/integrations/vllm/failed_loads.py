"""The report of an engine's ranks to its scheduler: the loads that failed."""

from __future__ import annotations

import dataclasses

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata


@dataclasses.dataclass(frozen=True)
class FailedLoads(KVConnectorWorkerMetadata):
    """Requests whose cache a rank could not load: the other ranks need not load theirs."""

    request_ids: frozenset[str]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> FailedLoads:
        """The requests of both."""
        assert isinstance(other, FailedLoads)
        return FailedLoads(self.request_ids | other.request_ids)
