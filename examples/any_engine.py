"""Prefill and decode of a toy engine, with pools of its own, in two processes; see the guide."""

import multiprocessing
import sys

import torch

from omni_kvlink import KVCacheTransferData, KVLink, PeerLostError, TransferFailed
from omni_kvlink.adapters import PagedAdapter, PagedCache

PROMPTS = {f"req-{n}": [(31 * n + 7 * i) % 97 for i in range(5 + n)] for n in range(12)}
LAYERS, BLOCKS, BLOCK_SIZE, ROW, NEW_TOKENS = 2, 64, 4, (2, 8), 10


class Engine:
    def __init__(self) -> None:
        seeded = torch.Generator().manual_seed(0)  # the same weights in both processes
        self.head, *self.kv = torch.randn(3, 97, LAYERS, *ROW, generator=seeded)
        self.pools = torch.zeros(2, LAYERS, BLOCKS, BLOCK_SIZE, *ROW)  # K and V
        self.free = list(range(BLOCKS))

    def allocate(self, tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-tokens // BLOCK_SIZE))]

    def cache(self, blocks: list[int]) -> PagedCache:
        keys, values = map(list, self.pools)
        return PagedCache(keys, values, BLOCK_SIZE, blocks)

    def step(self, blocks: list[int], position: int, token: int) -> int:
        """Write K and V of a token, attend to all up to it, and return the next token."""
        block, slot = blocks[position // BLOCK_SIZE], position % BLOCK_SIZE
        self.pools[:, :, block, slot] = torch.stack([rows[token] for rows in self.kv])
        keys, values = self.pools[:, :, blocks].flatten(2, 3)[:, :, : position + 1]
        scores = (keys * self.head[token][:, None]).mean((2, 3)).softmax(1)
        mixed = torch.einsum("lt,lthd->lhd", scores, values)
        return int((self.head * mixed).sum((1, 2, 3)).argmax())

    def generate(self, blocks: list[int], position: int, token: int) -> list[int]:
        tokens = [token]
        while len(tokens) < NEW_TOKENS:
            tokens.append(self.step(blocks, position + len(tokens) - 1, tokens[-1]))
        return tokens


def prefill(url: str) -> None:
    engine, receipts = Engine(), []
    with KVLink.serve(url) as producer:
        for name, prompt in PROMPTS.items():
            blocks = engine.allocate(len(prompt))
            first = [engine.step(blocks, *item) for item in enumerate(prompt)][-1]
            about = {"kv_lens": [len(prompt)], "ropes": [len(prompt)], "first_token": first}
            data = PagedAdapter().export(engine.cache(blocks), request_id=name, metadata=about)
            receipts.append(producer.put(data, timeout=60.0))  # waits while the quota is used up
            engine.free += blocks  # `put` has copied them
        for receipt in receipts:
            receipt.wait(timeout=60.0)


def decode(url: str) -> dict[str, list[int]]:
    engine, tokens = Engine(), dict[str, list[int]]()
    with KVLink.connect(url, timeout=60.0) as consumer:
        while missing := [name for name in PROMPTS if name not in tokens]:
            name, length = missing[0], len(PROMPTS[missing[0]])
            blocks = engine.allocate(length + NEW_TOKENS)
            try:
                with consumer.get(name, timeout=60.0, verify="full") as data:
                    assert isinstance(data, KVCacheTransferData)
                    PagedAdapter().load(data, into=engine.cache(blocks))
                    first = data.metadata.extra["first_token"]
                tokens[name] = engine.generate(blocks, length, first)
            except (PeerLostError, TransferFailed) as error:
                print(name, error, flush=True)  # the producer's next run sends the prompt again
            engine.free += blocks
    return tokens


if __name__ == "__main__":
    link = sys.argv[1] if len(sys.argv) > 1 else "shm://any-engine"
    multiprocessing.get_context("spawn").Process(target=prefill, args=(link,)).start()
    print(*decode(link).items(), sep="\n")
