"""A stage in a process of its own: vLLM-Omni's own manager, which does as the test says."""

from __future__ import annotations

import importlib.util
import itertools
import logging
import multiprocessing
import os
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

if importlib.util.find_spec("vllm_omni") is None:
    pytest.skip("vLLM-Omni is not installed: make test-vllm-omni", allow_module_level=True)

from omni_kvlink.integrations.vllm_omni import register
from support.vllm_omni.caches import Cache, fingerprint

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

PATIENCE = 600.0
NAME = "OmniKVLinkConnector"
_spawn = multiprocessing.get_context("spawn")


class Stage:
    """The process, seen from the test; one command at a time."""

    def __init__(self) -> None:
        self._pipe, theirs = _spawn.Pipe()
        self.process = _spawn.Process(target=_run, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, verb: str, **arguments: Any) -> None:
        self._pipe.send((verb, arguments))

    def result(self, timeout: float = PATIENCE) -> Any:
        assert self._pipe.poll(timeout), "the stage does not answer"
        return self._pipe.recv()

    def call(self, verb: str, **arguments: Any) -> Any:
        self.begin(verb, **arguments)
        return self.result()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()

    def shutdown(self) -> None:
        if self.process.is_alive():
            self._pipe.send(("end", {}))
        self.process.join(PATIENCE)
        self._pipe.close()


class Puppet:
    """The process, seen from inside."""

    def __init__(self) -> None:
        from vllm_omni.distributed.omni_connectors import kv_transfer_manager

        register()
        self._module = kv_transfer_manager
        self._managers: dict[str, Any] = {}

    def make(
        self,
        *,
        role: str,
        kvlink: dict[str, Any],
        tp: tuple[int, int] = (1, 1),
        rank: int = 0,
        type: str = NAME,
        replica: int = 0,
    ) -> bool:
        """A manager of stage 0 that sends to stage 1, or of stage 1 that receives."""
        os.environ["LOCAL_RANK"] = str(rank)
        os.environ["VLLM_OMNI_REPLICA_ID"] = str(replica)  # as vLLM-Omni's stage process sets it
        config = self._module.OmniKVCacheConfig(
            connector_config={"type": type, "role": role, "kvlink": kvlink},
            from_stage="0",
            to_stage="1",
            stage_id="0" if role == "sender" else "1",
            engine_input_source=["0"],
            need_send_cache=role == "sender",
            need_recv_cache=role == "receiver",
            recv_timeout=15.0,
            from_tp=tp[0],
            to_tp=tp[1],
        )
        self._managers[role] = self._module.OmniKVTransferManager(config)
        return self._managers[role].connector is not None

    def send(self, *, request: str, cache: dict[str, Any], metadata: Any = None) -> float:
        """When the manager began to hand over, on the machine's monotonic clock."""
        made = Cache(**cache)
        finished = {"block_ids": list(made.block_ids), "seq_len": made.seq_len}
        pools, started = made.pools(), time.monotonic()
        done = self._managers["sender"].handle_finished_requests_kv_transfer(
            {request: {**finished, "custom_metadata": metadata}},
            pools,
            made.block_size,
            made.dtype,
        )
        assert done == [request]
        for pool in pools:  # sent is sent: the blocks are the engine's again
            for part in pool if isinstance(pool, tuple) else [pool]:
                part.zero_()
        return started

    def receive(self, *, request: str, sender_info: Any = None) -> dict[str, Any]:
        """What the manager gave: fingerprints, or None, and when."""
        started, manager = time.monotonic(), self._managers["receiver"]
        data, nbytes = manager.receive_kv_cache_for_request(request, sender_info=sender_info)
        there = time.monotonic()
        answer: dict[str, Any] = {"took": there - started, "there": there, "nbytes": nbytes}
        if data is None:
            return {**answer, "layers": None}
        layers = {name: [*map(fingerprint, found)] for name, found in data["layer_blocks"].items()}
        with torch.inference_mode():  # in which they were made
            for tensor in itertools.chain(*data["layer_blocks"].values()):
                tensor.add_(1)  # the engine's own, to be written to
        rest = {name: data[name] for name in ("request_id", "block_ids", "metadata")}
        return {**answer, **rest, "layers": layers}

    def put(self, *, key: str, data: Any) -> Any:
        """Straight to the connector; the metadata that it gives."""
        return self._managers["sender"].connector.put("0", "1", key, data)[2]

    def cleanup(self, *, role: str, request: str) -> None:
        self._managers[role].connector.cleanup(request)

    def get(self, *, key: str, timeout: float, metadata: Any = None) -> str:
        """Straight from the connector; the error in words, or what came."""
        connector, deadline = self._managers["receiver"].connector, time.monotonic() + timeout
        try:
            found = connector.get_with_deadline("0", "1", key, metadata, deadline=deadline)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return repr(found)

    def health(self, *, role: str) -> dict[str, Any]:
        health: dict[str, Any] = self._managers[role].connector.health()
        return health

    def close(self) -> None:
        for manager in self._managers.values():
            manager.close()
        self._managers.clear()


def _run(pipe: Connection) -> None:
    logging.disable(logging.CRITICAL)  # the manager logs what the test makes it do
    puppet = Puppet()
    while True:
        verb, arguments = pipe.recv()
        if verb == "end":
            return
        pipe.send(getattr(puppet, verb)(**arguments))
