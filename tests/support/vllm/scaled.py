"""An engine whose layers scale K by one half, as if its checkpoint had such scales."""

from __future__ import annotations

from typing import Any

from support.vllm import engine as vllm_engine

# Reaches into _k_scale, _k_scale_float: vLLM's attention layers have no public name for their
# scales.

if __name__ == "__main__":
    from vllm.model_executor.layers.attention import Attention

    process = Attention.process_weights_after_loading

    def process_and_scale(layer: Any, dtype: Any) -> None:
        process(layer, dtype)
        layer._k_scale.fill_(0.5)
        layer._k_scale_float = 0.5

    Attention.process_weights_after_loading = process_and_scale
    vllm_engine.main()
