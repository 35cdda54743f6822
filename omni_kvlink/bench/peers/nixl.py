"""NIXL over UCX, as vLLM's own connector uses it.

All memory is registered, descriptors are prepared once, and the receiver, which a notification
tells that the blocks are ready, reads them.
"""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

COPIES = "blocks → blocks, by UCX"
VERIFIES = "nothing"
WAITS = "polls each 0.1 ms"
REQUIRES = (("nixl", "numpy"),)
POLL = 0.0001


@contextlib.contextmanager
def sender(end: Any) -> Iterator[Callable[[], None]]:
    """Tell the receiver that it may read."""
    agent = _agent("sender", end)
    end.publish("extents", json.dumps(end.extents()).encode())
    end.publish("sender", agent.get_agent_metadata())
    agent.add_remote_agent(end.published("receiver"))
    yield lambda: agent.send_notif("receiver", b"ready")


@contextlib.contextmanager
def receiver(end: Any) -> Iterator[Callable[[], int]]:
    """Read the blocks of the sender into the targets."""
    import numpy as np

    agent = _agent("receiver", end)
    end.publish("receiver", agent.get_agent_metadata())
    agent.add_remote_agent(end.published("sender"))
    sources = _descriptors(json.loads(end.published("extents")))
    sources = agent.prep_xfer_dlist("sender", sources, "DRAM")
    targets = agent.prep_xfer_dlist("NIXL_INIT_AGENT", _descriptors(end.extents()), "DRAM")
    indices = np.arange(len(end.extents()), dtype=np.int32)

    def receive() -> int:
        while not agent.get_new_notifs().get("sender"):
            time.sleep(POLL)
        transfer = agent.make_prepped_xfer("READ", targets, indices, sources, indices)
        state = agent.transfer(transfer)
        while state != "DONE":
            if state == "ERR":
                raise RuntimeError("NIXL's transfer failed")
            state = agent.check_xfer_state(transfer)
        arrived = time.monotonic_ns()
        agent.release_xfer_handle(transfer)
        return arrived

    yield receive


def _agent(name: str, end: Any) -> Any:
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    extent = (end.memory.ctypes.data, end.memory.nbytes, 0, "")
    agent.register_memory(agent.get_reg_descs([extent], "DRAM"))
    return agent


def _descriptors(extents: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    return [(address, nbytes, 0) for address, nbytes in extents]
