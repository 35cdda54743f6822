"""The BAGEL pipeline: a prompt of texts and images becomes an image, or a text.

One request at a time. `generate` is `render(prefill(...))`; the two halves may run in different
processes, with a `BagelContexts` and the generator's state between them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

import torch
from torch import Generator, Tensor

from omni_kvlink.errors import SchemaError
from omni_kvlink.models.bagel.cache import (
    BagelContext,
    BagelContexts,
    ElsewhereCache,
    LayerCache,
    NaiveCache,
)
from omni_kvlink.models.bagel.config import BagelConfig
from omni_kvlink.models.bagel.denoise import DenoiseState, OnStep, denoise_rows, guided_flows
from omni_kvlink.models.bagel.embeddings import unpatchify
from omni_kvlink.models.bagel.hidden_states import HiddenStates, Keep
from omni_kvlink.models.bagel.hooks import DenoiseHooks
from omni_kvlink.models.bagel.images import (
    ImageLike,
    ResizeRule,
    image_size,
    load_image,
    resize,
    shape_pair,
    to_pixels,
)
from omni_kvlink.models.bagel.loading import load_autoencoder, load_config, load_model
from omni_kvlink.models.bagel.model import BagelModel, Stage
from omni_kvlink.models.bagel.prefill_steps import (
    Advanced,
    NextToken,
    PromptTokens,
    Steps,
    TextPass,
    all_steps,
    text_of_steps,
)
from omni_kvlink.models.bagel.prompts import (
    Prompt,
    TokenIds,
    checked_token_ids,
    is_text,
    prompt_items,
)
from omni_kvlink.models.bagel.sampling import DenoiseParams
from omni_kvlink.models.bagel.shards import WHOLE, Split
from omni_kvlink.models.bagel.text_output import OnToken, TextOutput
from omni_kvlink.models.bagel.token_sampler import TokenSampler
from omni_kvlink.models.bagel.tokenizer import BagelTokenizer, SpecialTokens, written_text
from omni_kvlink.models.bagel.vae import Autoencoder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_Pipeline = TypeVar("_Pipeline", bound="BagelPipeline")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
VAE_DTYPE = torch.float32  # as the published app loads the autoencoder, whatever the model has

# Only the form is fixed by the training: a plan between these tags, then the result.
_THINK = "Before you {task}, plan it step by step. Write the plan between <think> and </think>."
THINK_IMAGE_PROMPT = _THINK.format(task="draw the image")
THINK_TEXT_PROMPT = _THINK.format(task="answer")


@dataclass(eq=False, repr=False)
class BagelPipeline:
    """A loaded checkpoint, or one stage's part of it: single steps, and whole requests of them.

    The think prompts are this library's wording. A checkpoint that was trained with another wording
    gives the best results with that: pass it as `system_prompt`.

    Attributes:
        config: the checkpoint's configuration.
        stage: "all"; "ar" reads prompts and writes text; "dit" denoises and decodes.
        hooks: an engine's callbacks in the denoising loop; none by default.
    """

    config: BagelConfig
    stage: Stage
    model: BagelModel
    autoencoder: Autoencoder
    special_tokens: SpecialTokens
    tokenizer: BagelTokenizer
    hooks: DenoiseHooks = field(default_factory=DenoiseHooks)
    _last: BagelContexts | None = field(default=None, init=False)

    @classmethod
    def from_pretrained(
        cls: type[_Pipeline],
        directory: str | Path,
        *,
        dtype: torch.dtype = torch.bfloat16,
        vae_dtype: torch.dtype = VAE_DTYPE,
        device: str | torch.device = "cpu",
        stage: Stage = "all",
        split: Split = WHOLE,
    ) -> _Pipeline:
        """Load a checkpoint in the published layout; of the files, only what `stage` needs.

        float32 is exact throughout. With a model in bfloat16 the autoencoder stays in float32, as
        the published app loads it; that app runs it under autocast, whose convolutions are in
        bfloat16. float16 has the range of 65504: a trained model may leave it.

        Raises:
            FileNotFoundError: a file is missing.
            SchemaError: a configuration file does not fit.
            CheckpointError: a weights file lacks what the stage needs.
            ValueError: a dtype is none of bfloat16, float16 and float32, or the language model
                cannot be split like this.
        """
        for name, value in (("dtype", dtype), ("vae_dtype", vae_dtype)):
            if value not in DTYPES:
                raise ValueError(f"{name} {value}; there are {', '.join(map(str, DTYPES))}")
        if stage not in get_args(Stage):
            raise ValueError(f"stage is one of {get_args(Stage)}, not {stage!r}")
        root, device = Path(directory), torch.device(device)
        config = load_config(root)
        return cls(
            config,
            stage,
            load_model(root, config, stage, dtype, device, split),
            load_autoencoder(root, config, stage, vae_dtype, device),
            SpecialTokens.load(root),
            BagelTokenizer(root),
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights, but the autoencoder's, and of every cached tensor."""
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.model.device

    @property
    def num_layers(self) -> int:
        """Number of layers of the language model."""
        return self.config.llm.num_hidden_layers

    def empty_context(self) -> BagelContext:
        """Return a context without tokens."""
        return BagelContext.empty(self.num_layers)

    # Steps: each returns a new context; the given one and its tensors are not changed.

    def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids of a text, between its begin and end markers."""
        special = self.special_tokens
        return [special.bos, *self.tokenizer.encode(text), special.eos]

    def text_ids(self, inputs: Prompt, system_prompt: str = "") -> list[int]:
        """Return the token ids of a prompt's texts, of the system prompt first: `prompt_ids`."""
        texts = [item for item in prompt_items(inputs) if is_text(item)]
        return [
            token
            for item in ([system_prompt, *texts] if system_prompt else texts)
            for token in self._text_ids(item)
        ]

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

    def initial_noise(
        self, image_shape: Sequence[int] | None, generator: Generator | None = None
    ) -> Tensor:
        """Draw noise [h * w, patch_dim] float32 for an image on the generator's device."""
        height, width = self._grid(image_shape)
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
        _check_grids(states)
        denoise_rows(self.model, states, self._markers(), on_step, hooks=self.hooks)
        return [self.latent(state) for state in states]

    def begin_denoise(
        self, contexts: BagelContexts, noise: Tensor, params: DenoiseParams
    ) -> DenoiseState:
        """Return the state of an image before its first step; raises as `denoise`."""
        self._require("flow head", self.stage != "ar")
        self.check_request(contexts, noise, params)
        noise = noise.to(self.device)
        return DenoiseState(contexts, noise, self._grid(contexts.image_shape), params)

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
        height, width = self._grid(contexts.image_shape)
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

    @torch.no_grad()
    def text_steps(
        self,
        context: BagelContext,
        *,
        max_length: int = 1000,
        do_sample: bool = False,
        temperature: float = 0.3,
        top_k: int = 0,
        top_p: float = 1.0,
        repetition_penalty: float = 1.0,
        prompt_ids: Sequence[int] = (),
        generator: Generator | None = None,
        output_logits: bool = False,
        on_token: OnToken | None = None,
    ) -> Steps[TextOutput]:
        """Continue a context with text until the end marker. The context is not changed.

        At most `max_length` tokens, the begin marker included. With `do_sample` each token is drawn
        by `generator`, as `TokenSampler` says; otherwise it is the most probable one. The penalty
        is for tokens of the text, and for the prompt's `prompt_ids`. `output_logits` keeps those
        that each token was chosen by; `on_token` is called with each token when it is chosen.

        These are the steps of `generate_text`, which takes the same arguments and returns the text,
        and of `generate_text_output`, which returns a `TextOutput`.
        """
        self._require("text head", self.stage != "dit")
        if max_length < 1 or (do_sample and not temperature > 0):
            raise ValueError(f"max_length {max_length} or temperature {temperature} is too small")
        sampler = TokenSampler(
            temperature=temperature if do_sample else None,
            top_k=top_k,
            top_p=top_p,
            repetition_penalty=repetition_penalty,
            seen=prompt_ids,
            generator=generator,
        )
        self.model.check_context("context", context)
        # a discarded text must not claim rows in place
        context = replace(context.snapshot(), hidden=context.hidden)
        special, kept = self.special_tokens, list[Tensor]()
        token, written, chosen = special.bos, list[int](), list[int]()
        while len(written) < max_length and not (written and token == special.eos):
            written.append(token)
            answer = yield NextToken(context, token)
            assert answer is not None
            context, logits = answer
            token = sampler.pick(logits)
            if len(written) == max_length and token != special.eos:
                break  # there is no room for it
            chosen.append(token)
            kept += [logits] if output_logits else []
            if on_token is not None:
                on_token(token, logits)
        return TextOutput(
            written_text(self.tokenizer.decode(written)),
            chosen,
            "stop" if chosen[-1:] == [special.eos] else "length",
            context,
            torch.stack(kept) if kept else None,
        )

    generate_text = text_of_steps(text_steps)
    generate_text_output = all_steps(text_steps)

    @torch.no_grad()
    def advance(self, texts: Sequence[TextPass]) -> list[Advanced]:
        """Read the next tokens of several texts in one pass; see `BagelModel.extend_each`."""
        contexts, lens = [text.context for text in texts], [text.num_tokens for text in texts]
        rows = self.model.embed([token for text in texts for token in text.token_ids])
        contexts, hidden = self.model.extend_each(contexts, rows, lens)
        answers = list(hidden.split(lens))
        written = [i for i, text in enumerate(texts) if isinstance(text, NextToken)]
        if written:
            logits = self.model.language_model.lm_head(torch.cat([answers[i] for i in written]))
            for i, row in zip(written, logits, strict=True):
                answers[i] = row
        return list(zip(contexts, answers, strict=True))

    def prefill_steps(
        self,
        inputs: Prompt,
        *,
        think: bool = False,
        understanding: bool = False,
        image_shape: Sequence[int] | None = None,
        generator: Generator | None = None,
        system_prompt: str | None = None,
        max_think_tokens: int = 1000,
        do_sample: bool = False,
        temperature: float = 0.3,
        top_k: int = 0,
        top_p: float = 1.0,
        repetition_penalty: float = 1.0,
        caches: Mapping[str, NaiveCache] | None = None,
        keep_hidden: Keep | None = None,
        on_token: OnToken | None = None,
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
            max_think_tokens: of the plan, as the next five; see `generate_text`.
            do_sample: whether the plan is sampled.
            temperature: of the sampling.
            top_k: of the sampling; 0 for all tokens.
            top_p: of the sampling.
            repetition_penalty: for tokens of the prompt's texts, and of the plan.
            caches: empty ones for "gen" and "cfg_img", such as an `InPlaceCache`. That of "cfg_img"
                is used only if a text follows an image; until then it shares the rows of gen.
            keep_hidden: keep the hidden states of all tokens of `gen`, or of the last one, as
                `contexts.gen.hidden`.
            on_token: called with each token of the plan; see `OnToken`.
        """
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
        self._grid(shape)  # refuses it now, not after the work
        if think:
            first = self.encode_prompt(system_prompt or _think_prompt(understanding))
            gen = yield from self._prompt_steps(gen, first)
            cfg_img = gen.snapshot()
        images = False
        for item in prompt_items(inputs):
            if is_text(item):
                ids = self._text_ids(item)
                cfg_text = gen.snapshot()
                gen = yield from self._prompt_steps(gen, ids)
                if not images:  # the two are the same tokens at the same positions
                    cfg_img = gen.snapshot()
                elif not understanding:
                    if own_cfg_img is not None:
                        cfg_img, own_cfg_img = cfg_img.moved(own_cfg_img), None
                    cfg_img = yield from self._prompt_steps(cfg_img, ids)
            else:
                yield None
                image = resize(load_image(cast("ImageLike", item)), self._vae_rule())
                gen = self._append_image(gen, image, generator, latent=not understanding)
                images, shape = True, image_size(image)
                cfg_text = gen.snapshot()
        text = None
        if think and not understanding:
            plan = yield from self.text_steps(
                gen,
                max_length=max_think_tokens,
                do_sample=do_sample,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                repetition_penalty=repetition_penalty,
                prompt_ids=self.text_ids(inputs, system_prompt or THINK_IMAGE_PROMPT),
                generator=generator,
                on_token=on_token,
            )
            text = plan.text
            gen = yield from self._prompt_steps(gen, self.encode_prompt(text))
        self._last = BagelContexts(gen, cfg_text, cfg_img, None if understanding else shape, text)
        return self._last

    prefill = all_steps(prefill_steps)

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
        gen = texts = 0
        if think:
            default = THINK_TEXT_PROMPT if understanding else THINK_IMAGE_PROMPT
            gen = texts = len(self.encode_prompt(system_prompt or default))
        if think and not understanding:
            gen += 3 * max_think_tokens + 2  # a byte that is no text comes back as three
        for item in prompt_items(inputs):
            if is_text(item):
                tokens = len(self._text_ids(item))
                gen, texts = gen + tokens, texts + tokens
            else:
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
        leading = [*takewhile(is_text, prompt_items(inputs))]
        first = (system_prompt or _think_prompt(understanding)) if think else ""
        return self.text_ids(leading, first)

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

    def _between_markers(self, rows: Tensor) -> Tensor:
        markers = self._markers()
        return torch.cat([markers[:1], rows, markers[1:]])

    def _markers(self) -> Tensor:
        special = self.special_tokens
        return self.model.embed([special.start_of_image, special.end_of_image])

    def _grid(self, image_shape: Sequence[int] | None) -> tuple[int, int]:
        """Return the latent tokens down and across."""
        stride, side = self.config.latent_stride, self.config.max_latent_size
        if image_shape is None:
            raise SchemaError("the contexts have no image_shape")
        height, width = shape_pair(image_shape)
        if any(n <= 0 or n % stride or n > stride * side for n in (height, width)):
            allowed = f"multiples of {stride} up to {stride * side}"
            raise SchemaError(f"image_shape {(height, width)}: sides are {allowed}")
        return height // stride, width // stride

    def _require(self, part: str, present: bool) -> None:
        if not present:
            raise RuntimeError(f"this pipeline was loaded with stage={self.stage!r}: no {part}")

    def _last_contexts(self) -> BagelContexts:
        if self._last is None:
            raise RuntimeError(
                "no request has run, or its caches were released: an engine's runner releases them "
                "after the pass, once they are sent"
            )
        return self._last

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

    def _append_image(
        self, context: BagelContext, image: ImageLike, generator: Generator | None, *, latent: bool
    ) -> BagelContext:
        if latent:
            # The rule is applied twice, as published: to a very long image it is not idempotent.
            pixels = to_pixels(resize(image, self._vae_rule()))
            context = self.append_vae_latent(context, self.encode_image(pixels, generator))
        return self.append_vit_image(context, to_pixels(resize(image, self._vit_rule())))

    def _count_image(self, item: ImageLike, *, latent: bool) -> int:
        """Return the tokens of an image in the ViT's block, and in the latent one if it has one."""
        height, width = self._vae_rule().size(*image_size(load_image(item)))
        stride, patch = self.config.latent_stride, self.config.vit.patch_size
        count = (height // stride) * (width // stride) + 2 if latent else 0
        height, width = self._vit_rule().size(height, width)
        return count + (height // patch) * (width // patch) + 2

    def _vae_rule(self) -> ResizeRule:
        return ResizeRule(*self.config.vae_image_size, self.config.latent_stride)

    def _vit_rule(self) -> ResizeRule:
        return ResizeRule(*self.config.vit_image_size, self.config.vit.patch_size)


def _think_prompt(understanding: bool) -> str:
    return THINK_TEXT_PROMPT if understanding else THINK_IMAGE_PROMPT


def _levels(image: Tensor) -> Tensor:
    """An image [3, H, W], about [-1, 1], as uint8 [H, W, 3] on the CPU."""
    levels = (image * 0.5 + 0.5).clamp(0, 1).permute(1, 2, 0) * 255
    return levels.to(torch.uint8).cpu().contiguous()


def _check_grids(states: Sequence[DenoiseState]) -> None:
    if len({state.grid for state in states}) != 1:
        shapes = sorted({str(state.contexts.image_shape) for state in states})
        raise SchemaError(f"one batch for images of {shapes}; they must have one size")
