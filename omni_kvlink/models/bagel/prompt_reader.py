"""`PromptReader`: reads texts and images into contexts, the AR half of a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Generator, Tensor

from omni_kvlink.errors import SchemaError
from omni_kvlink.models.bagel.cache import BagelContext, BagelContexts, NaiveCache
from omni_kvlink.models.bagel.hidden_states import HiddenStates, Keep
from omni_kvlink.models.bagel.images import (
    ImageLike,
    image_size,
    load_image,
    resize,
    shape_pair,
    to_pixels,
)
from omni_kvlink.models.bagel.prefill_steps import PromptTokens, Steps, all_steps
from omni_kvlink.models.bagel.prompts import (
    Prompt,
    TokenIds,
    checked_token_ids,
    first_text,
    is_text,
    prompt_items,
)
from omni_kvlink.models.bagel.text_writer import TextWriter
from omni_kvlink.models.bagel.token_sampler import TokenSampler

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from omni_kvlink.models.bagel.text_output import OnToken

OnLastPass: TypeAlias = "Callable[[BagelContexts], None]"
"""Called with the contexts as they will be: lengths, positions and `image_shape` are final, and the
caches are those that the last passes extend. Nothing draws from the generator after it."""


@dataclass(eq=False, repr=False)
class PromptReader(TextWriter):
    """Reads prompts, in single steps or as a whole.

    Each step returns a new context; the given one and its tensors are not changed.
    """

    _last: BagelContexts | None = field(default=None, init=False)

    def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids of a text, between its begin and end markers."""
        special = self.special_tokens
        return [special.bos, *self.tokenizer.encode(text), special.eos]

    def text_ids(self, inputs: Prompt, system_prompt: str = "") -> list[int]:
        """Return the token ids of a prompt's texts, of the system prompt first: `prompt_ids`."""
        items = [*([system_prompt] if system_prompt else []), *prompt_items(inputs)]
        return [token for item in items if is_text(item) for token in self._text_ids(item)]

    @torch.no_grad()
    def append_text(self, context: BagelContext, token_ids: Sequence[int]) -> BagelContext:
        """Read token ids (markers included): n tokens, n positions, causal."""
        ids = checked_token_ids(token_ids, self.config.llm.vocab_size)
        self.model.check_context("context", context)
        return self.model.extend(context, self.model.embed(ids), mode="und", causal=True)[0]

    @torch.no_grad()
    def append_vae_latent(self, context: BagelContext, latent: Tensor) -> BagelContext:
        """Read an encoded image [z, H, W]: h * w + 2 tokens, one position."""
        z = self.config.ae.z_channels
        if latent.ndim != 3 or latent.shape[0] != z:
            raise SchemaError(f"a latent has shape [{z}, H, W], not {tuple(latent.shape)}")
        self.model.check_context("context", context)
        rows = self._between_markers(self.model.encoded_latent_rows(latent))
        return self.model.extend(context, rows, mode="gen", causal=False)[0]

    @torch.no_grad()
    def append_vit_image(self, context: BagelContext, pixels: Tensor) -> BagelContext:
        """Read pixels [3, H, W] in [-1, 1] through the ViT: h * w + 2 tokens, one position."""
        self._require("ViT", self.stage != "dit")
        patch = self.config.vit.patch_size
        if pixels.ndim != 3 or pixels.shape[0] != 3 or any(n % patch for n in pixels.shape[1:]):
            expected = f"[3, H, W] with H and W multiples of {patch}"
            raise SchemaError(f"pixels have shape {expected}, not {tuple(pixels.shape)}")
        self.model.check_context("context", context)
        rows = self._between_markers(self.model.vit_rows(pixels))
        return self.model.extend(context, rows, mode="und", causal=False)[0]

    @torch.no_grad()
    def encode_image(self, pixels: Tensor, generator: Generator | None = None) -> Tensor:
        """Sample the latent [z, H / d, W / d] float32 of pixels [3, H, W] in [-1, 1].

        Draws z * H / d * W / d random numbers, so that a seed alone no longer determines the noise
        that is drawn afterwards.
        """
        self._require("autoencoder's encoder", self.stage != "dit")
        return self.autoencoder.encode(pixels, generator)

    def prefill_steps(
        self,
        /,
        inputs: Prompt,
        *,
        think: bool = False,
        understanding: bool = False,
        image_shape: Sequence[int] | None = None,
        generator: Generator | None = None,
        system_prompt: str | None = None,
        max_think_tokens: int = 1000,
        caches: Mapping[str, NaiveCache] | None = None,
        keep_hidden: Keep | None = None,
        on_token: OnToken | None = None,
        on_last_pass: OnLastPass | None = None,
        **sampling: Any,
    ) -> Steps[BagelContexts]:
        """Read a prompt: the AR half of a request.

        These are the steps of `prefill`, which takes the same arguments and returns the contexts.

        Args:
            inputs: a text, token ids, an image, or a list of them in their order; see `TokenIds`.
            think: let the model write a plan first, which becomes part of `gen`.
            understanding: the answer will be a text (`generate_text(contexts.gen)`): images are
                read by the ViT alone, and the contexts of the guidance are not completed.
            image_shape: height and width in pixels of the image to make. An image in the prompt
                decides instead; the default is the largest square.
            generator: used for encoding images and for sampled text; pass it on to `render`.
            system_prompt: replaces the text that think mode puts first.
            max_think_tokens: of the plan; see `generate_text`.
            caches: empty ones for "gen" and "cfg_img", such as an `InPlaceCache`. That of "cfg_img"
                is used only if a text follows an image; until then it shares the rows of gen.
            keep_hidden: keep the hidden states of all tokens of `gen`, or of the last one, as
                `contexts.gen.hidden`.
            on_token: called with each token of the plan; see `OnToken`.
            on_last_pass: called before the last pass over `gen`, for an image; see `OnLastPass`.
            **sampling: of the plan, as of `TokenSampler`, but for `seen` and `generator`: the
                penalty is for tokens of the prompt's texts, too.
        """
        TokenSampler(**sampling)  # refuses it now, not after the work
        caches = caches or {}
        for name, cache in caches.items():
            if name not in ("gen", "cfg_img"):
                raise SchemaError(f"caches are for gen and cfg_img, not for {name}")
            self.model.check_context(name, BagelContext([0], [0], cache))
        hidden = None if keep_hidden is None else HiddenStates(keep_hidden)
        gen = BagelContext([0], [0], caches.get("gen", NaiveCache(self.num_layers)), hidden)
        own_cfg_img = caches.get("cfg_img")
        cfg_text, cfg_img = self.empty_context(), self.empty_context()
        side = self.config.max_latent_size * self.config.latent_stride
        shape = (side, side) if image_shape is None else shape_pair(image_shape)
        self.config.latent_grid(shape)  # likewise
        first = first_text(think=think, understanding=understanding, system_prompt=system_prompt)
        if first:
            gen = yield from self._prompt_steps(gen, self.encode_prompt(first))
            cfg_img = gen.snapshot()
        images, items, plans = False, prompt_items(inputs), think and not understanding
        text: str | None = None

        def announce(gen: BagelContext, cfg_img: BagelContext) -> None:
            if on_last_pass is not None and not understanding:
                on_last_pass(BagelContexts(gen, cfg_text, cfg_img, shape, text))

        for number, item in enumerate(items, 1):
            is_last = number == len(items) and not plans
            if is_text(item):
                ids = self._text_ids(item)
                cfg_text = gen.snapshot()
                if images and not understanding and own_cfg_img is not None:
                    cfg_img, own_cfg_img = cfg_img.moved(own_cfg_img), None
                if is_last:
                    longer = gen.longer(len(ids), len(ids))
                    announce(longer, cfg_img.longer(len(ids), len(ids)) if images else longer)
                gen = yield from self._prompt_steps(gen, ids)
                if not images:  # the two are the same tokens at the same positions
                    cfg_img = gen.snapshot()
                elif not understanding:
                    cfg_img = yield from self._prompt_steps(cfg_img, ids)
            else:
                yield None
                image = resize(load_image(cast("ImageLike", item)), self.config.vae_resize)
                images, shape = True, image_size(image)
                if not understanding:
                    gen = self._append_latent(gen, image, generator)
                pixels = to_pixels(resize(image, self.config.vit_resize))
                if is_last:
                    cfg_text = gen.longer(self._count_vit(*pixels.shape[1:]), 1)
                    announce(cfg_text, cfg_img)
                gen = self.append_vit_image(gen, pixels)
                cfg_text = gen.snapshot()
        if plans:
            plan = yield from self.text_steps(
                gen,
                max_length=max_think_tokens,
                prompt_ids=self.text_ids(inputs, first),
                generator=generator,
                on_token=on_token,
                **sampling,
            )
            text = plan.text
            ids = self.encode_prompt(text)
            announce(gen.longer(len(ids), len(ids)), cfg_img)
            gen = yield from self._prompt_steps(gen, ids)
        self._last = BagelContexts(gen, cfg_text, cfg_img, None if understanding else shape, text)
        return self._last

    prefill = all_steps(prefill_steps)

    def count_tokens(
        self,
        inputs: Prompt,
        *,
        think: bool = False,
        understanding: bool = False,
        system_prompt: str | None = None,
        max_think_tokens: int = 1000,
    ) -> dict[str, int]:
        """Return the most tokens that `prefill` can put into "gen" and "cfg_img".

        Exact without think mode, and with `understanding`, except that "cfg_img" shares the rows of
        gen until a text follows an image.
        """
        first = first_text(think=think, understanding=understanding, system_prompt=system_prompt)
        gen = texts = len(self.text_ids(inputs, first))
        if think and not understanding:
            gen += 3 * max_think_tokens + 2  # a byte that is no text comes back as three
        for item in prompt_items(inputs):
            if not is_text(item):
                gen += self._count_image(cast("ImageLike", item), latent=not understanding)
        return {"gen": gen, "cfg_img": 0 if understanding else texts}

    def prefix_tokens(
        self,
        inputs: Prompt,
        *,
        think: bool = False,
        understanding: bool = False,
        system_prompt: str | None = None,
    ) -> list[int]:
        """Return the token ids of the texts that `gen` begins with, up to the first image.

        K and V of these tokens depend on nothing else. The arguments are as for `prefill`.
        """
        first = first_text(think=think, understanding=understanding, system_prompt=system_prompt)
        return self.text_ids([*takewhile(is_text, prompt_items(inputs))], first)

    def _between_markers(self, rows: Tensor) -> Tensor:
        markers = self._markers()
        return torch.cat([markers[:1], rows, markers[1:]])

    def _text_ids(self, item: str | TokenIds) -> list[int]:
        """The token ids of an item of a prompt that is no image."""
        if isinstance(item, str):
            return self.encode_prompt(item)
        return checked_token_ids(item, self.config.llm.vocab_size)

    def _prompt_steps(self, context: BagelContext, ids: list[int]) -> Steps[BagelContext]:
        """Read a text of a prompt, but for the tokens that its cache has already."""
        past = context.past_key_values
        assert isinstance(past, NaiveCache)
        cache = past.with_cached(ids)
        num_cached = cache.seq_lens - context.kv_lens[0]
        if num_cached and context.hidden is not None:
            raise SchemaError("hidden states of tokens whose KV was there already are not known")
        if num_cached:
            context = BagelContext(
                [context.kv_lens[0] + num_cached], [context.ropes[0] + num_cached], cache
            )
        if num_cached == len(ids):
            return context
        answer = yield PromptTokens(context, ids[num_cached:])
        assert answer is not None
        return answer[0]

    def _append_latent(
        self, context: BagelContext, image: ImageLike, generator: Generator | None
    ) -> BagelContext:
        # The rule is applied twice, as published: to a very long image it is not idempotent.
        pixels = to_pixels(resize(image, self.config.vae_resize))
        return self.append_vae_latent(context, self.encode_image(pixels, generator))

    def _count_image(self, item: ImageLike, *, latent: bool) -> int:
        """Return the tokens of an image in the ViT's block, and in the latent one if it has one."""
        height, width = self.config.vae_resize.size(*image_size(load_image(item)))
        stride = self.config.latent_stride
        count = (height // stride) * (width // stride) + 2 if latent else 0
        return count + self._count_vit(*self.config.vit_resize.size(height, width))

    def _count_vit(self, height: int, width: int) -> int:
        """Return the tokens of the ViT's block of an image, its markers included."""
        patch = self.config.vit.patch_size
        return (height // patch) * (width // patch) + 2
