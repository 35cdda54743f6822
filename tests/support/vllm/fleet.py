"""Two `vllm serve` behind vllm-router, each a process group of its own, and a client of them."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from importlib import metadata
from typing import TYPE_CHECKING, Any

from omni_kvlink.testing.rig import until
from support.processes.fork_server import NESTED
from support.vllm.engine_process import BLOCK, PATIENCE, transfer

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping
    from pathlib import Path

MODEL = "tiny"
HOST = "127.0.0.1"
PREFILL, DECODE, ROUTER = "prefill", "decode", "router"


class Server:
    """A process that serves HTTP on `port`; its output is kept in `log`."""

    def __init__(self, command: list[str], port: int, log: Path, packages: Path):
        self.port, self.log = port, log
        environment = {
            "PYTHONPATH": os.pathsep.join([str(packages), *sys.path]),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else all on the first core
            "VLLM_NO_USAGE_STATS": "1",
            NESTED: "1",
        }
        with log.open("a") as out:
            self.process = subprocess.Popen(
                command,
                stdout=out,
                stderr=out,
                env={**os.environ, **environment},
                start_new_session=True,  # an engine core is a child: both are killed at once
            )

    def wait_ready(self) -> None:
        """Wait until it answers."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), request(self.port, "/health") as response:
                if response.status == 200:
                    return
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self.process.wait(0.2)
                raise EOFError(f"it ended with {code}; it said:\n{self.output()[-4000:]}")
        raise TimeoutError(f"no answer after {PATIENCE} s; it said:\n{self.output()[-4000:]}")

    def output(self) -> str:
        return self.log.read_text()

    def kill(self) -> None:
        """End the process and its children as a power cut does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE)

    def metric(self, name: str) -> float:
        """The sum of a metric's values; 0 if there is none."""
        with request(self.port, "/metrics") as response:
            text = response.read().decode()
        found = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, found))

    def until_all_blocks_are_free(self) -> None:
        """Wait until no block of the engine's KV cache is in use, by vLLM's own count."""
        name = "vllm:kv_cache_usage_perc"
        until(lambda: self.metric(name) == 0.0, f"port {self.port} has used blocks", PATIENCE)


class Fleet:
    """A prefill and a decode server, and the router that users talk to."""

    def __init__(self, model: Path, directory: Path, *, ttl: float = 3600.0):
        self._model, self._directory, self._ttl = model, directory, ttl
        self._ports = free_ports(4)
        self._packages = vllm_metadata(directory)
        self._tokenizer = directory / "tokenizer"
        make_tokenizer(self._tokenizer)
        self.servers: dict[str, Server] = {}

    def start(self, *sides: str) -> None:
        """Start these sides at once, each on its port, and wait until all answer."""
        for side in sides:
            port = self._ports[(PREFILL, DECODE, ROUTER).index(side)]
            command = self._router() if side == ROUTER else self._serve(side, port)
            log = self._directory / f"{side}.log"
            self.servers[side] = Server(command, port, log, self._packages)
        for side in sides:
            self.servers[side].wait_ready()

    def close(self) -> None:
        for server in self.servers.values():
            server.kill()

    def _serve(self, side: str, port: int) -> list[str]:
        own = {"directory": str(self._directory)}
        if side == PREFILL:
            config = transfer("producer", url="shm://fleet-prefill", serve=own, ttl=self._ttl)
        else:
            peers = {"peers": ["shm://fleet-*"], "connect": own, "timeout": 20}
            config = transfer("consumer", "recompute", **peers)
        return [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(self._model)),
            *("--served-model-name", MODEL, "--tokenizer", str(self._tokenizer)),
            *("--host", HOST, "--port", str(port)),
            *("--dtype", "float32", "--max-model-len", "1024", "--block-size", str(BLOCK)),
            *("--enforce-eager", "--shutdown-timeout", "120"),
            *("--kv-transfer-config", json.dumps(config)),
        ]

    def _router(self) -> list[str]:
        prefill, decode, router, metrics = self._ports
        return [
            *(sys.executable, "-m", "vllm_router.launch_router", "--vllm-pd-disaggregation"),
            *("--prefill", f"http://{HOST}:{prefill}", "--decode", f"http://{HOST}:{decode}"),
            *("--host", HOST, "--port", str(router), "--prometheus-port", str(metrics)),
            *("--policy", "round_robin", "--worker-startup-check-interval", "1"),
            *("--health-check-interval-secs", "1", "--disable-circuit-breaker"),
        ]


def vllm_metadata(directory: Path) -> Path:
    """A folder with the metadata of a package `vllm`, whose version `vllm serve` reads.

    Its build for CPUs, vllm-cpu, has them under its own name only.
    """
    folder = directory / "packages"
    info = folder / "vllm-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    version = f"{metadata.version('vllm-cpu')}+cpu"
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    (info / "METADATA").write_text(text)
    return folder


def make_tokenizer(path: Path) -> None:
    """A tokenizer of numbered words, apart from the model: Qwen2's would be taken instead."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    splitter = Tokenizer(models.WordLevel({f"w{n}": n for n in range(512)}, unk_token="w0"))
    splitter.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    unknown, end = (AddedToken(word, single_word=True, special=True) for word in ("w0", "w1"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=splitter, unk_token=unknown, eos_token=end)
    tokenizer.save_pretrained(path)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def sent(port: int, path: str, body: object = None) -> Iterator[http.client.HTTPConnection]:
    """A connection with a request; it is closed at the end of the block, which aborts that."""
    connection = http.client.HTTPConnection(HOST, port, timeout=PATIENCE)
    with contextlib.closing(connection):
        if body is None:
            connection.request("GET", path)
        else:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps(body), headers)
        yield connection


@contextlib.contextmanager
def request(port: int, path: str, body: object = None) -> Iterator[http.client.HTTPResponse]:
    """The response to a request."""
    with sent(port, path, body) as connection:
        yield connection.getresponse()


@dataclasses.dataclass
class Completion:
    """What a user got: the tokens so far, and the end, if the answer came to it."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    reason: str = ""  # vLLM's finish reason; "" before the end
    error: str = ""
    params: Any = None


def completion(prompt: list[int], tokens: int, **more: Any) -> dict[str, Any]:
    """The body of a request for `tokens` tokens."""
    return {
        "model": MODEL,
        "prompt": " ".join(f"w{token}" for token in prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "skip_special_tokens": False,
        **more,
    }


def complete(port: int, prompt: list[int], tokens: int = 8, **more: Any) -> Completion:
    """Send a request and wait for its whole answer; an error is in the result."""
    try:
        with request(port, "/v1/completions", completion(prompt, tokens, **more)) as response:
            text = response.read().decode()
            if response.status != 200:
                return Completion(error=f"{response.status}: {text}")
            answer = json.loads(text)
    except TimeoutError:
        raise
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Completion(error=repr(error))
    (choice,) = answer["choices"]
    params = answer.get("kv_transfer_params")
    return Completion(numbers(choice["text"]), choice["finish_reason"], "", params)


def stream(port: int, prompt: list[int], tokens: int) -> Generator[Completion, None, None]:
    """Send a request; its state before the first chunk, and after each; an error ends it."""
    so_far, text = Completion(), ""
    try:
        body = completion(prompt, tokens, stream=True)
        with sent(port, "/v1/completions", body) as connection:
            yield so_far
            response = connection.getresponse()
            for chunk in chunks(response):
                text += chunk.get("text", "")
                so_far.tokens = numbers(text)
                so_far.reason = chunk.get("finish_reason") or ""
                yield so_far
            if not so_far.reason:
                so_far.error = f"{response.status}: the answer ended early"
    except TimeoutError:
        raise
    except (OSError, http.client.HTTPException, ValueError) as error:
        so_far.error = repr(error)
    yield so_far


def chunks(response: http.client.HTTPResponse) -> Iterator[Mapping[str, Any]]:
    """The choices of a stream of events."""
    for line in response:
        data = line.decode().strip().removeprefix("data: ")
        if not line.startswith(b"data: ") or data == "[DONE]":
            continue
        yield from json.loads(data).get("choices", ())


def numbers(text: str) -> list[int]:
    """The tokens of a text of numbered words."""
    return [int(word.removeprefix("w")) for word in text.split()]
