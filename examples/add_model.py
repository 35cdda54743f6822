"""A model of one's own in the reference engine: an AR stage and a DiT stage, with guidance.

`MoeImageUtility` adds the transformer of `moe_image.py` to the engine, from outside: docs/guides/
model.md explains it step by step. The program starts both stages, the AR stage in a process of its
own, sends the KV of both guidance branches over shared memory, and compares each image with that of
one process without an engine.

    python examples/add_model.py                     # tiny random weights
    python examples/add_model.py --guidance-ranks 2  # each guidance branch on a rank of its own
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from typing import TYPE_CHECKING, Any

import torch
from moe_image import (
    BRANCHES,
    KV,
    Decoder,
    MoeImageModel,
    encode,
    generate,
    guided,
    load,
    make_tiny_checkpoint,
    schedule,
)
from torch import Tensor

from omni_kvlink import KVCacheBundle, KVCacheTransferData, KVMetadata, KVPayload, SchemaError
from omni_kvlink.engine import (
    DiffusionRequestBatch,
    ModelUtility,
    OmniDiffusion,
    OmniDiffusionRequest,
)
from omni_kvlink.engine.errors import RequestAborted
from omni_kvlink.engine.kv.sequence_blocks import SequenceBlocks
from omni_kvlink.engine.outputs import DiffusionOutput
from omni_kvlink.engine.parallel.guidance import RankHooks
from omni_kvlink.engine.worker.model import refuse_params

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from omni_kvlink.engine.config import StageConfig
    from omni_kvlink.engine.kv.block_manager import KVPools
    from omni_kvlink.engine.parallel.process_group import ProcessGroup
    from omni_kvlink.engine.worker.prefill_utility import PrefillSteps

DEFAULTS = {
    "height": 32,
    "width": 32,
    "num_inference_steps": 50,
    "guidance_scale": 5.0,
    "timestep_shift": 3.0,
}


@dataclasses.dataclass
class PromptKV:
    """`past_key_values`: the caches of a prompt, by guidance branch, and the size of its image."""

    caches: dict[str, KVCacheTransferData]
    image_shape: tuple[int, int]

    def past(self, branch: str) -> KV:
        """K and V of each layer as the model reads them, in the memory where they are."""
        blocks = self.caches[branch].layer_blocks
        pairs = zip(blocks["key_cache"], blocks["value_cache"], strict=True)
        return [(k, v) for k, v in pairs if isinstance(k, Tensor) and isinstance(v, Tensor)]


@dataclasses.dataclass
class StepState:
    """A request between two denoising steps: its latents, float32 [images, channels, h, w]."""

    request: OmniDiffusionRequest
    kv: PromptKV
    latents: Tensor
    times: Tensor
    step: int = 0

    @property
    def denoise_completed(self) -> bool:
        return self.step == len(self.times) - 1


class MoeImagePipeline:
    """Denoises and decodes the images of requests; in an AR stage it only holds the model."""

    supports_request_batch = True
    supports_step_execution = True

    def __init__(self, model: MoeImageModel, decoder: Decoder | None):
        self.model, self.decoder, self.hooks = model, decoder, RankHooks()

    def forward(self, req: OmniDiffusionRequest | DiffusionRequestBatch) -> list[DiffusionOutput]:
        """The images of a batch, denoised together; a cancelled request has RequestAborted."""
        batch = req if isinstance(req, DiffusionRequestBatch) else DiffusionRequestBatch([req])
        states, outputs = list[StepState](), dict[str, DiffusionOutput]()
        for request in batch:
            try:
                states.append(self.prepare_encode(request))
            except SchemaError as error:  # noqa: PERF203 - other errors are the whole batch's
                outputs[request.request_id] = DiffusionOutput(request.request_id, error=error)
        while states and not states[0].denoise_completed:
            if all(state.request.is_cancelled() for state in states):
                break
            for state, flow in zip(states, self.denoise_step(states), strict=True):
                self.step_scheduler(state, flow)
        for state in states:
            outputs[state.request.request_id] = self._output(state)
        return [outputs[key] for key in batch.request_ids]

    def prepare_encode(self, request: OmniDiffusionRequest) -> StepState:
        """A request before its first step; without a stage before it, its prompt is read here."""
        if request.past_key_values is None:
            request.past_key_values = self.read_prompt(request)
        params, kv = request.sampling_params, request.past_key_values
        config = self.model.config
        grid = [side // config.vae_downsample_factor for side in kv.image_shape]
        shape = (params.num_outputs_per_prompt, config.latent_channels, *grid)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(params.seed or 0))
        times = schedule(params.num_inference_steps or 0, params.timestep_shift or 0.0)
        device = next(self.model.parameters()).device
        return StepState(request, kv, noise.to(device), times.to(device))

    def denoise_step(self, states: Sequence[StepState]) -> list[Tensor]:
        """The guided flows of all requests, in one pass for each guidance branch."""
        counts = [len(state.latents) for state in states]
        latents = torch.cat([state.latents for state in states])
        times = torch.cat([state.times[state.step].expand(len(state.latents)) for state in states])
        scale = states[0].request.sampling_params.guidance_scale or 0.0
        branches = BRANCHES if scale > 1 else BRANCHES[:1]

        def compute(branch: str) -> Tensor:
            pasts = [state.kv.past(branch) for state in states for _ in state.latents]
            return self.model.velocity(latents, times, pasts)

        if self.hooks.branches is None:
            flows = {branch: compute(branch) for branch in branches}
        else:
            flows = self.hooks.branches(branches, compute, lambda _: torch.empty_like(latents))
        return list(guided(flows, scale).split(counts))

    def step_scheduler(self, state: StepState, noise_pred: Tensor) -> None:
        """Take an Euler step."""
        now, after = state.times[state.step : state.step + 2]
        state.latents, state.step = state.latents + noise_pred * (after - now), state.step + 1

    def post_decode(self, state: StepState) -> DiffusionOutput:
        """Decode a request's images one by one, on the rank that returns them."""
        if self.decoder is None or not self.hooks.decode:
            return DiffusionOutput(state.request.request_id)
        images = torch.stack([self.decoder(one[None]) for one in state.latents])
        return DiffusionOutput(state.request.request_id, images.cpu())

    def read_prompt(self, request: OmniDiffusionRequest) -> PromptKV:
        """Read a prompt without an AR stage."""
        shape = image_shape(request, self.model)
        caches = {}
        for name, ids in encode(text_of(request)).items():
            keys, values = map(list, zip(*self.model.prefill(ids), strict=True))
            layers = {"key_cache": keys, "value_cache": values}
            about = metadata_of(ids, self.model, shape)
            caches[name] = KVCacheTransferData(request.request_id, layers, (), about)
        return PromptKV(caches, shape)

    def _output(self, state: StepState) -> DiffusionOutput:
        if state.request.is_cancelled():
            error = RequestAborted(f"aborted after {state.step} denoising steps")
            return DiffusionOutput(state.request.request_id, error=error)
        return self.post_decode(state)


class MoeImageUtility(ModelUtility):
    """The model of `moe_image.py` in the engine; `config.stage` is "ar", "dit" or "all"."""

    branches = BRANCHES

    def __init__(
        self,
        config: StageConfig,
        device: torch.device,
        process_group: ProcessGroup | None = None,
    ):
        super().__init__(config, device, process_group)
        self._pipeline = MoeImagePipeline(*self._load())

    def _load(self) -> tuple[MoeImageModel, Decoder | None]:
        """The networks of this stage; what is offloaded need not fit on the device as a whole."""
        config = self.config
        device = "cpu" if config.offloads else self.device
        vae_dtype = config.torch_vae_dtype or torch.float32
        return load(config.model, config.stage, config.torch_dtype, vae_dtype, device)

    def modules(self) -> Mapping[str, torch.nn.Module]:
        """The networks by name."""
        decoder = self._pipeline.decoder
        return {"model": self._pipeline.model} | ({} if decoder is None else {"decoder": decoder})

    def reload(self) -> None:
        """Read the weights again, into the networks that there are."""
        for module, fresh in zip(self.modules().values(), self._load(), strict=False):
            assert fresh is not None
            tensors = fresh.state_dict()
            for name, old in module.state_dict(keep_vars=True).items():
                old.data = tensors[name]

    @property
    def pipeline(self) -> MoeImagePipeline:
        """The loaded model."""
        return self._pipeline

    @staticmethod
    def prepare(request: OmniDiffusionRequest) -> None:
        """Refuse what the model cannot do, and set what the request leaves open."""
        params = request.sampling_params
        refuse_params(params, {*DEFAULTS, "num_outputs_per_prompt"})
        for name, value in DEFAULTS.items():
            if getattr(params, name) is None:
                setattr(params, name, value)
        text_of(request)

    def count_tokens(self, request: OmniDiffusionRequest) -> dict[str, int]:
        """The tokens of each guidance branch."""
        image_shape(request, self._pipeline.model)  # a wrong size is an error before it is read
        return {name: len(ids) for name, ids in encode(text_of(request)).items()}

    def kv_row(self) -> tuple[int, tuple[int, ...]]:
        """Layers, and (kv_heads, head_dim)."""
        config = self._pipeline.model.config
        return config.num_hidden_layers, (config.num_key_value_heads, config.head_dim)

    def prefill_steps(
        self,
        request: OmniDiffusionRequest,
        pools: KVPools,
        block_ids: Mapping[str, list[int]],
        num_computed_tokens: int = 0,
    ) -> PrefillSteps:
        """Read the prompt of each branch into its blocks."""
        model, caches = self._pipeline.model, {}
        shape = image_shape(request, model)
        for name, ids in encode(text_of(request)).items():
            yield None  # other requests take their steps
            blocks = SequenceBlocks(pools, block_ids[name])
            rows = blocks.claim(len(ids))
            for layer, (k, v) in enumerate(model.prefill(ids)):
                blocks.write(pools.keys[layer], rows, k)
                blocks.write(pools.values[layer], rows, v)
            about = metadata_of(ids, model, shape)
            caches[name] = blocks.export(request.request_id, about)
        request.past_key_values = PromptKV(caches, shape)
        return DiffusionOutput(request.request_id)

    def extract(self, request: OmniDiffusionRequest) -> KVCacheBundle:
        """The caches of both branches as one payload."""
        kv = request.past_key_values
        if not isinstance(kv, PromptKV):
            raise SchemaError(f"request {request.request_id!r} has no KV to send")
        return KVCacheBundle(request.request_id, dict(kv.caches))

    def convert(self, payload: KVPayload, request: OmniDiffusionRequest) -> PromptKV:
        """The caches of the branches that this rank computes; SchemaError if they do not fit."""
        if not isinstance(payload, KVCacheBundle):
            raise SchemaError(
                f"{payload!r} is one cache; {', '.join(self.own_branches)} are needed"
            )
        if missing := [name for name in self.own_branches if name not in payload.branches]:
            raise SchemaError(f"the KV of {request.request_id!r} lacks {', '.join(missing)}")
        caches = {name: payload[name] for name in self.own_branches}
        for name, cache in caches.items():
            self._check(name, cache, request)
        shape = caches[self.own_branches[0]].metadata.image_shape
        params = request.sampling_params
        if shape is None or shape != (params.height, params.width):
            size = f"{params.height} x {params.width}"
            raise SchemaError(f"the KV of {request.request_id!r} is for {shape}, not for {size}")
        return PromptKV(caches, shape)

    def _check(self, name: str, cache: KVCacheTransferData, request: OmniDiffusionRequest) -> None:
        """Raises SchemaError unless layers, tokens' shape and dtype are those of this model."""
        layers, row = self.kv_row()
        expected = (layers, {row}, {self.config.torch_dtype})
        tensors = [one for one in cache.tensors() if one is not None]
        shapes, dtypes = {tuple(one.shape[1:]) for one in tensors}, {one.dtype for one in tensors}
        found = (cache.metadata.num_layers, shapes, dtypes)
        if found != expected:
            raise SchemaError(
                f"the KV of {request.request_id!r} has, in {name}, (layers, tokens, dtypes) of "
                f"{found}; this model computes with {expected}"
            )

    def layers(self) -> Sequence[torch.nn.Module]:
        """The transformer's layers."""
        return list(self._pipeline.model.layers)

    def encoders_and_decoders(self) -> Sequence[torch.nn.Module]:
        """The decoder, where there is one."""
        decoder = self._pipeline.decoder
        return [] if decoder is None else [decoder]


def metadata_of(ids: list[int], model: MoeImageModel, shape: tuple[int, int]) -> KVMetadata:
    """What is sent with a branch's cache: its length, the image's first position, and its size."""
    layers = model.config.num_hidden_layers
    return KVMetadata(kv_lens=(len(ids),), ropes=(len(ids),), num_layers=layers, image_shape=shape)


def text_of(request: OmniDiffusionRequest) -> str:
    """The prompt; SchemaError unless it is one text."""
    prompt: Any = request.prompt
    if isinstance(prompt, list) and len(prompt) == 1:
        (prompt,) = prompt
    if not isinstance(prompt, str):
        raise SchemaError(f"prompt {prompt!r:.60}: this model reads one text, and nothing else")
    return prompt


def image_shape(request: OmniDiffusionRequest, model: MoeImageModel) -> tuple[int, int]:
    """Height and width of the image; SchemaError unless latents have that size."""
    params, factor = request.sampling_params, model.config.vae_downsample_factor
    shape = (params.height or 0, params.width or 0)
    if min(shape) < factor or any(side % factor for side in shape):
        raise SchemaError(f"height {shape[0]}, width {shape[1]}: multiples of {factor}")
    return shape


def deployment(**dit: Any) -> dict[str, Any]:
    """Two stages over shared memory; with settings of the DiT stage."""
    second = {"stage_id": 1, "input_connectors": {"from_stage_0": "wire"}, **dit}
    return {
        "pipeline": "ar_dit",
        "model_class_name": "add_model:MoeImageUtility",
        "stages": [{"stage_id": 0}, second],
        "connectors": {"wire": {"name": "SharedMemoryConnector"}},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--guidance-ranks", default=1, type=int, choices=[1, 2])
    parser.add_argument("--steps", default=8, type=int, help="denoising steps")
    args = parser.parse_args()
    torch.set_num_threads(1)  # as in the stages, for the same sums
    prompts = ["a fox", "a red fox in the snow, looking back", ""]
    params = [{"num_inference_steps": args.steps, "seed": seed} for seed in range(len(prompts))]
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = make_tiny_checkpoint(scratch)
        how = deployment(cfg_parallel_size=args.guidance_ranks)
        with OmniDiffusion(checkpoint, how, dtype="float32", num_threads=1) as omni:
            outputs = omni.generate(prompts, params, timeout=120.0, on_error="return")
        model, decoder = load(checkpoint, "all")
    assert decoder is not None
    right = 0
    for output, prompt, own in zip(outputs, prompts, params, strict=True):
        alone = generate(model, decoder, prompt, seed=own["seed"], steps=args.steps)
        right += torch.equal(output.result()[0], alone)
        sent = output.stages[0].kv_sent
        print(f"{prompt!r}: {sent.tokens} tokens, {sent.nbytes:,} bytes of KV for a rank")
    print(f"{right} of {len(prompts)} images bit-exact")
    return 0 if right == len(prompts) else 1


if __name__ == "__main__":
    sys.exit(main())
