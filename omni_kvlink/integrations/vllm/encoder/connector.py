"""`OmniKVLinkECConnector`: vLLM's encoder-cache connector over the links of this library."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver
from vllm.platforms import current_platform

from omni_kvlink import KVLink
from omni_kvlink.errors import UnavailableError
from omni_kvlink.integrations.vllm.adapters import AdapterIdentities
from omni_kvlink.integrations.vllm.encoder.loading import EncoderLoader, LoadPlan
from omni_kvlink.integrations.vllm.encoder.sending import EncoderSender, SendPlan
from omni_kvlink.integrations.vllm.identity import encoder_identity, tower_adapter
from omni_kvlink.integrations.vllm.settings import EncoderSettings
from omni_kvlink.integrations.vllm.step import EncoderStep
from omni_kvlink.integrations.vllm.versions import warn_if_untested

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class OmniKVLinkECConnector(ECConnectorBase):
    """Sends the outputs of a multimodal model's encoder from one vLLM engine to others.

    vLLM finds it by `ec_connector` and `ec_connector_module_path`; `ec_connector_extra_config`
    holds the fields of `EncoderSettings`. The producer's answers carry `ec_transfer_params` for
    the requests of the consumers.

    The producer's first worker puts each output into the link. On the consumer, the scheduler's
    half loads it, once for all workers, and holds the request back until it is there: a load that
    fails can then be handled, which in a worker, in the middle of a step, it cannot.

    Raises:
        SchemaError: a setting is wrong or missing.
        UnavailableError: vLLM has no encoder cache for this kind of model.
    """

    _sender: EncoderSender | None = None  # in a producer's first worker
    _sends: SendPlan | None = None  # in a producer's scheduler
    _loader: EncoderLoader | None = None  # in a consumer's scheduler, with `_loads`
    _loads: LoadPlan | None = None

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole):
        super().__init__(vllm_config, role)
        warn_if_untested()
        model, transfer = vllm_config.model_config, vllm_config.ec_transfer_config
        if model.is_encoder_decoder or model.multimodal_config is None:
            kind = "an encoder-decoder" if model.is_encoder_decoder else "for text alone"
            raise UnavailableError(
                f"{model.model} is {kind}: vLLM has no encoder cache for it; leave out "
                "--ec-transfer-config"
            )
        extra, roles = transfer.ec_connector_extra_config, (self.is_producer, self.is_consumer)
        settings = EncoderSettings.of(extra, produces=roles[0], consumes=roles[1])
        self._settings, self._identity = settings, encoder_identity(vllm_config, settings.model)
        self._cached: set[str] = set()  # the items in the engine's encoder cache
        self._loaded: dict[str, torch.Tensor] = {}  # the outputs that get into it in this step
        if role != ECConnectorRole.SCHEDULER:
            return
        identities = AdapterIdentities(settings.adapters, vllm_config)
        adapter = partial(tower_adapter, vllm_config=vllm_config, identities=identities)
        self._fields = PlaceholderMetadataResolver(model)
        if self.is_producer:
            # An engine that also decodes sends only what a request says it is to send.
            url, readers = settings.url, int(transfer.is_encode_only)
            self._sends = SendPlan(self._cached, adapter, self._fields, url=url, readers=readers)
        if self.is_consumer:
            self._loader = EncoderLoader(settings, self._identity)
            encodes = settings.load_failure_policy == "encode"
            self._loads = LoadPlan(
                self._loader, self._cached, adapter, self._can_encode, encodes_failed=encodes
            )

    # The worker's half

    def start_worker_services(self) -> None:
        """Serve the link, if this is the worker that sends: all ranks have the same outputs.

        Raises:
            BusyError: the producer's URL is already served.
        """
        if self.is_producer and self._vllm_config.parallel_config.rank == 0:
            link = KVLink.serve(self._settings.url, **self._settings.serve)
            self._sender = EncoderSender(link, self._identity, self._settings.ttl)

    def start_save_caches(self, **kwargs: Any) -> None:
        """Put the step's outputs that are in the encoder cache from before."""
        if self._sender is not None:
            self._sender.begin(self._step, kwargs["encoder_cache"])

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Copy the outputs that the scheduler has loaded into the encoder cache."""
        for item, output in self._step.loads.items():
            encoder_cache[item] = output.to(current_platform.device_type)
            self.save_caches(encoder_cache, item)

    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any
    ) -> None:
        """Put an output that is now in the encoder cache, if the step sends it."""
        if self._sender is not None:
            self._sender.put(mm_hash, encoder_cache[mm_hash])

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, None]:
        """End the step; no request waits for its outputs to be sent."""
        if self._sender is not None:
            self._sender.end()
        return None, None

    @property
    def _step(self) -> EncoderStep:
        step = self._get_connector_metadata()
        assert isinstance(step, EncoderStep)
        return step

    # The scheduler's half

    def has_cache_item(self, identifier: str) -> bool:
        """Whether the item was loaded; its output is in this process already."""
        return self._loads is not None and self._loads.has(identifier)

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """Whether the request can run; begins the loads that it needs, and does not block."""
        if self._sends is not None:
            self._sends.add(request)
        return self._loads is None or self._loads.is_ready(request, num_computed_tokens)

    def take_unavailable_requests(self) -> set[str]:
        """The requests that cannot have an encoder output; vLLM ends them with an error."""
        return self._loads.take_unavailable() if self._loads is not None else set()

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """Record that the encoder cache has an item, and give it the loaded output."""
        item = request.mm_features[index].identifier
        if self._loads is not None and (tensor := self._loads.take(request, index)) is not None:
            self._loaded[item] = tensor
        self._cached.add(item)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> EncoderStep:
        """The transfers of the step that was scheduled."""
        self._cached.difference_update(scheduler_output.free_encoder_mm_hashes)
        if not scheduler_output.total_num_scheduled_tokens:
            return EncoderStep()  # vLLM's first model runner passes it to no worker
        step, self._loaded = EncoderStep(loads=self._loaded), {}
        if self._sends is not None:
            step.saves = self._sends.plan(scheduler_output.num_scheduled_tokens)
            step.dropped = self._sends.take_dropped()
        return step

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """The `ec_transfer_params` for the requests that read what this one sent."""
        if self._loads is not None:
            self._loads.finish(request)
        return False, self._sends.finish(request) if self._sends is not None else None

    def shutdown(self) -> None:
        """Close the links; unread outputs fail at their readers."""
        for part in (self._sender, self._loader):
            if part is not None:
                part.close()

    def _can_encode(self, feature: MultiModalFeatureSpec) -> bool:
        """Whether the media are here, and not only what reserves their positions in the prompt."""
        if feature.data is None:
            return False
        sizes = self._fields.fields_for(feature.modality)
        return any(elem.data is not None for key, elem in feature.data.items() if key not in sizes)
