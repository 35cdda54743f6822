"""The BAGEL pipeline: a prompt of texts and images becomes an image, or a text.

One request at a time. `generate` is `render(prefill(...))`; the two halves may run in different
processes, with a `BagelContexts` and the generator's state between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omni_kvlink.models.bagel.image_maker import ImageMaker
from omni_kvlink.models.bagel.loaded_stage import VAE_DTYPE as VAE_DTYPE
from omni_kvlink.models.bagel.prompt_reader import PromptReader
from omni_kvlink.models.bagel.prompts import THINK_IMAGE_PROMPT as THINK_IMAGE_PROMPT
from omni_kvlink.models.bagel.prompts import THINK_TEXT_PROMPT as THINK_TEXT_PROMPT
from omni_kvlink.models.bagel.prompts import Prompt, is_text, prompt_items
from omni_kvlink.models.bagel.sampling import DenoiseParams

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from omni_kvlink.models.bagel.cache import BagelContexts, LayerCache
    from omni_kvlink.models.bagel.denoise import OnStep


@dataclass(eq=False, repr=False)
class BagelPipeline(PromptReader, ImageMaker):
    """A loaded checkpoint, or one stage's part of it: single steps, and whole requests of them.

    The think prompts are this library's wording. A checkpoint that was trained with another wording
    gives the best results with that: pass it as `system_prompt`.
    """

    def render(
        self,
        contexts: BagelContexts,
        params: DenoiseParams | None = None,
        *,
        generator: Generator | None = None,
        noise: Tensor | None = None,
        on_step: OnStep | None = None,
    ) -> Tensor:
        """Make the image, uint8 [H, W, 3] on the CPU, of a prefilled prompt: the DiT half.

        Args:
            contexts: returned by `prefill`.
            params: the text-to-image defaults if None.
            generator: the one that `prefill` used, or one set to its state.
            noise: the initial noise, instead of a generator.
            on_step: called after each step with (steps done, all steps); an exception that it
                raises ends the request.
        """
        if noise is None:
            noise = self.initial_noise(contexts.image_shape, generator)
        elif generator is not None:
            raise ValueError("render takes a generator or the noise, not both")
        latent = self.denoise(contexts, noise, params or DenoiseParams(), on_step)
        self._last = contexts
        return self.decode(latent)

    def generate(
        self,
        inputs: Prompt,
        params: DenoiseParams | None = None,
        *,
        generator: Generator | None = None,
        on_step: OnStep | None = None,
        **prefill: Any,
    ) -> Tensor:
        """Make an image of a prompt: `render(prefill(...))` with one generator.

        If `params` is None, with the published defaults for a prompt with, or without, an image.
        """
        if params is None:
            edit = not all(map(is_text, prompt_items(inputs)))
            params = DenoiseParams.for_edit() if edit else DenoiseParams.for_text_to_image()
        contexts = self.prefill(inputs, generator=generator, **prefill)
        return self.render(contexts, params, generator=generator, on_step=on_step)

    def get_past_key_values(self) -> LayerCache:
        """Return the `gen` cache of the last request."""
        return self._last_contexts().gen.past_key_values

    def get_kv_metadata(self) -> dict[str, Any]:
        """Return the kv_lens, ropes, num_layers and image_shape of that cache."""
        last = self._last_contexts()
        return {
            "kv_lens": list(last.gen.kv_lens),
            "ropes": list(last.gen.ropes),
            "num_layers": self.num_layers,
            "image_shape": last.image_shape,
        }

    def release_caches(self) -> None:
        """Drop the last request's caches, which keep a link's memory reserved if they are in it."""
        self._last = None

    def _last_contexts(self) -> BagelContexts:
        if self._last is None:
            raise RuntimeError(
                "no request has run, or its caches were released: an engine's runner releases them "
                "after the pass, once they are sent"
            )
        return self._last
