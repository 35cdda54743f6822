"""One end of a transfer by a peer: `PYTHON end.py (sender | receiver) FILE LOG`.

It needs numpy alone, and what FILE, a module of this folder, imports. It reads one JSON command a
line and writes one reply a line, as `omni_kvlink.testing.peer_harness` describes. What the system
itself prints goes to the file LOG.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT = 60.0
GUARD = 0xA5
"""Each byte of the target's memory, until a transfer writes it."""
_SPREAD = 1 << 16


class End:
    """The memory of one end, and how it finds the other end.

    Attributes:
        memory: uint8 `[tensors, count, nbytes]`: a pool of blocks for each K and each V.
        ids: the blocks of the payload in each pool, in its order; those of no payload are guards.
        tokens: tokens of a block.
        folder: a directory that both ends have, and no other pair.
    """

    def __init__(self, *, is_sender: bool, folder: str, geometry: dict[str, Any]):
        import numpy as np

        self.folder, self.tokens = Path(folder), int(geometry["tokens"])
        self.is_paged = bool(geometry["paged"])
        tensors, blocks, self.nbytes = (geometry[name] for name in ("tensors", "blocks", "nbytes"))
        count = blocks + 2 + (blocks // 8 + 1 if self.is_paged else 0)
        rng = np.random.default_rng([geometry["seed"], is_sender])
        within = rng.permutation(count - 2)[:blocks] if self.is_paged else np.arange(blocks)
        self.ids = within + 1  # the first block and the last one are guards
        self.guards = np.setdiff1d(np.arange(count), self.ids)
        self.memory = np.full((tensors, count, self.nbytes), GUARD, np.uint8)
        self._seed = geometry["seed"]
        numbers = np.random.default_rng(self._seed).bytes(self.nbytes + _SPREAD)
        self._numbers = np.frombuffer(numbers, np.uint8)
        self._fifo = os.open(self.folder / "fifo", os.O_RDWR)

    def fill(self, number: int) -> None:
        """Write the bytes of a transfer into the blocks; each transfer has others."""
        for tensor, block, content in self._content(number):
            self.memory[tensor, block] = content

    def errors(self, number: int) -> str:
        """Compare all blocks with the bytes of a transfer; empty, or what differs."""
        import numpy as np

        wrong = sum(
            not np.array_equal(self.memory[tensor, block], content)
            for tensor, block, content in self._content(number)
        )
        stray = sum(int((pool[self.guards] != GUARD).sum()) for pool in self.memory)
        texts = [f"{wrong} blocks have other bytes"] if wrong else []
        texts += [f"{stray} bytes outside the target blocks were written"] if stray else []
        return ", ".join(texts)

    def _content(self, number: int) -> Iterator[tuple[int, int, Any]]:
        import numpy as np

        shape = (len(self.memory), len(self.ids))
        offsets = np.random.default_rng([self._seed, number]).integers(0, _SPREAD, shape)
        for tensor, row in enumerate(offsets.tolist()):
            for block, offset in zip(self.ids.tolist(), row, strict=True):
                yield tensor, block, self._numbers[offset : offset + self.nbytes]

    def views(self) -> list[Any]:
        """The payload's bytes: one flat array for each tensor, or for each block of paged ones."""
        if self.is_paged:
            return [pool[block] for pool in self.memory for block in self.ids]
        return [pool[1:-1].reshape(-1) for pool in self.memory]

    def extents(self) -> list[tuple[int, int]]:
        """The address and the bytes of each of the `views`."""
        return [(view.ctypes.data, view.nbytes) for view in self.views()]

    def flat(self) -> Any:
        """Make memory for the payload's bytes in its order, `[tensors, blocks, nbytes]`."""
        import numpy as np

        return np.zeros((len(self.memory), len(self.ids), self.nbytes), np.uint8)

    def gather(self, into: Any) -> None:
        """Copy the blocks into memory as `flat` makes it."""
        for pool, target in zip(self.memory, into, strict=True):
            if self.is_paged:
                pool.take(self.ids, axis=0, out=target, mode="clip")
            else:
                target[:] = pool[1:-1]

    def scatter(self, tensors: Any) -> None:
        """Copy the bytes of each tensor, `[blocks, nbytes]` or flat, into the blocks."""
        shape = (len(self.ids), self.nbytes)
        for pool, source in zip(self.memory, tensors, strict=True):
            if self.is_paged:
                pool[self.ids] = source.reshape(shape)
            else:
                pool[1:-1] = source.reshape(shape)

    def publish(self, name: str, content: bytes) -> None:
        """Give the other end what its `published` waits for."""
        draft = self.folder / f"{name}.draft"
        draft.write_bytes(content)
        draft.rename(self.folder / name)

    def published(self, name: str) -> bytes:
        """Wait for the other end's `publish`; TimeoutError after a minute."""
        path, deadline = self.folder / name, time.monotonic() + TIMEOUT
        while not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the other end has not published {name!r}")
            time.sleep(0.01)
        return path.read_bytes()

    def notify(self) -> None:
        """Wake the other end's `wait` by a byte through a pipe."""
        os.write(self._fifo, b"!")

    def wait(self) -> None:
        """Sleep until the other end's `notify`."""
        os.read(self._fifo, 1)


class Commands:
    """The commands of an end; moments and CPU times are nanoseconds."""

    def __init__(self, side: str, path: str):
        self._side, self._path = side, path
        self._opened = contextlib.ExitStack()

    def ping(self) -> int:
        """The present moment."""
        return time.monotonic_ns()

    def open(self, folder: str, geometry: dict[str, Any]) -> None:
        """Make the memory, and connect to the other end."""
        self._end = End(is_sender=self._side == "sender", folder=folder, geometry=geometry)
        spec = importlib.util.spec_from_file_location("kvlink_peer", self._path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self._move = self._opened.enter_context(getattr(module, self._side)(self._end))

    def fill(self, number: int) -> None:
        """Write the bytes of the transfer of a number."""
        self._end.fill(number)

    def cpu(self) -> int:
        """CPU of this process until now, all threads."""
        return time.process_time_ns()

    def send(self) -> int:
        """Send once; the moment of the call."""
        called = time.monotonic_ns()
        self._move()
        return called

    def receive(self) -> dict[str, int]:
        """Receive once; when the bytes had arrived, and when they were in the target blocks."""
        used = -time.process_time_ns()
        arrived = self._move()
        scattered = time.monotonic_ns()
        return {"arrived": arrived, "scattered": scattered, "cpu": used + time.process_time_ns()}

    def errors(self, number: int) -> str:
        """See `End.errors`."""
        return self._end.errors(number)

    def close(self) -> None:
        """Close what the peer opened."""
        self._opened.close()


def main() -> None:
    """Run the commands that standard input has, until it ends."""
    side, path, log = sys.argv[1:]
    sys.path.pop(0)  # this folder, whose files are named as what they import
    replies = os.fdopen(os.dup(1), "w")
    errors = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    commands = Commands(side, path)
    for line in sys.stdin:
        request = json.loads(line)
        reply = {"id": request["id"]}
        try:
            reply["result"] = getattr(commands, request["command"])(**request["arguments"])
        except Exception as error:
            reply |= {"error": "", "text": f"{type(error).__name__}: {error}", "attributes": {}}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
    os._exit(0)  # threads of a peer may hold up an exit


if __name__ == "__main__":
    main()
