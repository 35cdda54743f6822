"""A stage in a process of its own: `python -m omni_kvlink.engine.stage_main DESCRIPTOR`."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgspec

from ..errors import PeerLostError
from .ar_engine import AREngine
from .channel import Channel
from .codec import pack_error, pack_output, unpack_request
from .config import OmniARConfig, OmniDiffusionConfig
from .diffusion_engine import DiffusionEngine
from .errors import EngineError
from .outputs import DiffusionOutput

_KINDS: dict[str, tuple[type[Any], type[Any]]] = {
    "ar": (AREngine, OmniARConfig),
    "dit": (DiffusionEngine, OmniDiffusionConfig),
}


def serve(channel: Channel) -> None:
    """Run a stage until the other side closes the channel, or is gone."""
    first = channel.receive()
    kind, config = _KINDS[first["kind"]]
    try:
        engine = kind(msgspec.convert(first["config"], config), on_death=partial(_report, channel))
    except Exception as error:
        channel.send({"op": "failed", "error": pack_error(error)})
        return
    with engine:
        channel.send({"op": "ready", "urls": engine.sink_urls})
        verbs: dict[str, Callable[[dict[str, Any]], None]] = {
            "submit": partial(_submit, channel, engine),
            "abort": lambda message: engine.abort(message["request_id"]),
            "discard": lambda message: engine.discard(message["request_id"], message["reason"]),
            "call": partial(_call, channel, engine),
        }
        while True:
            try:
                message = channel.receive()
            except PeerLostError:
                return
            verbs[message["op"]](message)


def _submit(channel: Channel, engine: Any, message: dict[str, Any]) -> None:
    key = message["request"]["request_id"]
    try:
        future = engine.submit(unpack_request(message["request"]))
    except Exception as error:
        _send(channel, DiffusionOutput(key, error=error))
        return
    future.add_done_callback(partial(_done, channel))


def _done(channel: Channel, future: Future[DiffusionOutput]) -> None:
    _send(channel, future.result())


def _send(channel: Channel, output: DiffusionOutput) -> None:
    try:
        channel.send({"op": "output", "output": pack_output(output)})
    except EngineError:
        return  # nobody waits for it; `receive` ends this process


def _call(channel: Channel, engine: Any, message: dict[str, Any]) -> None:
    """A method of the engine, such as sleep or stats; an answer or an error."""
    answer: dict[str, Any] = {"op": "answer", "number": message["number"]}
    try:
        answer["value"] = getattr(engine, message["method"])(*message["args"])
    except Exception as error:
        answer["error"] = pack_error(error)
    channel.send(answer)


def _report(channel: Channel, error: EngineError) -> None:
    channel.send({"op": "died", "error": pack_error(error)})


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        serve(Channel(sock))


if __name__ == "__main__":
    main()
