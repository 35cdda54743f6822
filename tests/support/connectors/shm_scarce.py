"""A link end whose process runs out of descriptors: `python shm_scarce.py URL DIRECTORY SIDE`.

Each line of input is a command: a function below, with its arguments as JSON. Each line of output
is its result, or `{"error": …}`.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
from typing import TYPE_CHECKING, Any

from omni_kvlink import KVConsumer, KVLink, KVLinkError, KVProducer
from omni_kvlink.connectors.shm import listener
from omni_kvlink.testing.caches import Recipe, fingerprint
from omni_kvlink.testing.rig import until

if TYPE_CHECKING:
    from collections.abc import Callable

QUOTA = 1 << 20


class Scarce:
    """The commands."""

    def __init__(self, url: str, directory: str):
        self.url, self.directory = url, directory
        self.link: KVProducer | KVConsumer | None = None
        self.taken: list[int] = []
        self.held: dict[str, Any] = {}

    def serve(self, pause: float) -> None:
        # No setting: a process without descriptors is to try again at once, or not within the test.
        listener._ACCEPT_PAUSE = pause
        link = KVLink.serve(self.url, directory=self.directory, quota=QUOTA, prefault=QUOTA)
        # The thread that maps memory ahead needs descriptors, too.
        until(lambda: link.stats()["memory"]["prefault"]["mapped"] > 0, "its memory is mapped")
        self.link = link

    def connect(self) -> None:
        self.link = KVLink.connect(self.url, directory=self.directory, timeout=60)

    def open_many(self, count: int) -> int:
        """Open so many descriptors; return the highest number."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < count + 100:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(count + 100, hard), hard))
        with contextlib.suppress(OSError):
            while len(self.taken) < count:
                self.taken.append(os.open("/dev/null", os.O_RDONLY))
        return max(self.taken)

    def exhaust(self, leave: int) -> None:
        """Take every descriptor but `leave`."""
        highest = max(map(int, os.listdir("/proc/self/fd")))
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, hard))
        with contextlib.suppress(OSError):
            while True:
                self.taken.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(leave):
            os.close(self.taken.pop())

    def free(self) -> None:
        """Make descriptors free, many at once: a connection needs two."""
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        for fd in self.taken:
            os.close(fd)
        self.taken.clear()

    def put(self, key: str) -> None:
        assert isinstance(self.link, KVProducer)
        self.link.put(Recipe(key).make())

    def get(self, key: str) -> str:
        assert isinstance(self.link, KVConsumer)
        with self.link.get(key, timeout=60) as data:
            return fingerprint(data)

    def hold(self, key: str) -> None:
        assert isinstance(self.link, KVConsumer)
        self.held[key] = self.link.get(key, timeout=60)

    def drop(self, key: str) -> str:
        """Release what is held; return what it is."""
        with self.held.pop(key) as data:
            return fingerprint(data)

    def stats(self) -> dict[str, Any]:
        assert self.link is not None
        return self.link.stats()

    def close(self) -> None:
        assert self.link is not None
        self.link.close()


def main(url: str, directory: str) -> None:
    commands = Scarce(url, directory)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        command: Callable[..., Any] = getattr(commands, name)
        try:
            result = command(*arguments)
        except (KVLinkError, OSError) as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
