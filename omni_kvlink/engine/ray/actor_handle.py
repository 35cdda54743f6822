"""`ActorHandle`: an actor that this process started, and calls."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from omni_kvlink.engine.errors import EngineDeadError
from omni_kvlink.engine.ipc.pending_calls import PendingCalls, failed
from omni_kvlink.engine.ray.actor_host import ActorHost, Message, read, write
from omni_kvlink.engine.ray.cluster import Cluster, library
from omni_kvlink.errors import ClosedError, KVLinkError

END = 10.0
"""Seconds that an actor has to end when it is told to, before it is killed."""
_NEWS = 5.0
"""Seconds in which Ray must say that an actor is gone which was killed."""
_CALLS = 1 << 20
"""Calls that may be under way at once: a request is one, from its beginning to its end."""


class ActorHandle:
    """A `ActorHost` in an actor of its own, with the verbs of `Child`; thread-safe.

    Args:
        host: the actor's class.
        cluster: where; the caller leaves it, after `join`.
        options: of the actor: its resources, and where it goes.
        name: of the actor, in errors.
        rank: of the worker that will be in it.
        on_death: called in the reader's thread, once, when the actor is gone that nobody told to,
            and so is all that was asked of it.
    """

    def __init__(
        self,
        host: type[ActorHost],
        cluster: Cluster,
        options: Mapping[str, Any],
        *,
        name: str,
        rank: int = 0,
        on_death: Callable[[EngineDeadError], None],
    ):
        self.name, self._cluster, self._on_death = name, cluster, on_death
        self._asked = PendingCalls()
        self._sending = threading.Lock()
        self._told_to = ""
        self._ending: Future[Any] | None = None
        self._heard: queue.SimpleQueue[tuple[int | None, Future[Message] | None]]
        self._heard = queue.SimpleQueue()
        ray = library()
        self._kill_actor = ray.kill
        how = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": _CALLS, **options}
        self._actor = ray.remote(host).options(**how).remote(rank)
        self._listen(None, self._actor.alive.remote())
        self._reader = threading.Thread(target=self._read, name=f"{name}-reader", daemon=True)
        self._reader.start()

    @property
    def ended(self) -> Exception | None:
        """What all calls end in, once the actor is gone."""
        return self._asked.ended

    @property
    def is_alive(self) -> bool:
        """Whether it could answer still; a process that is frozen is alive."""
        return self._asked.ended is None

    def call(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Future[Any]:
        """Call a method there, and return; the future has the answer, or why there is none.

        That is what the method raised, EngineDeadError, or ClosedError after `end`.
        """
        try:
            message = write({"method": method, "args": list(args), "kwargs": kwargs or {}})
            with self._sending:  # so that numbers are sent that were given
                if not self._cluster.is_there:
                    raise EngineDeadError(f"{self.name}: this process has left the Ray cluster")
                number, answer = self._asked.add()
                self._listen(number, self._actor.call.remote(number, message))
        except KVLinkError as error:
            return failed(error)
        return answer

    def end(self) -> None:
        """Tell it to give everything back, and return."""
        if not self._told_to:
            self._ending = self.call("end")
            self._told_to = "end"

    def kill(self) -> None:
        """End it at once, and return; what was asked of it ends in EngineDeadError."""
        self._told_to = self._told_to or "die"
        if self._cluster.is_there:
            self._kill_actor(self._actor)

    def join(self, timeout: float = END) -> None:
        """Wait until it has ended, which `end` or `kill` asked for; after `timeout`, kill it."""
        if self._ending is not None:
            wait([self._ending], timeout)
        self.kill()
        if threading.current_thread() is not self._reader:
            self._reader.join(_NEWS)
            self._heard.put((None, None))  # a Ray that was shut down says nothing
            self._reader.join()

    # In the reader's thread.

    def _listen(self, number: int | None, reference: Any) -> None:
        """Ray's own thread, which tells, must not wait for anything."""
        reference.future().add_done_callback(partial(self._tell, number))

    def _tell(self, number: int | None, told: Future[Message]) -> None:
        self._heard.put((number, told))

    def _read(self) -> None:
        while self._asked.ended is None:
            number, told = self._heard.get()
            error = None if told is None else told.exception()
            if number is None or told is None or error is not None:
                self._on_gone(error)
            else:
                self._on_answer(number, told.result())

    def _on_answer(self, number: int, message: Message) -> None:
        try:
            found = read(message)
        except Exception as error:  # nobody knows any more what it means
            self._on_gone(error)
        else:
            self._asked.settle(number, found)

    def _on_gone(self, error: BaseException | None) -> None:
        """The actor is gone; or, behind a network that broke, it is to go."""
        told_to = self._told_to
        self.kill()
        words = f"{self.name}, a Ray actor, is gone: {_short(error)}"
        death = EngineDeadError(words)
        self._asked.end(ClosedError(words) if told_to == "end" else death)
        if not told_to:
            self._on_death(death)


def _short(error: BaseException | None) -> str:
    """What happened, and why: Ray says these at the beginning and at the end."""
    text = " ".join(str(error or "Ray does not say why").split())
    return text if len(text) < 500 else f"{text[:150]} … {text[-300:]}"
