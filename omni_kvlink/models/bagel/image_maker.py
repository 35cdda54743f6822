"""`ImageMaker`: denoises latents over contexts and decodes them, the DiT half of a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from omni_kvlink.errors import SchemaError
from omni_kvlink.models.bagel.cache import BagelContext, BagelContexts, ElsewhereCache
from omni_kvlink.models.bagel.denoise import DenoiseState, OnStep, guided_flows
from omni_kvlink.models.bagel.embeddings import unpatchify
from omni_kvlink.models.bagel.hooks import DenoiseHooks
from omni_kvlink.models.bagel.loaded_stage import LoadedStage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.models.bagel.sampling import DenoiseParams

PREVIEW_SIDE_PIXELS = 256
"""The most that the longest side of a preview may have; a larger latent is averaged down first."""


@dataclass(eq=False, repr=False)
class ImageMaker(LoadedStage):
    """Denoises and decodes, in single steps or as a whole.

    Attributes:
        hooks: an engine's callbacks in the denoising loop; none by default.
    """

    hooks: DenoiseHooks = field(default_factory=DenoiseHooks)

    def initial_noise(
        self, image_shape: Sequence[int] | None, generator: Generator | None = None
    ) -> Tensor:
        """Draw noise [h * w, patch_dim] float32 for an image on the generator's device."""
        height, width = self.config.latent_grid(image_shape)
        origin = "cpu" if generator is None else generator.device
        shape = (height * width, self.config.patch_dim)
        return torch.randn(shape, generator=generator, device=origin)

    @torch.no_grad()
    def denoise(
        self,
        contexts: BagelContexts,
        noise: Tensor,
        params: DenoiseParams,
        on_step: OnStep | None = None,
    ) -> Tensor:
        """Denoise noise [h * w, patch_dim] to a latent [z, H / d, W / d] float32.

        Only the contexts that the parameters require are read; none is changed. `on_step` is called
        after each step with (steps done, all steps).

        Raises:
            SchemaError: a context is incomplete or does not fit the model, or the noise does not
                have the shape for `contexts.image_shape`.
        """
        return self.denoise_batch([contexts], [noise], params, on_step)[0]

    @torch.no_grad()
    def denoise_batch(
        self,
        contexts: Sequence[BagelContexts],
        noise: Sequence[Tensor],
        params: DenoiseParams,
        on_step: OnStep | None = None,
    ) -> list[Tensor]:
        """Denoise several requests with images of one size in one pass.

        In float32 a latent differs from that of `denoise` by less than 1e-5 of its largest value:
        products of larger matrices may be summed in another order.

        Raises:
            SchemaError: as in `denoise`, or the images differ in size.
        """
        states = [
            self.begin_denoise(request_contexts, request_noise, params)
            for request_contexts, request_noise in zip(contexts, noise, strict=True)
        ]
        on_clean = self.hooks.on_clean
        for done in range(1, params.num_steps + 1):
            pairs = list(zip(states, self.guided_flows(states), strict=True))
            clean = [state.clean(flow) for state, flow in pairs] if on_clean is not None else []
            for state, flow in pairs:
                state.integrate(flow)
            if on_clean is not None:
                on_clean(done, clean)
            if on_step is not None:
                on_step(done, params.num_steps)
        return [self.latent(state) for state in states]

    def begin_denoise(
        self, contexts: BagelContexts, noise: Tensor, params: DenoiseParams
    ) -> DenoiseState:
        """Return the state of an image before its first step; raises as `denoise`."""
        self._require("flow head", self.stage != "ar")
        self.check_request(contexts, noise, params)
        noise = noise.to(self.device)
        return DenoiseState(contexts, noise, self.config.latent_grid(contexts.image_shape), params)

    @torch.no_grad()
    def guided_flows(self, states: Sequence[DenoiseState]) -> list[Tensor]:
        """Return the flow [h * w, patch_dim] of each image's next step, in one pass of them all.

        The images have one size; their steps, schedules and guidance may differ, which hooks for
        reuse do not support. No state changes: `DenoiseState.integrate` takes the step. Tolerances
        are those of `denoise_batch`; an image that is alone has the bits of `denoise`.

        Raises:
            SchemaError: the images differ in size.
        """
        _check_grids(states)
        return guided_flows(self.model, states, self._markers(), hooks=self.hooks)

    def latent(self, state: DenoiseState) -> Tensor:
        """Return an image's latent [z, H / d, W / d] float32 after its steps so far."""
        return unpatchify(state.rows, *state.grid, self.config.latent_patch_size)

    def check_request(self, contexts: BagelContexts, noise: Tensor, params: DenoiseParams) -> None:
        """Raise SchemaError unless `denoise` has all it needs for this request."""
        height, width = self.config.latent_grid(contexts.image_shape)
        if tuple(noise.shape) != (expected := (height * width, self.config.patch_dim)):
            raise SchemaError(f"the noise has shape {tuple(noise.shape)}, wanted {expected}")
        for name in params.branches(guided=True):
            context: BagelContext = getattr(contexts, name)
            if not isinstance(context.past_key_values, ElsewhereCache):
                self.model.check_context(name, context)

    @torch.no_grad()
    def decode(self, latent: Tensor) -> Tensor:
        """Decode a latent [z, H / d, W / d] to an image: uint8 [H, W, 3] on the CPU."""
        self._require("autoencoder's decoder", self.stage != "ar")
        return _levels(self.autoencoder.decode(latent))

    @torch.no_grad()
    def decode_shared(self, latent: Tensor) -> Tensor | None:
        """Decode a latent on the ranks that the hooks name; None where another has the image."""
        if self.hooks.tiles is None:
            return self.decode(latent) if self.hooks.decode else None
        image = self.autoencoder.decode_divided(latent, self.hooks.tiles)
        return None if image is None else _levels(image)


def decode_preview(pipeline: ImageMaker, rows: Tensor, image_shape: Sequence[int]) -> Tensor:
    """Decode a latent's rows [h * w, patch_dim], as `DenoiseHooks.on_clean` gets them.

    Returns uint8 [H, W, 3] on the CPU: `pipeline.decode` of the latent, or of a smaller one.
    """
    config = pipeline.config
    latent = unpatchify(rows, *config.latent_grid(image_shape), config.latent_patch_size)
    factor = -(-max(image_shape) // PREVIEW_SIDE_PIXELS)
    return pipeline.decode(latent if factor == 1 else F.avg_pool2d(latent[None], factor)[0])


def _levels(image: Tensor) -> Tensor:
    """An image [3, H, W], about [-1, 1], as uint8 [H, W, 3] on the CPU."""
    levels = (image * 0.5 + 0.5).clamp(0, 1).permute(1, 2, 0) * 255
    return levels.to(torch.uint8).cpu().contiguous()


def _check_grids(states: Sequence[DenoiseState]) -> None:
    if len({state.grid for state in states}) != 1:
        shapes = sorted({str(state.contexts.image_shape) for state in states})
        raise SchemaError(f"one batch for images of {shapes}; they must have one size")
