"""vLLM-Omni's own manager in two processes, over a link of this library, and a verdict.

First a KV cache by the manager, then hidden states in a dict by its connector, as a stage's loop
sends them.

python examples/vllm_omni_connector.py [shm | zmq+ipc | zmq+tcp | ucx]
"""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink.integrations.vllm_omni import register

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

NAMES = ("key_cache", "value_cache")
LAYERS, BLOCKS, BLOCK, HEADS, DIM, TOKENS = 4, 64, 16, 4, 128, 1000
EDGE, CHUNK = ("0", "1"), "req-1_0_0"  # request, sending stage, number of the chunk


def manager(role: str, kvlink: dict[str, Any]) -> Any:
    """What an engine of vLLM-Omni makes of its stage's YAML; stage 0 sends to stage 1."""
    from vllm_omni.distributed.omni_connectors.kv_transfer_manager import (
        OmniKVCacheConfig,
        OmniKVTransferManager,
    )

    register()  # an engine finds it by its entry point
    return OmniKVTransferManager(
        OmniKVCacheConfig(
            connector_config={"type": "OmniKVLinkConnector", "role": role, "kvlink": kvlink},
            from_stage="0",
            to_stage="1",
            stage_id="0" if role == "sender" else "1",
            engine_input_source=["0"],
            need_send_cache=role == "sender",
            need_recv_cache=role == "receiver",
        )
    )


def receive(kvlink: dict[str, Any], message: Connection) -> None:
    """The stage that uses the cache."""
    logging.disable(logging.INFO)
    receiver = manager("receiver", kvlink)
    data, nbytes = receiver.receive_kv_cache_for_request("req-1")
    layers = None if data is None else data["layer_blocks"]
    prints = layers and {name: [*map(fingerprint, layers[name])] for name in NAMES}
    message.send((prints, data and data["metadata"], nbytes))
    found = receiver.connector.get_with_deadline(*EDGE, CHUNK, deadline=time.monotonic() + 30.0)
    message.send(found and fingerprint(found[0]["hidden_states"]["layers"][24]))
    receiver.close()


def fingerprint(tensor: torch.Tensor) -> str:
    """Of every byte."""
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return f"{list(tensor.shape)} {tensor.dtype} {hashlib.sha256(raw).hexdigest()}"


def main() -> int:
    logging.disable(logging.INFO)
    transport = sys.argv[1] if len(sys.argv) > 1 else "shm"
    options = {"trusted_network": transport == "ucx"}  # UCX's ports are open to every user here
    kvlink = {"transport": transport, "name": f"example-{os.getpid()}", "options": options}
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    reader = spawn.Process(target=receive, args=(kvlink, theirs))
    reader.start()
    theirs.close()  # then a reader that dies is heard of

    sender = manager("sender", kvlink)
    pools = [torch.randn(2, BLOCKS, BLOCK, HEADS, DIM).bfloat16() for _ in range(LAYERS)]
    block_ids = torch.randperm(BLOCKS)[: -(-TOKENS // BLOCK)].tolist()
    finished = {"block_ids": block_ids, "seq_len": TOKENS, "custom_metadata": {"ropes": [7]}}
    sender.handle_finished_requests_kv_transfer({"req-1": finished}, pools, BLOCK, "bfloat16")

    prints, metadata, nbytes = mine.recv()
    hidden = torch.randn(TOKENS, HEADS * DIM).bfloat16()
    chunk = {"hidden_states": {"layers": {24: hidden}}, "meta": {"finished": torch.tensor(True)}}
    sender.connector.put(*EDGE, CHUNK, chunk)
    hidden_print = mine.recv()
    reader.join()
    print(sender.connector.health()["links"][0]["url"])
    sender.close()
    if prints is None:
        print("nothing came")
        return 1
    sent = {
        name: [fingerprint(pool[part][block_ids].flatten(0, 1)[:TOKENS]) for pool in pools]
        for part, name in enumerate(NAMES)
    }
    is_exact = prints == sent and metadata["ropes"] == [7]
    print(f"{LAYERS} layers × {TOKENS} tokens, {nbytes} bytes: {'exact' if is_exact else 'WRONG'}")
    is_same = hidden_print == fingerprint(hidden)
    print(f"hidden states, {hidden.nbytes} bytes: {'exact' if is_same else 'WRONG'}")
    return 0 if is_exact and is_same else 1


if __name__ == "__main__":
    sys.exit(main())
