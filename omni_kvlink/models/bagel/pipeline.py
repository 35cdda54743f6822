"""The BAGEL pipeline: a prompt of texts and images becomes an image, or a text.

One request at a time. `generate` is `render(prefill(...))`; the two halves may run in different
processes, with a `BagelContexts` and the generator's state between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from omni_kvlink.errors import SchemaError
from omni_kvlink.models.bagel.cache import BagelContext, BagelContexts, LayerCache, NaiveCache
from omni_kvlink.models.bagel.images import (
    ImageLike,
    ResizeRule,
    image_size,
    load_image,
    resize,
    to_pixels,
)
from omni_kvlink.models.bagel.sampling import DenoiseParams
from omni_kvlink.models.bagel.steps import BagelSteps

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from omni_kvlink.models.bagel.denoise import OnStep

Prompt = str | ImageLike | Sequence[str | ImageLike]

# Only the form is fixed by the training: a plan between these tags, then the result.
_THINK = "Before you {task}, plan it step by step. Write the plan between <think> and </think>."
THINK_IMAGE_PROMPT = _THINK.format(task="draw the image")
THINK_TEXT_PROMPT = _THINK.format(task="answer")


class BagelPipeline(BagelSteps):
    """Whole requests, on top of the single steps.

    The think prompts are this library's wording. A checkpoint that was trained with another wording
    gives the best results with that: pass it as `system_prompt`.
    """

    _last: BagelContexts | None = None

    def prefill(
        self,
        inputs: Prompt,
        *,
        think: bool = False,
        understanding: bool = False,
        image_shape: tuple[int, int] | None = None,
        generator: Generator | None = None,
        system_prompt: str | None = None,
        max_think_tokens: int = 1000,
        do_sample: bool = False,
        temperature: float = 0.3,
        caches: Mapping[str, NaiveCache] | None = None,
    ) -> BagelContexts:
        """Read a prompt: the AR half of a request.

        Args:
            inputs: a text, an image, or a list of both in their order.
            think: let the model write a plan first, which becomes part of `gen`.
            understanding: the answer will be a text (`generate_text(contexts.gen)`): images are
                read by the ViT alone.
            image_shape: height and width in pixels of the image to make. An image in the prompt
                decides instead; the default is the largest square.
            generator: used for encoding images and for sampled text; pass it on to `render`.
            system_prompt: replaces the text that think mode puts first.
            max_think_tokens: of the plan; see `generate_text`.
            do_sample: of the plan; see `generate_text`.
            temperature: of the plan; see `generate_text`.
            caches: empty ones for "gen" and "cfg_img", such as an `InPlaceCache`. That of "cfg_img"
                is used only if a text follows an image; until then it shares the rows of gen.
        """
        gen, own_cfg_img = self._beginnings(caches or {})
        cfg_text, cfg_img = self.empty_context(), self.empty_context()
        shape = self._default_shape() if image_shape is None else image_shape
        self._grid(shape)  # refuses it now, not after the work
        if think:
            default = THINK_TEXT_PROMPT if understanding else THINK_IMAGE_PROMPT
            gen = self._append_prompt(gen, system_prompt or default)
            cfg_img = gen.snapshot()
        images = False
        for item in _as_list(inputs):
            if isinstance(item, str):
                cfg_text = gen.snapshot()
                gen = self._append_prompt(gen, item)
                if images:
                    if own_cfg_img is not None:
                        cfg_img, own_cfg_img = cfg_img.moved(own_cfg_img), None
                    cfg_img = self._append_prompt(cfg_img, item)
                else:  # the two are the same tokens at the same positions
                    cfg_img = gen.snapshot()
            else:
                image = resize(load_image(item), self._vae_rule())
                gen = self._append_image(gen, image, generator, latent=not understanding)
                images, shape = True, image_size(image)
                cfg_text = gen.snapshot()
        text = None
        if think and not understanding:
            text = self.generate_text(
                gen,
                max_length=max_think_tokens,
                do_sample=do_sample,
                temperature=temperature,
                generator=generator,
            )
            gen = self._append_prompt(gen, text)
        self._last = BagelContexts(gen, cfg_text, cfg_img, None if understanding else shape, text)
        return self._last

    def render(
        self,
        contexts: BagelContexts,
        params: DenoiseParams | None = None,
        *,
        generator: Generator | None = None,
        noise: Tensor | None = None,
        on_step: OnStep | None = None,
    ) -> Tensor:
        """Make the image of a prefilled prompt: the DiT half of a request.

        Args:
            contexts: returned by `prefill`.
            params: the text-to-image defaults if None.
            generator: the one that `prefill` used, or one set to its state.
            noise: the initial noise, instead of a generator.
            on_step: called after each step with (steps done, all steps); an exception that it
                raises ends the request.

        Returns:
            uint8 [H, W, 3] on the CPU.
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

        Args:
            inputs: see `prefill`.
            params: if None, the published defaults for a prompt with, or without, an image.
            generator: see `prefill`.
            on_step: see `render`.
            prefill: further arguments of `prefill`.
        """
        if params is None:
            edit = any(not isinstance(item, str) for item in _as_list(inputs))
            params = DenoiseParams.for_edit() if edit else DenoiseParams.for_text_to_image()
        contexts = self.prefill(inputs, generator=generator, **prefill)
        return self.render(contexts, params, generator=generator, on_step=on_step)

    def count_tokens(
        self,
        inputs: Prompt,
        *,
        think: bool = False,
        system_prompt: str | None = None,
        max_think_tokens: int = 1000,
    ) -> dict[str, int]:
        """Return the most tokens that `prefill` can put into "gen" and "cfg_img" for an image.

        Exact without think mode, except that "cfg_img" shares the rows of gen until a text follows
        an image.
        """
        gen = texts = 0
        if think:
            gen = texts = len(self.encode_prompt(system_prompt or THINK_IMAGE_PROMPT))
            gen += 3 * max_think_tokens + 2  # a byte that is no text comes back as three
        for item in _as_list(inputs):
            if isinstance(item, str):
                tokens = len(self.encode_prompt(item))
                gen, texts = gen + tokens, texts + tokens
            else:
                gen += self._count_image(item)
        return {"gen": gen, "cfg_img": texts}

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

    def _beginnings(
        self, caches: Mapping[str, NaiveCache]
    ) -> tuple[BagelContext, NaiveCache | None]:
        """Return the empty `gen`, and the cache for `cfg_img` if one is given."""
        for name, cache in caches.items():
            if name not in ("gen", "cfg_img"):
                raise SchemaError(f"caches are for gen and cfg_img, not for {name}")
            self._check(name, BagelContext([0], [0], cache))
        gen = caches.get("gen", NaiveCache(self.num_layers))
        return BagelContext([0], [0], gen), caches.get("cfg_img")

    def _last_contexts(self) -> BagelContexts:
        if self._last is None:
            raise RuntimeError("no request has run yet")
        return self._last

    def _append_prompt(self, context: BagelContext, text: str) -> BagelContext:
        return self.append_text(context, self.encode_prompt(text))

    def _append_image(
        self, context: BagelContext, image: ImageLike, generator: Generator | None, *, latent: bool
    ) -> BagelContext:
        if latent:
            # The rule is applied twice, as published: to a very long image it is not idempotent.
            pixels = to_pixels(resize(image, self._vae_rule()))
            context = self.append_vae_latent(context, self.encode_image(pixels, generator))
        return self.append_vit_image(context, to_pixels(resize(image, self._vit_rule())))

    def _count_image(self, item: ImageLike) -> int:
        """Return the tokens of an image's two blocks, with their markers."""
        height, width = self._vae_rule().size(*image_size(load_image(item)))
        stride, patch = self.config.latent_stride, self.config.vit.patch_size
        latent = (height // stride) * (width // stride)
        height, width = self._vit_rule().size(height, width)
        return latent + (height // patch) * (width // patch) + 4

    def _vae_rule(self) -> ResizeRule:
        return ResizeRule(*self.config.vae_image_size, self.config.latent_stride)

    def _vit_rule(self) -> ResizeRule:
        return ResizeRule(*self.config.vit_image_size, self.config.vit.patch_size)

    def _default_shape(self) -> tuple[int, int]:
        side = self.config.max_latent_size * self.config.latent_stride
        return side, side


def _as_list(inputs: Prompt) -> list[str | ImageLike]:
    if isinstance(inputs, Sequence) and not isinstance(inputs, str):
        return list(inputs)
    return [inputs]
