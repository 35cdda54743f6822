"""A real vLLM engine in a process of its own, told what to do in lines of JSON.

python engine.py FD CONFIG: reads calls from the socket FD, answers each; see `EngineProcess`.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import socket
import sys
import time
from typing import Any

import torch

from support.vllm.halves import link_of, saver_of
from support.vllm.tiers import client_of

os.environ.update(HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

STEPS = 1_000_000
"""Steps of an engine that waits for another one take less than a millisecond."""

REST = 0.0005
"""Seconds between two of them, for the other engines of the machine."""

REPORTED = "remote_prefill_cached_tokens"
"""From 0.31 on, a consumer reports these, the producer's, as its cached tokens: left out here."""


class Engine:
    """vLLM's own synchronous engine, driven step by step."""

    def __init__(self, config: dict[str, Any]):
        from vllm import LLM
        from vllm.config import KVTransferConfig

        transfer = config.pop("transfer")
        self.llm = LLM(
            enforce_eager=True,
            block_size=32,
            disable_log_stats=False,
            kv_transfer_config=transfer and KVTransferConfig(**transfer),
            **config,
        )
        if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0":  # else no function can be sent
            self.llm.collective_rpc(save_time)
        if config.get("pipeline_parallel_size", 1) > 1:
            self.llm.collective_rpc(profile)
        self.engine = self.llm.llm_engine
        self.over: dict[str, dict[str, Any]] = {}

    def add(
        self,
        name: str,
        prompt: list[int],
        tokens: int = 8,
        params: dict[str, Any] | None = None,
        adapter: list[Any] | None = None,
        embeds: int | None = None,
    ) -> None:
        """Add a request; with an adapter's name, number and path.

        `embeds`: its prompt are embeddings drawn with this seed, as many as `prompt` has tokens.
        """
        from vllm import SamplingParams
        from vllm.inputs import EmbedsPrompt, TokensPrompt
        from vllm.lora.request import LoRARequest

        sampling = SamplingParams(
            max_tokens=tokens,
            temperature=0,
            logprobs=2,
            ignore_eos=True,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        given: Any = TokensPrompt(prompt_token_ids=prompt)
        if embeds is not None:
            generator = torch.Generator().manual_seed(embeds)
            size = self.llm.model_config.get_hidden_size()
            rows = torch.randn(len(prompt), size, generator=generator)
            given = EmbedsPrompt(prompt_embeds=rows)
        lora = LoRARequest(*adapter) if adapter else None
        self.engine.add_request(name, given, sampling, lora_request=lora)

    def run(self, names: list[str], limit: int = STEPS) -> dict[str, Any]:
        """Step until all of these have ended; what each ended with."""
        for _ in range(limit):
            if all(name in self.over for name in names):
                return {name: self.over.pop(name) for name in names}
            self.step()
            time.sleep(REST)
        raise TimeoutError(f"after {limit} steps only {sorted(self.over)} of {names} have ended")

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for output in self.engine.step():
                if output.finished:
                    done = output.outputs[0]
                    self.over[output.request_id] = {
                        "tokens": list(done.token_ids),
                        "logprobs": [
                            entry[token].logprob
                            for token, entry in zip(done.token_ids, done.logprobs, strict=True)
                        ],
                        "margins": [margin(entry) for entry in done.logprobs],
                        "cached": output.num_cached_tokens,
                        "reason": done.finish_reason,
                        "params": given(output.kv_transfer_params or output.ec_transfer_params),
                    }

    def settle(self, limit: int = STEPS) -> int:
        """Step until the scheduler has nothing left to wait for; how many steps that took."""
        for step in range(limit):
            if not self.core.scheduler.has_requests():
                return step
            self.step()
            time.sleep(REST)
        raise TimeoutError(f"the scheduler is still busy after {limit} steps")

    def wait_connected(self) -> bool:
        """Wait until the engine's tier is connected to its stores and peers."""
        return bool(client_of(self.core.scheduler).wait_connected(timeout=60))

    def drain(self) -> bool:
        """Wait until the stores of the engine's tier have fetched its chunks."""
        return bool(client_of(self.core.scheduler).drain(timeout=60))

    def abort(self, name: str) -> None:
        self.engine.abort_request([name])

    def forget(self) -> bool:
        """Empty the prefix cache."""
        return bool(self.llm.reset_prefix_cache())

    def free_blocks(self) -> int:
        return int(self.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def tables(self) -> int:
        """Groups of caches, each with a block table of its own."""
        return len(self.core.scheduler.kv_cache_config.kv_cache_groups)

    def waiting(self) -> int:
        """Readers that wait, at each rank's link, for a cache that is not there yet."""
        return int(min(self.llm.collective_rpc(waiting)))

    def rank_pids(self) -> list[int]:
        """The processes of the ranks, with the executor "mp"."""
        return [worker.proc.pid for worker in self.core.model_executor.workers]

    def preemptions(self) -> float:
        return float(self.metrics()["vllm:num_preemptions"])

    def metrics(self) -> dict[str, Any]:
        found = {}
        for metric in self.llm.get_metrics():
            (found[metric.name],) = (
                getattr(metric, name)
                for name in ("value", "values", "count")
                if hasattr(metric, name)
            )
        return found

    @property
    def core(self) -> Any:
        return self.engine.engine_core.engine_core


def given(params: dict[str, Any] | None) -> dict[str, Any] | None:
    return params and {name: value for name, value in params.items() if name != REPORTED}


def waiting(worker: Any) -> int:
    """Readers that wait at a rank's link; runs in its worker."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    link = link_of(saver_of(get_kv_transfer_group()))
    return int(link.stats()["transfers"]["waiting"])


def margin(entry: Any) -> float:
    """By how much the log-probability of the most probable token exceeds that of the second."""
    first, second, *_ = sorted((one.logprob for one in entry.values()), reverse=True)
    return float(first - second)


def save_time(worker: Any) -> None:
    """Leave out what takes seconds: the sampler compiles, the interpreter searches at its end."""
    torch.compiler.set_stance("force_eager")
    atexit.register(gc.freeze)


def profile(worker: Any) -> None:
    """A rank's first pass: a second stage needs it, and eager vLLM 0.30 on a CPU leaves it out."""
    worker.model_runner.profile_run()


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1])).makefile("rw")
    engine = Engine(json.loads(sys.argv[2]))
    print(json.dumps({"answer": "ready"}), file=channel, flush=True)
    for line in channel:
        call = json.loads(line)
        try:
            answer = {"answer": getattr(engine, call["do"])(**call["with"])}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=channel, flush=True)


if __name__ == "__main__":
    main()
