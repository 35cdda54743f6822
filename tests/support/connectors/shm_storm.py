"""Puts under 1,000 signals a second: `python shm_storm.py URL DIRECTORY MODE`; one JSON line a put.

MODE "retry": the handler does nothing, so interrupted system calls must go on. MODE "raise": the
handler raises during puts, so that a put may fail at any line; it must never be half committed.
"""

from __future__ import annotations

import json
import random
import signal
import sys
from typing import TYPE_CHECKING

from omni_kvlink import KVLink, KVLinkError, Receipt
from omni_kvlink.testing.caches import Recipe

if TYPE_CHECKING:
    from types import FrameType

PUTS = 150


class Interrupt(Exception):
    """Raised by the signal handler."""


def recipe(number: int) -> Recipe:
    return Recipe(f"k{number}", seed=number, tokens=40, heads=4, dim=64)


def main(url: str, directory: str, mode: str) -> None:
    chance, inside, fired = random.Random(7), [False], [0]

    def handler(number: int, frame: FrameType | None) -> None:
        fired[0] += 1
        if mode == "raise" and inside[0] and chance.random() < 0.5:
            inside[0] = False
            raise Interrupt

    producer = KVLink.serve(url, directory=directory, mode="sealed", quota=64 << 20)
    data = [recipe(number).make() for number in range(PUTS)]
    receipts: list[Receipt] = []
    sys.stdin.readline()
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    for item in data:
        try:
            inside[0] = True
            receipts.append(producer.put(item, ttl=120))
            inside[0] = False
            ended = "put"
        except (Interrupt, KVLinkError) as error:
            ended = type(error).__name__
        print(json.dumps({"key": item.request_id, "ended": ended}), flush=True)
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(json.dumps({"fired": fired[0]}), flush=True)
    if mode == "retry":
        for receipt in receipts:
            receipt.wait(timeout=60)
    sys.stdin.readline()
    print(json.dumps(producer.stats()["memory"]), flush=True)
    producer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
