"""A stage whose ranks are processes: the same images, and what is asked of all of them."""

from __future__ import annotations

import pytest
import torch
from engine_bed import WAIT, alone
from mp_bed import bed


@pytest.mark.parametrize(("ranks", "scheme"), [(1, "shm"), (2, "shm"), (2, "zmq")])
def test_the_same_images_as_in_one_process(sockets: str, ranks: int, scheme: str) -> None:
    with bed(sockets, ranks, scheme) as stage:
        futures = [stage.submit(f"r{seed}", seed=seed) for seed in range(5)]
        receipts = [stage.send(f"r{seed}", seed=seed) for seed in range(5)]
        for seed, future in enumerate(futures):
            assert torch.equal(future.result(WAIT).result()[0], alone(seed=seed))
        for receipt in receipts:  # each has one reader, and that has let go
            receipt.wait(timeout=WAIT)
        kv = stage.engine.stats()["kv"]
        assert (kv["received"], kv["freed"], kv["charged"]) == (5, 5, 0)
        assert (kv["workers"]["received"], kv["workers"]["freed"]) == (5, 5)
        assert kv["workers"]["answered"] == ranks
