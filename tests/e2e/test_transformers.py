"""Prefill here, decode in another process: every logit of 32 steps is that of one process."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from omni_kvlink import KVCacheBundle, KVLink, KVProducer
from omni_kvlink.adapters import DynamicCacheAdapter, make_cache
from omni_kvlink.payload.views import same_bytes
from support import FOLDER
from support.engine.fixtures import until

pytest.importorskip("transformers", reason="transformers is not installed: make test-hf")

from support.e2e.hf_models import KINDS, WINDOW, Case, decode, forward

if TYPE_CHECKING:
    from collections.abc import Iterator

_numbers = itertools.count()
CASES = [
    Case(kind, dtype, attention)
    for kind in KINDS
    for dtype in ("float32", "bfloat16")
    for attention in ("sdpa", "eager")
]


@dataclasses.dataclass
class Stages:
    """Prefill (here), the link, and the process that decodes."""

    link: KVProducer
    process: subprocess.Popen[str]
    root: Path

    def decode(self, case: Case, key: str) -> torch.Tensor:
        """The other process's logits."""
        out = self.root / f"{key}.safetensors"
        job = {"case": dataclasses.asdict(case), "key": key, "out": str(out)}
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "decoded\n"
        return load_file(out)["logits"]


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("hf")
    script, sockets = str(FOLDER / "e2e" / "decode_process.py"), str(root / "sockets")
    with KVLink.serve("shm://hf", directory=sockets) as link:
        command = [sys.executable, script, link.url, sockets]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
            yield Stages(link, process, root)
            until(lambda: link.stats()["memory"]["used"] == 0)  # the first step releases everything
    assert process.returncode == 0
    torch.set_num_threads(threads)


def model_of(case: Case) -> Any:
    try:
        return case.make()
    except ValueError as error:
        pytest.skip(str(error)[:80])


def prefill(model: Any, mask: torch.Tensor) -> tuple[Any, torch.Tensor, list[int]]:
    """A cache, the first token, and the next position of each sequence."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 128, tuple(mask.shape), generator=generator)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = make_cache(model.config)
    _, token = forward(model, cache, tokens, positions, mask)
    return cache, token, (positions[:, -1] + 1).tolist()


def left_padded(lengths: list[int]) -> torch.Tensor:
    longest = max(lengths)
    return torch.tensor([[0] * (longest - n) + [1] * n for n in lengths])


@pytest.mark.parametrize("lengths", [[9], [40], [40, 33, 21]], ids=["short", "long", "batch"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(dataclasses.astuple(case)))
def test_two_processes_equal_one(stages: Stages, case: Case, lengths: list[int]) -> None:
    model, mask = model_of(case), left_padded(lengths)
    cache, token, ropes = prefill(model, mask)
    key = f"r{next(_numbers)}"
    extra = {"token": token.tolist(), "attention_mask": mask.tolist()}
    payload = DynamicCacheAdapter().pack(cache, request_id=key, ropes=ropes, extra=extra)
    receipt = stages.link.put(payload)
    assert receipt.ledger.copies == 1
    there = stages.decode(case, key)
    receipt.wait(timeout=10.0)
    here = decode(model, cache, token, ropes, mask)
    assert len(torch.unique(here, dim=0)) > 1  # it is no constant that is compared
    assert same_bytes(there, here)


def test_hybrid_layers_travel_by_their_kinds() -> None:
    """What the cases above rest on: sliding layers were cut, and full ones were not."""
    cache, _, _ = prefill(model_of(Case("gemma2", "float32", "eager")), left_padded([40]))
    payload = DynamicCacheAdapter().pack(cache, request_id="r")
    assert isinstance(payload, KVCacheBundle)
    kept = {name: payload[name].metadata.seq_len for name in payload}
    assert kept == {"layers_0": WINDOW - 1, "layers_1": 40}
    assert payload["layers_0"].metadata.ropes == (40,)


def test_a_wrong_length_is_seen() -> None:
    """The comparison can fail: a window restored without what it has seen gives other logits."""
    model, mask = model_of(Case("mistral", "float32", "eager")), left_padded([40])
    cache, token, ropes = prefill(model, mask)
    if not hasattr(cache, "layers"):
        pytest.skip("this transformers keeps all tokens")
    wrong = make_cache(model.config)
    for index, layer in enumerate(cache.layers):
        wrong.update(layer.keys, layer.values, index)
    logits = decode(model, wrong, token, ropes, mask)
    assert not same_bytes(logits, decode(model, cache, token, ropes, mask))
