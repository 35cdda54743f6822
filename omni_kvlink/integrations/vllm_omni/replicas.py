"""The replicas of a sending stage: which of them are served, and which one has a request."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from vllm_omni.distributed.omni_connectors.utils.initialization import (
    KV_REPLICA_PORT_STRIDE,
    compute_connector_zmq_port,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omni_kvlink.integrations.vllm_omni.settings import OmniSettings
    from omni_kvlink.integrations.vllm_omni.stage_edges import StageEdge

REPLICA_KEY = "replica"
"""The key of a replica's number in the metadata that `put` returns."""

MAX_REMEMBERED = 4096
"""Requests whose replica is remembered; the oldest is forgotten for another one."""

DEFAULT_PORT = 50051
"""vLLM-Omni's base of the ports that it reports for senders."""


class Replicas:
    """Finds the replica of the sender that has a request; thread-safe. `config` is its stage's.

    vLLM-Omni sends a request to one replica of each stage. What it passes on to the receiver, the
    port of a replica, is used to tell what the end of a replica means, and for nothing else: each
    replica is asked. A replica that has sent a chunk of a request has the others, too.
    """

    def __init__(self, settings: OmniSettings, config: Mapping[str, Any]):
        self._settings, self._port = settings, config.get("zmq_port", DEFAULT_PORT)
        self._lock = threading.Lock()
        self._sources: dict[str, StageEdge] = {}  # by request, the oldest first

    def edges(
        self, edge: StageEdge, key: str, metadata: Mapping[str, Any] | None
    ) -> list[StageEdge]:
        """The edges by which a payload may come: of the replica that has it, or of all served.

        The first replica's, if none is served.
        """
        number = (metadata or {}).get(REPLICA_KEY)
        if type(number) is int and number >= 0:
            return [edge._replace(replica=number)]
        source = self._sources.get(edge.request_of(key))
        if source is not None and source._replace(replica=0) == edge:
            return [source]
        return edge.served(self._settings) or [edge]

    def likely(self, edge: StageEdge, metadata: Mapping[str, Any] | None) -> StageEdge | None:
        """The edge of the replica whose port vLLM-Omni reports as the sender's; None if unknown."""
        try:
            port, base = int((metadata or {})["source_port"]), int(self._port)
            first = compute_connector_zmq_port(
                base,
                purpose="kv_transfer" if edge.is_cache else "request_forwarding",
                from_stage=int(edge.from_stage),
                local_rank=edge.rank,
            )
        except (KeyError, TypeError, ValueError):
            return None
        replica, rest = divmod(port - first, KV_REPLICA_PORT_STRIDE)
        return edge._replace(replica=replica) if replica >= 0 and not rest else None

    def remember(self, source: StageEdge, key: str) -> None:
        """A payload of a request has come by this edge."""
        request = source.request_of(key)
        with self._lock:
            self._sources.pop(request, None)
            self._sources[request] = source
            if len(self._sources) > MAX_REMEMBERED:
                del self._sources[next(iter(self._sources))]

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        with self._lock:
            self._sources.pop(request_id, None)
