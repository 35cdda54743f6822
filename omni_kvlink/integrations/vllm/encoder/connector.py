"""`OmniKVLinkECConnector`: vLLM's encoder-cache connector over the links of this library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorRole
from vllm.platforms import current_platform

from omni_kvlink import KVLink
from omni_kvlink.errors import UnavailableError
from omni_kvlink.integrations.vllm.encoder.identity import encoder_identity
from omni_kvlink.integrations.vllm.encoder.scheduling import EncoderScheduling
from omni_kvlink.integrations.vllm.encoder.sender import EncoderSender
from omni_kvlink.integrations.vllm.encoder.settings import EncoderSettings
from omni_kvlink.integrations.vllm.encoder.step import EncoderStep
from omni_kvlink.integrations.vllm.versions import warn_if_untested

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
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

    _scheduling: EncoderScheduling | None = None
    _sender: EncoderSender | None = None

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole):
        super().__init__(vllm_config, role)
        warn_if_untested()
        model = vllm_config.model_config
        if model.is_encoder_decoder or model.multimodal_config is None:
            kind = "an encoder-decoder" if model.is_encoder_decoder else "for text alone"
            raise UnavailableError(
                f"{model.model} is {kind}: vLLM has no encoder cache for it; leave out "
                "--ec-transfer-config"
            )
        self._settings = EncoderSettings.of(
            vllm_config.ec_transfer_config.ec_connector_extra_config,
            produces=self.is_producer,
            consumes=self.is_consumer,
        )
        self._identity = encoder_identity(vllm_config, self._settings.model)
        if role == ECConnectorRole.SCHEDULER:
            self._scheduling = EncoderScheduling(vllm_config, self._settings, self._identity)

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

    @property
    def _plans(self) -> EncoderScheduling:
        assert self._scheduling is not None, "this is the worker's half"
        return self._scheduling

    def has_cache_item(self, identifier: str) -> bool:
        """Whether the item was loaded; its output is in this process already."""
        return self._plans.loads is not None and self._plans.loads.has(identifier)

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """Whether the request can run; begins the loads that it needs, and does not block."""
        return self._plans.is_ready(request, num_computed_tokens)

    def take_unavailable_requests(self) -> set[str]:
        """The requests that cannot have an encoder output; vLLM ends them with an error."""
        return self._plans.loads.take_unavailable() if self._plans.loads is not None else set()

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """Record that the encoder cache has an item, and give it the loaded output."""
        self._plans.allocate(request, index)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> EncoderStep:
        """The transfers of the step that was scheduled."""
        return self._plans.step(scheduler_output)

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """The `ec_transfer_params` for the requests that read what this one sent."""
        return False, self._plans.finish(request)

    def shutdown(self) -> None:
        """Close the links; unread outputs fail at their readers."""
        for part in (self._sender, self._scheduling):
            if part is not None:
                part.close()
