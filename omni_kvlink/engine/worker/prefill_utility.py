"""`PrefillUtility`: what an AR stage must know of a model, which reads prompts into blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    import torch

    from omni_kvlink.engine.kv.block_manager import KVPools
    from omni_kvlink.engine.outputs import DiffusionOutput
    from omni_kvlink.engine.request import OmniDiffusionRequest

PrefillSteps: TypeAlias = "Generator[Any, Any, DiffusionOutput]"
"""See `PrefillUtility.prefill_steps`."""


class TextPass(Protocol):
    """A forward pass over tokens of one request's text, which may be run with those of others."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens that it reads; those of one token are run first."""

    @property
    def num_computed_tokens(self) -> int:
        """The number of the request's tokens before them."""

    def chunk(self, num_tokens: int) -> TextPass:
        """The pass of its first tokens. A pass of one token may lack this, and `rest`."""

    def rest(self, num_tokens: int, result: Any) -> TextPass:
        """The pass of the tokens after those, whose pass had this result."""


class PrefillUtility:
    """The reading of a model's prompts, in steps that several requests share."""

    def count_tokens(self, request: OmniDiffusionRequest) -> dict[str, int]:
        """The most tokens that a prompt can put into each branch of its cache."""
        raise NotImplementedError(f"{type(self).__name__} has no count_tokens")

    def kv_row(self) -> tuple[int, tuple[int, ...]]:
        """Layers of the cache, and the shape of one token in each, on this rank."""
        raise NotImplementedError(f"{type(self).__name__} has no kv_row")

    def kv_heads(self) -> int:
        """KV heads of the whole model; 1 for latents."""
        _, row = self.kv_row()
        return row[0] if len(row) == 2 else 1

    def prefill_steps(
        self,
        request: OmniDiffusionRequest,
        pools: KVPools,
        block_ids: Mapping[str, list[int]],
        num_computed_tokens: int = 0,
    ) -> PrefillSteps:
        """Read a prompt into blocks, step by step, and set `request.past_key_values`.

        The generator yields None before it computes by itself, such as an image; one request at a
        time does so. It yields a `TextPass` that `advance` can run together with those of other
        requests, and whose result is sent to it. Its value is the request's output; `extract` then
        reads the KV, which is sent. It may be sent sooner: before the last pass, `begin` of
        `request.kv_stream`, unless that is None, takes where the whole KV will be; in the pass,
        `write_layer` sends a layer whose computation is enqueued. The first blocks of the first
        branch have the KV of so many `prefix_tokens` already.
        """
        raise NotImplementedError(f"{type(self).__name__} has no prefill_steps")

    def prefix_tokens(self, request: OmniDiffusionRequest) -> list[int]:
        """Token ids of the first branch's beginning, as far as its KV depends on them alone."""
        raise NotImplementedError(f"{type(self).__name__} has no prefix_tokens")

    def prefix_steps(
        self,
        request: OmniDiffusionRequest,
        pools: KVPools,
        block_ids: Mapping[str, list[int]],
        num_computed_tokens: int = 0,
    ) -> Generator[Any, Any, torch.Tensor]:
        """Read the `prefix_tokens` alone into blocks; the value is the last hidden state [1, dim].

        As `prefill_steps`, for the prefill stage of a decode stage.
        """
        raise NotImplementedError(f"{type(self).__name__} has no prefix_steps")

    def release_caches(self) -> None:
        """Drop what the model's pipeline keeps of the last request's cache; by default nothing."""

    def advance(self, passes: Sequence[Any]) -> list[Any]:
        """Run one pass of several requests together; returns a result for each."""
        raise NotImplementedError(f"the steps of {type(self).__name__} yield None alone")
