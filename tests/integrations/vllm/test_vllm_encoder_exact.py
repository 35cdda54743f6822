"""A random BLIP-2: its encoder in one real engine, its language model in others."""

from __future__ import annotations

import importlib.util
import runpy
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink.testing.rig import until
from support import FOLDER
from support.vllm.engine_process import SEND, EngineProcess, prompt, transfer

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make test-vllm"
    ),
    pytest.mark.timeout(900),
]

HERE = Path(__file__).resolve()
SCRIPT = FOLDER / "vllm" / "encoder_engine.py"
EXAMPLE = HERE.parents[3] / "examples" / "epd_vllm.py"
TOKENS = prompt(40, seed=5)


class Engines:
    """The producer `e`; `whole`, which can also encode, and `half`, whose encoder is another one.

    `half` has the same name of the weights, so that its tokens are right only if it loads.
    """

    def __init__(self, vlm: Path, half: Path, directory: Path, stack: ExitStack):
        self._vlm, self._half, self._directory, self._stack = vlm, half, directory, stack
        self.producer = self.start_producer()
        self.whole = self._start("whole", vlm, "consumer")
        self.half = self.start_half()

    def start_producer(self, ranks: int = 1) -> EngineProcess:
        return self._start("e", self._vlm, "producer", ranks)

    def start_half(self, ranks: int = 1) -> EngineProcess:
        return self._start("half", self._half, "consumer", ranks, load_failure_policy="fail")

    def start_prefill(self) -> EngineProcess:
        """Its prompts' caches are read by the engine of `start_decode`."""
        kv = transfer("producer", url="shm://p", serve=self._options, model="tiny")
        return self._start("prefill", self._half, "consumer", kv=kv, load_failure_policy="fail")

    def start_decode(self) -> EngineProcess:
        kv = transfer("consumer", peers=["shm://p"], connect=self._options, model="tiny")
        return self._start("decode", self._half, kv=kv)

    def encode(self, image: int, **given: Any) -> dict[str, Any]:
        """Encode an image; what the request of a consumer needs."""
        answer = run(self.producer, image, tokens=1, **given)
        assert answer["tokens"] == []
        params: dict[str, Any] = answer["params"]
        return params

    @property
    def _options(self) -> dict[str, str]:
        return {"directory": str(self._directory)}

    def _start(
        self, name: str, model: Path, role: str = "", ranks: int = 1, kv: Any = None, **extra: Any
    ) -> EngineProcess:
        given: dict[str, Any] = {"url": "shm://e", "serve": self._options, "ttl": 3600}
        if role == "consumer":
            given = {"peers": ["shm://e"], "connect": self._options, "timeout": 300}
        encoder = {
            "ec_connector": "OmniKVLinkECConnector",
            "ec_connector_module_path": "omni_kvlink.integrations.vllm",
            "ec_role": f"ec_{role}",
            "ec_connector_extra_config": {**given, "model": "tiny", **extra},
        }
        engine = EngineProcess(
            model,
            self._directory / f"{name}.log",
            encoder if role else None,
            {"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if ranks > 1 else None,
            script=SCRIPT,
            max_model_len=512,
            enable_prefix_caching=False,
            tensor_parallel_size=ranks,
            kv_transfer=kv,
        )
        self._stack.callback(engine.close)
        return engine


def run(engine: EngineProcess, image: int, **given: Any) -> dict[str, Any]:
    name = f"request-{time.monotonic_ns()}"
    engine.call("add", name=name, prompt=TOKENS, image=image, **given)
    answer: dict[str, Any] = engine.call("run", names=[name])[name]
    return answer


@pytest.fixture(scope="module")
def engines(
    vlm: Path, directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    half = tmp_path_factory.mktemp("half")
    runpy.run_path(str(EXAMPLE))["make_model"](half, encoder=1)
    with ExitStack() as stack:
        yield Engines(vlm, half, directory, stack)


def local(engines: Engines, image: int) -> dict[str, Any]:
    """What one engine generates alone, under another name of the image."""
    return run(engines.whole, image, item=f"local {image}")


def outcome(answer: dict[str, Any]) -> tuple[Any, ...]:
    return answer["reason"], answer["tokens"], answer["logprobs"]


@pytest.mark.parametrize("image", range(4))
def test_as_one_engine(engines: Engines, image: int) -> None:
    """Bit for bit, also where the engine's own encoder would give other tokens."""
    item = f"image {image}"
    params = engines.encode(image, item=item, params={"readers": 2})
    expected = outcome(local(engines, image))
    assert expected[0] == "length"
    for engine in (engines.whole, engines.half):
        assert outcome(run(engine, image, item=item, params=params)) == expected
    until(lambda: engines.producer.call("live") == 0, "both reads have ended", timeout=60)


def test_the_encoders_differ(engines: Engines) -> None:
    """Else the test above would show nothing: without params, `half` encodes."""
    assert run(engines.half, 0, item="own 0")["tokens"] != local(engines, 0)["tokens"]
    assert local(engines, 0)["tokens"] != local(engines, 1)["tokens"]


def test_the_digest_identifies_an_image(engines: Engines) -> None:
    """Without names of the client's, for engines that have the model under the same path."""
    params = engines.encode(7)
    got = run(engines.whole, 7, params=params)
    assert outcome(got) == outcome(local(engines, 7))
    until(lambda: engines.producer.call("live") == 0, "it was loaded", timeout=60)


def test_the_producer_is_killed(engines: Engines) -> None:
    """Before and during a load: the request is encoded here or ends; a new producer is found."""
    expected = outcome(local(engines, 5))
    waits = {"image 5": {"key": "never"}}
    with ThreadPoolExecutor(2) as threads:
        running = [
            threads.submit(run, engine, 5, item="image 5", params=waits)
            for engine in (engines.whole, engines.half)
        ]
        until(lambda: engines.producer.call("waiting") == 2, "both loads wait", timeout=60)
        engines.producer.kill()
        whole, half = (each.result(300) for each in running)
    assert outcome(whole) == expected
    assert outcome(half) == ("error", [], [])
    assert "PeerLostError" in engines.half.output()
    engines.producer.close()
    engines.producer = engines.start_producer()
    params = engines.encode(5, item="image 5")
    assert outcome(run(engines.half, 5, item="image 5", params=params)) == expected


def test_encoder_prefill_and_decode_in_three_engines(engines: Engines) -> None:
    """Both connectors in the one that prefills."""
    prefill, decode = engines.start_prefill(), engines.start_decode()
    params = engines.encode(8, item="image 8")
    computed = run(prefill, 8, item="image 8", params=params, kv=SEND, tokens=1)
    got = run(decode, 8, item="image 8", kv=computed["params"])
    assert (got["reason"], got["tokens"]) == ("length", local(engines, 8)["tokens"])
    assert got["cached"] == len(TOKENS) + 8  # all positions; the image has 8
    for engine in (prefill, decode):
        engine.close()


def test_two_ranks_on_either_side(engines: Engines) -> None:
    """One of the producer's sends; the consumer's scheduler loads once, for both."""
    expected = local(engines, 6)
    engines.producer.close()
    engines.half.close()
    engines.producer, engines.half = engines.start_producer(ranks=2), engines.start_half(ranks=2)
    params = engines.encode(6, item="image 6")
    got = run(engines.half, 6, item="image 6", params=params)
    assert (got["reason"], got["tokens"]) == ("length", expected["tokens"])
