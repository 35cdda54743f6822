"""`Bandwidth`: what a link moves, beside a plain copy and a raw TCP connection in the same run."""

from __future__ import annotations

import contextlib
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from omni_kvlink.bench.baselines import TcpSend
from omni_kvlink.bench.membench import PlainCopy
from omni_kvlink.cli.terminal import progress
from omni_kvlink.doctor.probe_server import BULK, BULK_NBYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Self

    from omni_kvlink import KVConsumer
    from omni_kvlink.doctor.inquiry import Inquiry

_STEPS = 10
"""Steps of the progress that is shown."""
_LEAST_ROUNDS = 3


class Bandwidth(NamedTuple):
    """Bytes a second: of the link into the reader's own tensors, each byte checked; the others."""

    link: float
    plain_copy: float
    raw_tcp: float

    @classmethod
    def measure(cls, consumer: KVConsumer, inquiry: Inquiry) -> Self:
        """Measure the three in turn, for the inquiry's seconds; the medians of the rounds.

        Raises as `get`: CapacityError if this side's quota has no room, TransferFailed if the
        producer's has none.
        """
        target = {"bytes": torch.zeros(BULK_NBYTES, dtype=torch.uint8)}

        def get() -> None:
            consumer.get(BULK, timeout=inquiry.timeout + inquiry.seconds, into=target).release()

        get()  # maps the memory
        copy = PlainCopy(BULK_NBYTES)
        with _raw_connection() as send:
            rounds = list[tuple[float, float, float]]()
            started, done = time.monotonic(), 0
            with progress("measured", _STEPS, quiet=inquiry.quiet) as advance:
                while done < _STEPS or len(rounds) < _LEAST_ROUNDS:
                    rounds.append((_seconds(get), copy.seconds(), _seconds(send)))
                    share = (time.monotonic() - started) / inquiry.seconds
                    for _ in range(done, min(_STEPS, int(share * _STEPS))):
                        done += 1
                        advance()
        medians = (statistics.median(seconds) for seconds in zip(*rounds, strict=True))
        return cls(*(BULK_NBYTES / seconds for seconds in medians))

    def __str__(self) -> str:
        link, copy, raw = (value / 1e9 for value in self)
        return (
            f"{link:.1f} GB/s into own tensors, checked; this machine: one plain copy "
            f"{copy:.1f} GB/s, one raw TCP connection {raw:.1f} GB/s over loopback"
        )


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


@contextlib.contextmanager
def _raw_connection() -> Iterator[Callable[[], None]]:
    """Yield what sends all bytes to a thread of this process, over one TCP connection."""
    with contextlib.ExitStack() as closing:
        sender = TcpSend(np.ones(BULK_NBYTES, np.uint8), is_sender=True)
        receiver = TcpSend(np.zeros(BULK_NBYTES, np.uint8), is_sender=False)
        receiver.connect(sender.address)
        closing.callback(receiver.close)
        sender.connect("")
        closing.callback(sender.close)
        executor = closing.enter_context(ThreadPoolExecutor(1, "kvlink-doctor"))

        def send() -> None:
            arriving = executor.submit(receiver.wait)
            sender.send()
            arriving.result()

        yield send
