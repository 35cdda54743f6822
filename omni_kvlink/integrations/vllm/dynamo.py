"""The connector in Dynamo's table of protocols, which says what its router passes on."""

from __future__ import annotations

from typing import Any

from dynamo.vllm.kv_connector_protocols import KV_CONNECTOR_PROTOCOLS, KvConnectorProtocol

from omni_kvlink.integrations.vllm.params import FETCH, SEND


class DynamoProtocol(KvConnectorProtocol):
    """The `kv_transfer_params` of a prefill request and of its decode request.

    Dynamo makes one for each prefill request; the decode request gets the prefill's answer.
    """

    def prefill_request_kv_transfer_params(self) -> dict[str, Any]:
        """Compute the prompt, and send its cache."""
        return {SEND: True, FETCH: False}

    def decode_request_kv_transfer_params(self, prefill_response: Any) -> dict[str, Any] | None:
        """The params of the answer; None if its cache is not sent."""
        params: dict[str, Any] | None = prefill_response.kv_transfer_params
        return params


def register(name: str) -> None:
    """Enter the connector of this name, unless Dynamo has an entry for it."""
    KV_CONNECTOR_PROTOCOLS.setdefault(name, DynamoProtocol)
