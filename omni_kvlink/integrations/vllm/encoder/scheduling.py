"""The scheduler's half of the connector: decides what is sent, loaded and encoded."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver

from omni_kvlink.integrations.vllm.adapters import AdapterIdentities
from omni_kvlink.integrations.vllm.encoder.identity import tower_adapter
from omni_kvlink.integrations.vllm.encoder.load_plan import LoadPlan
from omni_kvlink.integrations.vllm.encoder.loader import EncoderLoader
from omni_kvlink.integrations.vllm.encoder.send_plan import SendPlan
from omni_kvlink.integrations.vllm.encoder.step import EncoderStep

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from omni_kvlink.integrations.vllm.encoder.settings import EncoderSettings


class EncoderScheduling:
    """The plans of one engine's scheduler; `sends` on a producer, `loads` on a consumer."""

    sends: SendPlan | None = None
    loads: LoadPlan | None = None

    def __init__(
        self, vllm_config: VllmConfig, settings: EncoderSettings, identity: Mapping[str, str]
    ):
        transfer = vllm_config.ec_transfer_config
        identities = AdapterIdentities(settings.adapters, vllm_config)
        adapter = partial(tower_adapter, vllm_config=vllm_config, identities=identities)
        self._fields = PlaceholderMetadataResolver(vllm_config.model_config)
        self._cached: set[str] = set()
        self._loaded: dict[str, torch.Tensor] = {}
        self._loader: EncoderLoader | None = None
        if transfer.is_ec_producer:
            # An engine that also decodes sends only what a request says it is to send.
            readers, fields = int(transfer.is_encode_only), self._fields
            url = settings.url
            self.sends = SendPlan(self._cached, adapter, fields, url=url, readers=readers)
        if transfer.is_ec_consumer:
            self._loader = EncoderLoader(settings, identity)
            encodes = settings.load_failure_policy == "encode"
            self.loads = LoadPlan(
                self._loader, self._cached, adapter, self._can_encode, encodes_failed=encodes
            )

    def is_ready(self, request: Request, computed: int) -> bool:
        """Whether a request can run now, as far as its encoder outputs are concerned."""
        if self.sends is not None:
            self.sends.add(request)
        return self.loads is None or self.loads.is_ready(request, computed)

    def allocate(self, request: Request, index: int) -> None:
        """An item gets into the encoder cache in this step: loaded, or encoded."""
        if self.loads is not None and (tensor := self.loads.take(request, index)) is not None:
            self._loaded[request.mm_features[index].identifier] = tensor
        self._cached.add(request.mm_features[index].identifier)

    def step(self, scheduled: SchedulerOutput) -> EncoderStep:
        """The transfers of the step that was scheduled."""
        self._cached.difference_update(scheduled.free_encoder_mm_hashes)
        if not scheduled.total_num_scheduled_tokens:
            return EncoderStep()  # vLLM's first model runner passes it to no worker
        step = EncoderStep(loads=self._loaded)
        self._loaded = {}
        if self.sends is not None:
            step.saves = self.sends.plan(scheduled.num_scheduled_tokens)
            step.dropped = self.sends.take_dropped()
        return step

    def finish(self, request: Request) -> dict[str, Any] | None:
        """A request has ended: the params for the requests that read what it sent."""
        if self.loads is not None:
            self.loads.finish(request)
        return self.sends.finish(request) if self.sends is not None else None

    def close(self) -> None:
        """Close the links of a consumer."""
        if self._loader is not None:
            self._loader.close()

    def _can_encode(self, feature: MultiModalFeatureSpec) -> bool:
        """Whether the media are here, and not only what reserves their positions in the prompt."""
        if feature.data is None:
            return False
        sizes = self._fields.fields_for(feature.modality)
        return any(elem.data is not None for key, elem in feature.data.items() if key not in sizes)
