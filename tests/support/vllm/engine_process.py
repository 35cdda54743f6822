"""Engines in processes of their own, and what they are asked in these tests."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.processes.fork_server import NESTED

if TYPE_CHECKING:
    from collections.abc import Mapping

PATIENCE = 300.0
BLOCK = 32
SCRIPT = Path(__file__).with_name("engine.py")
SEND = {"do_remote_decode": True}

Answer = dict[str, Any]


class EngineProcess:
    """A vLLM engine in a child process; its output is kept in `log`."""

    def __init__(
        self,
        model: Path,
        log: Path,
        transfer: Mapping[str, Any] | None,
        env: Mapping[str, str] | None = None,
        script: Path = SCRIPT,
        **config: Any,
    ):
        mine, theirs = socket.socketpair()
        whole = {
            "model": str(model),
            "max_model_len": 1024,
            "dtype": "float32",
            "enable_prefix_caching": True,
            "transfer": transfer,
            **config,
        }
        command = [sys.executable, str(script), str(theirs.fileno()), json.dumps(whole)]
        self.log = log
        with log.open("a") as out, theirs:
            self.process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdout=out,
                stderr=out,
                env={**os.environ, "OMP_NUM_THREADS": "1", NESTED: "1", **(env or {})},
            )
        mine.settimeout(PATIENCE)
        self._socket, self._channel = mine, mine.makefile("rw")
        self._lock = threading.Lock()
        try:
            assert self._answer() == "ready"
        except BaseException:
            self.kill()
            self._channel.close()
            self._socket.close()
            raise

    def call(self, call: str, **arguments: Any) -> Any:
        """Call a method of `Engine` there."""
        with self._lock:
            print(json.dumps({"do": call, "with": arguments}), file=self._channel, flush=True)
            return self._answer()

    def generate(
        self,
        prompt: list[int],
        params: Answer | None = None,
        *,
        name: str = "",
        tokens: int = 8,
        **inputs: Any,
    ) -> Answer:
        name = name or f"request-{os.urandom(4).hex()}"
        self.call("add", name=name, prompt=prompt, params=params, tokens=tokens, **inputs)
        answer: Answer = self.call("run", names=[name])[name]
        return answer

    def prefill(
        self, prompt: list[int], *, inputs: Mapping[str, Any] = {}, **params: Any
    ) -> Answer:
        """Compute a prompt and send its cache; what the consumer's request needs."""
        answer = self.generate(prompt, {**SEND, **params}, tokens=1, **inputs)
        assert answer["params"], "the producer returned no kv_transfer_params"
        params = answer["params"]
        return params

    def count(self, name: str) -> float:
        value: float = self.call("metrics").get(f"vllm:omni_kvlink_{name}", 0)
        return value

    def output(self) -> str:
        return self.log.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._channel.close()
        self._socket.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()

    def _answer(self) -> Any:
        line = self._channel.readline()
        if not line:
            raise EOFError(f"the engine is gone; it said:\n{self.output()[-4000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{answer['error']}; the engine said:\n{self.output()[-4000:]}")
        return answer["answer"]


def oracle(engine: EngineProcess, tokens: list[int]) -> Answer:
    """The engine's output with the prompt in its prefix cache, which is emptied afterwards."""
    engine.generate(tokens)
    hit = engine.generate(tokens)
    assert hit["cached"] == (len(tokens) - 1) // BLOCK * BLOCK
    assert engine.call("forget")
    return hit


def transfer(role: str, policy: str = "fail", **extra: Any) -> Answer:
    """An engine's `--kv-transfer-config`."""
    return {
        "kv_connector": "OmniKVLinkConnector",
        "kv_connector_module_path": "omni_kvlink.integrations.vllm",
        "kv_role": f"kv_{role}",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": extra,
    }


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """Words of the model's vocabulary, no special ones."""
    return [(7 * seed + 31 * position + position * position) % 500 for position in range(tokens)]
