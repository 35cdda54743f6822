"""The reader's side of each feature of a campaign, and each way to leave a payload.

What a reader has seen is in its log before it leaves: a SIGKILL may come between any two lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import os
import queue
import random
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from omni_kvlink import (
    ChunkStreams,
    ClosedError,
    KVLinkError,
    MissingError,
    PeerLostError,
    TransferFailed,
    TransferTimeout,
)
from omni_kvlink.aio import AsyncKVConsumer
from omni_kvlink.link import batch_copies
from omni_kvlink.lowlevel import BackgroundGet, begin_get
from omni_kvlink.testing.caches import fingerprint, hash_chunk, hash_tensors
from support.network import lookups
from support.network.features import (
    REQUESTS,
    chunk_count,
    chunk_of,
    end_of,
    feature_of,
    incarnation_of,
    is_kept,
    prompt_of,
    recipe,
    sizes_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from omni_kvlink import KVConsumer, Payload, Received, ReceivedBatch, ReceivedStream
    from omni_kvlink.lookup import LookupConsumer
    from omni_kvlink.lowlevel import CopyInto
    from support.network.peer_process import Incarnation, Log

# Reaches into _data: to look at `data` is to have read it, which a reader that gives a payload back
# has not.

OVERDUE = 15.0
"""Seconds after its deadline at which a call hangs, also if its process was stopped meanwhile."""
PATIENCE = 60.0
KEPT_TIMEOUT = 8.0
"""Seconds that a reader waits for what is kept; it may have been withdrawn."""
TAKEN = ("block", "release", "drop")
GIVEN_BACK = ("raise", "give", "raise later")
LEFT = ("raise", "break", "give", "drop", "time out", "die")
"""Ways to leave: as read, unread, and in the middle of a stream."""
_START = re.compile(r"\(start=(\d+)\)")


class ReaderError(Exception):
    """What a reader raises in its own block."""


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def is_path(incarnation: Incarnation, path: str) -> bool:
    """Whether a ledger names the path that the campaign has configured."""
    scheme = incarnation.url.partition(":")[0]
    name = "shm" if scheme == "auto" else scheme
    if name == "zmq+tcp" and not incarnation.options.get("insecure"):
        name += "+curve"
    return set(path.split(", ")) <= {name, f"{name}+lanes", f"{name}+inline"}


async def _outcome(coroutine: Coroutine[Any, Any, list[str]]) -> list[str] | KVLinkError:
    """What a coroutine returns or raises: an error that leaves `asyncio.run` keeps its frames."""
    try:
        return await coroutine
    except KVLinkError as error:
        return copy.copy(error)


class Awaited:
    """A consumer or stream whose methods are awaited, and block: the same code runs with both."""

    def __init__(self, target: Any):
        self.target = target
        self.stream = target

    def __enter__(self) -> Any:
        self.target.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.target.__exit__(*exception)

    def release_unread(self) -> None:
        self.target.release_unread()

    async def get(self, *arguments: Any, **options: Any) -> Any:
        return self.target.get(*arguments, **options)

    async def get_many(self, *arguments: Any, **options: Any) -> Any:
        return self.target.get_many(*arguments, **options)

    async def stream_get(self, *arguments: Any, **options: Any) -> Awaited:
        return Awaited(self.target.stream_get(*arguments, **options))

    async def read_stream(self, *arguments: Any, **options: Any) -> Awaited:
        return Awaited(self.target.read_stream(*arguments, **options))

    async def receive(self, **options: Any) -> Any:
        return self.target.receive(**options)

    async def wait_for_layer(self, layer: int, **options: Any) -> Any:
        return self.target.wait_for_layer(layer, **options)

    async def wait(self) -> Any:
        return self.target.wait()


class Receiver:
    """Receives the payloads of tasks, checks each byte, and leaves them in ways drawn by lot."""

    lookup: LookupConsumer | None = None

    def __init__(self, link: KVConsumer, incarnation: Incarnation, log: Log):
        self._link, self._incarnation, self._log = link, incarnation, log
        self._starts = dict(incarnation.positions)  # of streams: the chunk that is read next
        self._redirected, self._done = set[str](), set[str]()
        self._seen = dict[str, int]()  # of streams: the incarnation of the producer
        self._rng = random.Random(
            f"{incarnation.seed}/{incarnation.peer}/{incarnation.number}/{incarnation.tasks[:1]}"
        )

    def receive(self, keys: Sequence[str], timeout: float) -> None:
        """Receive the payloads of one task, again after what another get may mend."""
        deadline, left = time.monotonic() + timeout, list(keys)
        self._log.write(keys[0], "begin")
        while left:
            try:
                left = self._run(left, max(0.0, deadline - time.monotonic()))
            except PeerLostError:
                self._log.write(left[0], "lost")
                left = [key for key in left if self._starts.get(key, 0) < chunk_count(key)]
                for key in left:
                    self._starts.pop(key, None)
                    self._redirected.discard(key)
                if time.monotonic() > deadline:
                    for key in left:
                        self._log.write(key, "TransferTimeout")
                    return
            except (TransferFailed, TransferTimeout) as error:
                left = self._after(error, left)
            left = [key for key in left if key not in self._done]
            if time.monotonic() > deadline + OVERDUE:
                self._log.write(keys[0], "LATE")

    def _after(self, error: TransferFailed | TransferTimeout, keys: list[str]) -> list[str]:
        """Write down why a payload did not come; return the keys that are to be got again."""
        found_start = _START.search(str(error))
        if found_start:
            start = self._starts[error.key] = int(found_start[1])
            self._redirected.add(error.key)
            self._log.write(error.key, "told", self._seen[error.key], start)
            return keys
        denied = [error.key] if error.key in keys else keys
        for key in denied:
            self._log.write(key, type(error).__name__)
        return [key for key in keys if key not in denied]

    def _run(self, keys: list[str], timeout: float) -> list[str]:
        """Receive once; return the keys that were left unread."""
        feature = feature_of(keys[0])
        is_async, feature = feature.startswith("aio"), feature.removeprefix("aio-")
        call: Callable[[Any, list[str], float], Coroutine[Any, Any, list[str]]] = {
            "many": self._take_many,
            "background-into": self._take_in_background,
            "lookup": self._look_up,
            "kept": self._take_kept,
            "layers": self._take_layers,
            "stream": self._take_stream,
            "requests": self._take_stream,
            "streams": self._take_streams,
        }.get(feature, self._take)
        if is_async:
            found = asyncio.run(_outcome(call(AsyncKVConsumer(self._link), keys, timeout)))
            if isinstance(found, list):
                return found
            try:
                raise found
            finally:
                del found  # the error's traceback has this frame
        coroutine = call(Awaited(self._link), keys, timeout)
        try:
            coroutine.send(None)
        except StopIteration as end:
            return list(end.value)
        raise AssertionError("a call that blocks was awaited")

    # Payloads that come whole

    async def _take(self, end: Any, keys: list[str], timeout: float) -> list[str]:
        (key,) = keys
        verify, into = self._rng.choice(("auto", "full")), self._targets(key)
        received = await end.get(key, timeout=timeout, verify=verify, into=into)
        if not is_path(self._incarnation, received.ledger.path):
            self._log.write(key, "WRONG", incarnation_of(received._data))
        how = self._draw(TAKEN, GIVEN_BACK)
        if into is not None:
            sent = recipe(key, incarnation_of(received._data)).make()
            if hash_tensors(into.tensors()) != hash_tensors(sent.tensors()):
                self._log.write(key, "WRONG", incarnation_of(received._data))
        if feature_of(key) == "scatter":
            data = recipe(key, incarnation_of(received._data)).make()
            for view in data.tensors():
                assert isinstance(view, torch.Tensor)
                view.zero_()
            received.scatter(data)
            self._check(key, data)
            del data
        return self._leave([received], [key], how, received)

    def _targets(self, key: str) -> Payload | None:
        """Tensors for a payload that is received into the reader's own; else None."""
        if not feature_of(key).endswith("into"):
            return None
        targets = recipe(key, 0).make()
        for view in targets.tensors():
            assert isinstance(view, torch.Tensor)
            view.zero_()
        return targets

    async def _take_in_background(self, end: Any, keys: list[str], timeout: float) -> list[str]:
        """Have a payload copied into tensors, which are this reader's again when it has ended."""
        (key,) = keys
        targets, found, ended = self._targets(key), list[int](), queue.SimpleQueue[Any]()
        assert targets is not None

        def into(stream: ReceivedStream) -> Payload:
            found.append(incarnation_of(stream.payload))
            return targets

        def copied(copies: CopyInto) -> None:
            if get.is_read:  # it is claimed, and not released yet
                sent = recipe(key, found[-1]).make()
                is_right = hash_tensors(targets.tensors()) == hash_tensors(sent.tensors())
                self._log.write(key, "read" if is_right else "WRONG", found[-1])
                self._done.add(key)

        with ThreadPoolExecutor(1) as pool:
            begin = partial(begin_get, streamed=True)
            get = BackgroundGet(
                key,
                lambda timeout: end.target,
                begin,
                timeout,
                submit=pool.submit,
                copy=ended.put,
                fail=ended.put,
                into=into,
                copied=copied,
            )
            get.request()
            leave_at = time.monotonic() + self._rng.random() / 50 if self._leaves() else math.inf
            outcome: Any = None
            while outcome is None:
                with contextlib.suppress(queue.Empty):
                    outcome = ended.get(timeout=0.005)
                get.expire()
                if outcome is None and time.monotonic() > leave_at and get.cancel():
                    outcome = ClosedError("cancelled")
            for view in targets.tensors():
                assert isinstance(view, torch.Tensor)
                view.zero_()
        if any(view.any() for view in targets.tensors() if isinstance(view, torch.Tensor)):
            self._log.write(key, "WRONG", -1)  # it was written after the end
        if isinstance(outcome, ClosedError):
            self._log.write(key, "back")
            return keys
        if isinstance(outcome, Exception):
            try:
                raise outcome
            finally:
                del outcome  # its traceback has this frame, and so the link: a reference cycle
        return []

    async def _take_many(self, end: Any, keys: list[str], timeout: float) -> list[str]:
        batch = await end.get_many(keys, timeout=timeout)
        if self._rng.random() < 0.5:
            self._scatter_many(batch, keys)
        return self._leave(list(batch), keys, self._draw(TAKEN, GIVEN_BACK), batch)

    def _scatter_many(self, batch: ReceivedBatch[Received], keys: Sequence[str]) -> None:
        """Copy payloads out, by two threads though they are small, and compare the copies."""
        targets = [
            recipe(key, incarnation_of(received._data)).make()
            for key, received in zip(keys, batch, strict=True)
        ]
        for view in (view for data in targets for view in data.tensors()):
            assert isinstance(view, torch.Tensor)
            view.zero_()
        with patch.object(batch_copies, "SHARED", 0), ThreadPoolExecutor(1) as pool:
            pool.submit(batch.scatter, targets).result()
        for key, data in zip(keys, targets, strict=True):
            self._check(key, data)

    async def _take_kept(self, end: Any, keys: list[str], timeout: float) -> list[str]:
        """Get what is kept, and again at once; then what its producer waits for."""
        for key in filter(is_kept, keys):
            with await end.get(key, timeout=min(timeout, KEPT_TIMEOUT)) as data:
                incarnation = self._note(key, data)
            del data
            for _ in range(self._rng.randrange(4)):
                self._get_kept(end.target, key, incarnation)
        counted = [key for key in keys if not is_kept(key)]
        return await self._take(end, counted, timeout) if counted else []

    def _get_kept(self, end: KVConsumer, key: str, incarnation: int) -> None:
        """Get a payload that was read before; write down if it is missing."""
        if self._rng.random() < 0.5:
            end.contains([key, f"{key}.x"], timeout=PATIENCE)
        try:
            if self._rng.random() < 0.5:
                received = end.get(key, timeout=PATIENCE, wait=False)
            else:
                [received] = end.get_many([key], timeout=PATIENCE, wait=False)
        except MissingError:
            self._log.write(key, "missing", incarnation)
            return
        if self._check(key, received.data) == incarnation:
            self._log.write(key, "again", incarnation)
        received.release()

    async def _look_up(self, end: Any, keys: list[str], timeout: float) -> list[str]:
        (key,) = keys
        assert self.lookup is not None
        gone = time.monotonic() + 0.1  # a producer that is gone is asked again after seconds
        try:
            match = self.lookup.select(prompt_of(key), wait=True, timeout=timeout)
        except PeerLostError:
            _sleep_until(gone)
            raise
        with contextlib.suppress(ReaderError), match:
            incarnation = lookups.incarnation_of(match, key)
            if self._leaves():
                self._log.write(key, "back" if incarnation >= 0 else "WRONG")
                raise ReaderError
            self._log.write(key, "read" if incarnation >= 0 else "WRONG", incarnation)
            self._done.add(key)
            return []
        return keys

    def _leave(
        self, all_received: list[Received], keys: list[str], how: str, block: Any
    ) -> list[str]:
        """Check payloads and leave them; return the keys of those that were given back."""
        if how == "give":
            for key in keys:
                self._log.write(key, "back")
            block.release_unread()
            return keys
        if how in ("release", "drop"):
            for received, key in zip(all_received, keys, strict=True):
                self._note(key, received.data)
            if how == "release":
                block.release()
            return []
        with contextlib.suppress(ReaderError), block:
            for received, key in zip(all_received, keys, strict=True):
                if how == "raise":
                    self._check(key, received._data)
                    self._log.write(key, "back")
                elif how == "block":
                    self._note(key, received._data)
            if how == "raise later":  # the first one was read, and said so
                self._note(keys[0], all_received[0]._data)
                all_received[0].release()
                for key in keys[1:]:
                    self._log.write(key, "back")
            if how != "block":
                raise ReaderError
        return {"block": [], "raise": keys, "raise later": keys[1:]}[how]

    def _note(self, key: str, data: Any) -> int:
        """Check a payload, and write down that it was read; return its producer's incarnation."""
        incarnation = self._check(key, data)
        self._log.write(key, "read", incarnation)
        self._done.add(key)
        return incarnation

    def _check(self, key: str, data: Any) -> int:
        incarnation = incarnation_of(data)
        if fingerprint(data) != fingerprint(recipe(key, incarnation).make()):
            self._log.write(key, "WRONG", incarnation)
        return incarnation

    # Layers

    async def _take_layers(self, end: Any, keys: list[str], timeout: float) -> list[str]:
        (key,) = keys
        stream = await end.stream_get(key, timeout=timeout)
        hashes, leave_at = list[str](), self._leave_at(len(stream.stream) if self._leaves() else 0)
        how = self._rng.choice(LEFT[:3])
        with contextlib.suppress(ReaderError), stream:
            for index in range(len(stream.stream)):
                layer = await stream.wait_for_layer(index, timeout=timeout)
                hashes.append(hash_tensors(layer.tensors))
                if index == leave_at:
                    self._log.write(key, "back")
                    if how == "raise":
                        raise ReaderError
                    if how == "give" or index == len(stream.stream) - 1:
                        stream.release_unread()
                    return keys
            data = await stream.wait()
            incarnation = self._check(key, data)
            views = data.tensors()
            expected = [hash_tensors(views[n : n + 2]) for n in range(0, len(views), 2)]
            same = sorted(hashes) == sorted(expected) and stream.stream.extra == end_of(data)
            del data, views, layer
            self._log.write(key, "read" if same else "WRONG", incarnation)
            self._done.add(key)
            return []
        return keys

    # Append streams

    async def _take_stream(self, end: Any, keys: list[str], timeout: float) -> list[str]:
        (key,) = keys
        start = self._start(key)
        verify = self._rng.choice(("auto", "full"))
        stream = await end.read_stream(key, timeout=timeout, start=start, verify=verify)
        self._seen[key] = stream.stream.metadata["incarnation"]
        how = self._rng.choice(LEFT)
        count = chunk_count(key) - start
        leave_at = start + self._leave_at(count) if self._leaves() and count > 0 else -1
        if how == "drop":
            return await self._read(stream, key, leave_at, how, timeout)
        with contextlib.suppress(ReaderError), stream:
            return await self._read(stream, key, leave_at, how, timeout)
        return keys

    async def _read(
        self, stream: Any, key: str, leave_at: int, how: str, timeout: float
    ) -> list[str]:
        """Read chunk by chunk, and leave at one of them; return the key if it did."""
        expected = self._starts.get(key, 0)  # `_start` has set it
        while True:
            received = await stream.receive(timeout=timeout)
            if received is None:
                return self._end(key)
            self._check_chunk(key, received, expected)
            if expected == leave_at and how != "time out":
                self._log.write(key, "back", self._seen[key], expected)
                self._go_on_from(key, expected)
                self._go(how, stream)
                return [key]
            self._log.write(key, "chunk", self._seen[key], expected)
            self._go_on_from(key, expected + 1)
            if expected == leave_at:
                with contextlib.suppress(TransferTimeout):
                    received = await stream.receive(timeout=0.0)
                    if received is None:
                        return self._end(key)
                raise ReaderError
            expected += 1

    async def _take_streams(self, end: Any, keys: list[str], timeout: float) -> list[str]:
        """Read several streams in one thread; leave all of them at one chunk."""
        streams = ChunkStreams[Any]()
        leave_after = self._rng.randrange(12) if self._leaves() else 1000
        unread, how = list(keys), self._rng.choice(("raise", "break", "die"))
        with contextlib.suppress(ReaderError), streams:
            for key in keys:
                stream = self._link.read_stream(key, timeout=timeout, start=self._start(key))
                self._seen[key] = stream.metadata["incarnation"]
                streams.add(stream)
            while unread:
                stream, received = streams.receive(timeout=timeout)
                key = stream.request_id
                if received is None:
                    self._end(key)
                    unread.remove(key)
                    continue
                expected = self._starts.get(key, 0)
                self._check_chunk(key, received, expected)
                leave_after -= 1
                if leave_after < 0:
                    self._log.write(key, "back", self._seen[key], expected)
                    self._go(how, streams)
                    break
                self._log.write(key, "chunk", self._seen[key], expected)
                self._go_on_from(key, expected + 1)
        return unread

    def _start(self, key: str) -> int:
        """From which chunk on to read: where this reader was, or as one that does not know it."""
        start = self._starts.get(key, 0)
        if key in self._redirected:
            return start
        if self._rng.random() < 0.5:
            start = self._starts[key] = 0
        if start:
            self._log.write(key, "from", -1, start)
        return start

    def _go_on_from(self, key: str, number: int) -> None:
        self._starts[key] = number
        self._redirected.discard(key)

    def _end(self, key: str) -> list[str]:
        """The end of a stream was received: there is nothing left to read."""
        self._log.write(key, "ended", self._seen[key])
        self._done.add(key)
        return []

    def _check_chunk(self, key: str, received: Any, expected: int) -> None:
        number, incarnation = received.number, self._seen[key]
        tensors = chunk_of(key, incarnation, number)
        is_right = hash_tensors(received.data.tensors()) == hash_chunk(tensors)
        if feature_of(key) == "requests":
            sizes = sizes_of(tensors)
            found = {name: len(part["hidden"]) for name, part in received.requests().items()}
            is_right &= found == {name: sizes[name] for name in REQUESTS}
        if not is_right or number != expected:
            self._log.write(key, "WRONG", incarnation, number)

    def _go(self, how: str, stream: Any) -> None:
        """Leave a stream in the middle; `break` and `drop` are their caller's."""
        if how == "die":
            self._log.write("-", "dying")
            os.kill(os.getpid(), signal.SIGKILL)
            os._exit(1)  # the first process of a PID namespace cannot kill itself
        if how == "raise":
            raise ReaderError
        if how == "give":
            stream.release_unread()

    def _leaves(self) -> bool:
        return self._rng.random() < self._incarnation.leaves

    def _leave_at(self, count: int) -> int:
        return self._rng.randrange(count) if count else -1

    def _draw(self, taken: Sequence[str], given_back: Sequence[str]) -> str:
        return self._rng.choice(given_back if self._leaves() else taken)
