"""A UCX transport in a process of its own, which executes commands and can be stopped or killed.

It reads one JSON command a line, and writes one JSON answer a line when the command is done.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from omni_kvlink.connectors.ucx.transport import UcxEndpoint, UcxTransport

# Reaches into _call: what is called runs in the transport's thread, with nothing between it and
# what is posted there.

PATIENCE = 120.0
_PERIOD = 65_521  # a prime, so that misplaced bytes are detected


def pattern(nbytes: int, seed: int) -> bytearray:
    block = random.Random(seed).randbytes(_PERIOD)
    return bytearray(block * (nbytes // _PERIOD + 1))[:nbytes]


class UcxProcess:
    """The process, seen from the test."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self._last_id = 0
        self._answers: dict[int, Any] = {}
        self._rest = b""

    def submit(self, verb: str, **arguments: Any) -> int:
        self._last_id += 1
        line = json.dumps({"id": self._last_id, "verb": verb, **arguments})
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        return self._last_id

    def answer(self, number: int, timeout: float = PATIENCE) -> Any:
        deadline = time.monotonic() + timeout
        assert self.process.stdout is not None
        while number not in self._answers:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, left))
            assert ready, f"no answer to {number}"
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            assert data, "the process has died"
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                answer = json.loads(line)
                self._answers[answer["id"]] = answer["answer"]
        return self._answers.pop(number)

    def call(self, verb: str, **arguments: Any) -> Any:
        return self.answer(self.submit(verb, **arguments))

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def close(self) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class UcxServer:
    """The process, seen from inside."""

    def __init__(self) -> None:
        self._endpoints: dict[str, UcxEndpoint] = {}
        self._lock = threading.Lock()
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # UCX logs to the standard output
        self._ucx_transport = UcxTransport()

    def run(self) -> None:
        for line in sys.stdin:
            command = json.loads(line)
            number, verb = command.pop("id"), command.pop("verb")
            getattr(self, verb)(number, **command)
        self._ucx_transport.close()

    def _answer(self, number: int, answer: Any) -> None:
        with self._lock:
            print(json.dumps({"id": number, "answer": answer}), file=self._out, flush=True)

    def connect(self, number: int, address: str) -> None:
        self._endpoints[address] = self._ucx_transport.connect(bytes.fromhex(address))
        self._answer(number, self._ucx_transport.address.hex())

    def send(
        self, number: int, to: str, nbytes: int, tag: int, seed: int = 1, then: int = 0
    ) -> None:
        """Send; `then` is a signal to raise in this process right after the send was posted."""
        ucx_transport, data = self._ucx_transport, pattern(nbytes, seed)

        def post() -> None:
            # In the transport's thread, so that nothing is queued between these two.
            ucx_transport.send(
                self._endpoints[to], data, tag, lambda e: self._answer(number, _name(e))
            )
            if then:
                ucx_transport._call(lambda: os.kill(os.getpid(), then))

        ucx_transport._call(post)

    def receive(self, number: int, to: str, nbytes: int, tag: int, seed: int = 1) -> None:
        """Answer with `number` when the receive is posted, and with `-number` when it is done."""
        ucx_transport, data = self._ucx_transport, bytearray(nbytes)

        def done(error: BaseException | None) -> None:
            wrong = error is None and data != pattern(nbytes, seed)
            self._answer(-number, "wrong bytes" if wrong else _name(error))

        ucx_transport.receive(self._endpoints[to], data, tag, done)
        ucx_transport._call(lambda: self._answer(number, "waiting"))

    def stats(self, number: int) -> None:
        self._answer(number, self._ucx_transport.stats())

    def cpu(self, number: int) -> None:
        self._answer(number, time.process_time())


def _name(error: BaseException | None) -> str | None:
    return None if error is None else type(error).__name__


if __name__ == "__main__":
    UcxServer().run()
