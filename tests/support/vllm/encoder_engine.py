"""A vLLM engine for prompts with an image, in a process of its own; see `vllm_engine`."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from support.vllm import engine as vllm_engine
from support.vllm.halves import link_of, sender_of

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "epd_vllm.py"
make_image = runpy.run_path(str(EXAMPLE))["make_image"]


class EncoderEngine(vllm_engine.Engine):
    """`transfer` is its `--ec-transfer-config`, and `kv_transfer` that of its KV caches."""

    def __init__(self, config: dict[str, Any]):
        from vllm import LLM
        from vllm.config import ECTransferConfig, KVTransferConfig

        encoder, kv = config.pop("transfer"), config.pop("kv_transfer")
        self.llm = LLM(
            enforce_eager=True,
            disable_log_stats=False,
            ec_transfer_config=encoder and ECTransferConfig(**encoder),
            kv_transfer_config=kv and KVTransferConfig(**kv),
            **config,
        )
        self.llm.collective_rpc(vllm_engine.save_time)
        self.engine = self.llm.llm_engine
        self.over = {}

    def add(  # type: ignore[override]
        self,
        name: str,
        prompt: list[int],
        image: int,
        item: str | None = None,
        tokens: int = 8,
        params: dict[str, Any] | None = None,
        kv: dict[str, Any] | None = None,
    ) -> None:
        """Add a request about an image; `item` identifies it in place of a digest."""
        from vllm import SamplingParams, TokensPrompt

        sampling = SamplingParams(
            max_tokens=tokens,
            temperature=0,
            logprobs=2,
            ignore_eos=True,
            extra_args={"ec_transfer_params": params, "kv_transfer_params": kv},
        )
        whole = TokensPrompt(prompt_token_ids=prompt, multi_modal_data={"image": make_image(image)})
        if item is not None:
            whole["multi_modal_uuids"] = {"image": [item]}
        self.engine.add_request(name, whole, sampling)

    def live(self) -> int:
        """Payloads that this producer keeps for readers."""
        from vllm.distributed.ec_transfer import get_ec_transfer

        return int(link_of(sender_of(get_ec_transfer())).stats()["transfers"]["live"])

    def waiting(self) -> int:
        """Reads that wait at this producer's link for an output that is not there."""
        from vllm.distributed.ec_transfer import get_ec_transfer

        return int(link_of(sender_of(get_ec_transfer())).stats()["transfers"]["waiting"])


if __name__ == "__main__":
    vllm_engine.Engine = EncoderEngine  # type: ignore[misc]
    vllm_engine.main()
