"""Heads on several ranks: one process's results but for rounding, from parts of weights and KV.

The ranks are processes connected by gloo; those of all stages are started once.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import KVLink
from omni_kvlink.engine import OmniARConfig, OmniDiffusionConfig, OmniDiffusionRequest
from omni_kvlink.engine.config import DiffusionParallelConfig, KVConfig
from omni_kvlink.engine.errors import RequestAborted, RequestFailed
from omni_kvlink.engine.lora.request import LoRARequest
from omni_kvlink.engine.models.bagel_pipeline import denoise_params
from omni_kvlink.engine.models.bagel_text import readable
from omni_kvlink.engine.outputs import ARSchedulerOutput
from omni_kvlink.engine.worker import GPUDiffusionWorker
from omni_kvlink.engine.worker.offload import weights_nbytes
from omni_kvlink.errors import TransferFailed
from support.engine.ar_stage import on_finish
from support.engine.fixtures import WAIT, bundle, checkpoint, params, pipeline
from support.engine.lora_adapters import bagel_adapter
from support.engine.parallel_ranks import (
    EDIT,
    RankProcesses,
    Stage,
    digests,
    disable_cache,
    enable_cache,
    execute,
    generate,
    receive,
    received,
    requests,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TWO = DiffusionParallelConfig(tensor_parallel_size=2)
ONWARD = ("shm://onward-0", "shm://onward-1")
ONE = DiffusionParallelConfig()
ROUNDING = {"float32": 1e-5, "bfloat16": 0.05}
"""Of a latent's largest value."""


def dit_config(
    directory: str, pair: str, urls: tuple[str, ...], **fields: Any
) -> OmniDiffusionConfig:
    how: dict[str, Any] = {"source_options": {"directory": directory}, "timeout": WAIT}
    return OmniDiffusionConfig(
        checkpoint(),
        dtype="float32",
        num_threads=1,
        distributed_init_method=f"file://{directory}/dit-{pair}",
        kv=KVConfig(sources=urls, **how),
        **fields,
    )


@dataclass
class Pair:
    """An AR stage of two ranks that thinks, and the diffusion stage that it feeds."""

    ar: RankProcesses
    dit: Any

    @classmethod
    def start(cls, directory: str, receivers: DiffusionParallelConfig) -> Pair:
        name = str(receivers.world_size)
        urls = tuple(f"shm://heads-{name}-{rank}" for rank in (0, 1))
        ar = OmniARConfig(
            checkpoint(),
            dtype="float32",
            num_threads=1,
            num_blocks=200,
            block_size=4,
            think=True,
            parallel_config=TWO,
            distributed_init_method=f"file://{directory}/ar-{name}",
            kv=KVConfig(sinks=urls, sink_options={"directory": directory}, receivers=receivers),
        )
        dit = dit_config(directory, name, urls, parallel_config=receivers)
        return cls(RankProcesses(ar), RankProcesses(dit) if receivers is TWO else dit)


@pytest.fixture(scope="module")
def stages() -> Iterator[dict[str, Any]]:
    directory, threads = tempfile.mkdtemp(prefix="kvl-"), torch.get_num_threads()
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory)
        stack.callback(torch.set_num_threads, threads)
        made: dict[str, Any] = {
            "float32": Stage(directory, sink_urls=ONWARD, tensor_parallel_size=2),
            "bfloat16": Stage(directory, "bfloat16", tensor_parallel_size=2),
            "2 to 2": Pair.start(directory, TWO),
            "2 to 1": Pair.start(directory, ONE),
        }
        for name in ("float32", "bfloat16"):
            stack.callback(made[name].close)
            made[name].ranks.wait_ready()
        for name in ("2 to 2", "2 to 1"):
            stack.callback(made[name].ar.close)
            made[name].ar.wait_ready()
        stack.callback(made["2 to 2"].dit.close)
        made["2 to 2"].dit.wait_ready()
        single = made["single"] = GPUDiffusionWorker(0, 0, made["2 to 1"].dit)
        stack.callback(single.shutdown)
        single.init_device()
        yield made


# ---- the diffusion stage


def reference(dtype: torch.dtype, names: str, **fields: Any) -> list[torch.Tensor]:
    """The latents of one process, which reads the prompts itself."""
    model, found = pipeline(dtype), []
    for one in requests(*names, **fields):
        generator = torch.Generator().manual_seed(one.sampling_params.seed or 0)
        height, width = one.sampling_params.height, one.sampling_params.width
        shape = None if height is None or width is None else (height, width)
        contexts = model.prefill(readable(one.prompt), image_shape=shape, generator=generator)
        noise = model.initial_noise(contexts.image_shape, generator)
        found.append(model.denoise(contexts, noise, denoise_params(one.sampling_params)))
    return found


@pytest.mark.parametrize(
    ("dtype", "edit", "names"),
    [
        ("float32", False, "a"),
        ("float32", True, "abc"),
        ("bfloat16", False, "abc"),
        ("bfloat16", True, "a"),
    ],
)
def test_latents_are_those_of_one_process_but_for_rounding(
    stages: dict[str, Any], dtype: str, edit: bool, names: str
) -> None:
    stage = stages[dtype]
    stage.send(*requests(*names, edit=edit))
    (images, ours), (others, theirs) = stage.ranks.call_all(generate, *requests(*names, edit=edit))
    assert digests(ours) == digests(theirs)
    assert [one.dtype for one in images] == [torch.uint8] * len(names)
    assert others == [None] * len(names)
    for mine, right in zip(ours, reference(stage.dtype, names, edit=edit), strict=True):
        off = float((mine - right).abs().max() / right.abs().max())
        assert off < ROUNDING[dtype]


def test_ranks_reuse_the_same_steps(stages: dict[str, Any]) -> None:
    """A rank that skips a pass skips its sums, so all ranks must skip the same ones."""
    stage, batch = stages["float32"], requests("x", "y", num_inference_steps=12)
    stage.send(*batch)
    stage.ranks.call_all(enable_cache, "block_cache", {"residual_diff_threshold": 0.9})
    (_, ours), (_, theirs) = stage.ranks.call_all(generate, *batch)
    saved, others = stage.ranks.call_all(disable_cache)
    assert digests(ours) == digests(theirs)
    assert saved == others
    assert saved["gen"] > 0


def contents(worker: Any, batch: OmniDiffusionRequest) -> Any:
    """Each branch of a KV that this rank has received."""
    assert receive(worker, batch) == ["ready"]
    try:
        return received(worker, batch.request_id)
    finally:
        worker.runner.kv_manager.free(batch)


def test_a_rank_receives_its_heads_alone(stages: dict[str, Any]) -> None:
    stage, (batch,) = stages["float32"], requests("kv", edit=True)
    stage.send(batch)
    whole: Any = bundle("kv", batch.prompt)
    for rank, found in enumerate(stage.ranks.call_all(contents, batch)):
        assert list(found) == list(whole)
        for name, (metadata, bits) in found.items():
            assert bits == digests(one[:, rank : rank + 1] for one in whole[name].tensors())
            assert metadata.shard.heads == (rank, rank + 1)


def test_each_rank_sends_its_heads(stages: dict[str, Any]) -> None:
    stage, (batch,) = stages["float32"], requests("on", edit=True, need_kv_transfer=True)
    stage.send(batch)
    stage.ranks.call_all(generate, batch)
    whole: Any = bundle("on", batch.prompt)
    where = stage.config.kv.source_options
    for rank, url in enumerate(ONWARD):
        with KVLink.connect(url, timeout=WAIT, **where) as link:
            key = f"on/rank{rank}of2:{rank}-{rank + 1}"
            with link.get(key, timeout=WAIT) as data:
                found: Any = data
                for name in whole:
                    mine = [one[:, rank : rank + 1] for one in whole[name].tensors()]
                    assert digests(found[name].tensors()) == digests(mine)
                assert found["gen"].metadata.extra == whole["gen"].metadata.extra


def set_heads(worker: Any, here: tuple[int, int]) -> None:
    """Let this rank compute with other heads, as many as its own."""
    worker.runner.pipeline.model.kv_heads = range(*here)


def test_other_heads_of_the_same_shape_are_refused(stages: dict[str, Any]) -> None:
    stage, (batch,) = stages["float32"], requests("swapped")
    stage.send(batch)
    stage.ranks.call_all(receive, batch)
    stage.ranks.call(1, set_heads, (0, 1))
    for ((_, error),) in stage.ranks.call_all(execute, batch):
        assert "has heads 1…2 in gen, this rank computes with 0…1" in str(error)
    stage.ranks.call(1, set_heads, (1, 2))


def weights(worker: Any) -> tuple[int, dict[str, str]]:
    """Bytes of all, and digests of the language model's."""
    modules = worker.runner.utility.modules()
    own = modules["model"].language_model.state_dict()
    return weights_nbytes(modules), {name: digests([one])[0] for name, one in own.items()}


def sleep(worker: Any, level: int) -> int:
    assert worker.sleep(level)
    asleep: int = weights(worker)[0]
    assert worker.wake_up()
    return asleep


def test_a_rank_holds_a_share_of_the_weights_and_wakes_up_with_it(stages: dict[str, Any]) -> None:
    whole = pipeline().model.language_model.state_dict()
    before = stages["float32"].ranks.call_all(weights)
    for rank, (_, found) in enumerate(before):
        for name, right in whole.items():
            half = slice(rank * right.shape[-1] // 2, (rank + 1) * right.shape[-1] // 2)
            part = right
            if any(word in name for word in ("q_proj", "k_proj", "v_proj", "gate", "up_proj")):
                part = right.chunk(2)[rank]
            elif any(word in name for word in ("o_proj", "down_proj")):
                part = right[:, half]
            if name in found:  # a diffusion stage has no text head
                assert found[name] == digests([part])[0], name
    for level in (1, 2):
        assert max(stages["float32"].ranks.call_all(sleep, level)) < 0.1 * before[0][0]
        assert stages["float32"].ranks.call_all(weights) == before


# ---- the AR stage


def run_prompts(worker: Any, *batch: OmniDiffusionRequest) -> list[Any]:
    """Read prompts and send their KV on: text, error, what was sent, and digests of it."""
    runner, start, sent = worker.runner, 0, dict[str, Any]()
    tables: dict[str, dict[str, list[int]]] = {}
    for one in batch:
        tables[one.request_id] = {}
        for name, tokens in worker.count_tokens(one).items():
            stop = start + -(-tokens // runner.pools.block_size)
            tables[one.request_id][name] = list(range(start, stop))
            start = stop

    def recorded(stream: Any, finish: Any) -> Any:
        # What is sent, before the link has it: another process receives it.
        data = stream._payload
        sent[data.request_id] = {
            name: digests(one.dense() for one in data[name].tensors()) for name in data
        }
        return finish()

    on_finish(runner, recorded)
    results = dict[str, Any]()
    step = ARSchedulerOutput(list(batch), block_ids=tables)
    while step.request_ids:
        results |= worker.execute_model(step).results
        going_on = [one.request_id for one in batch if one.request_id not in results]
        step = ARSchedulerOutput([], cached_request_ids=going_on)
    found = [results[one.request_id] for one in batch]
    return [(one.text, one.error, one.kv_sent, sent.get(one.request_id)) for one in found]


def thinking_requests(*names: str, **fields: Any) -> list[OmniDiffusionRequest]:
    how = {"max_tokens": 12, "temperature": 0.8, "need_kv_transfer": True, **fields}
    return requests(*names, **how)


def test_two_ranks_to_two(stages: dict[str, Any]) -> None:
    """All ranks generate the same text; each sends its heads to the rank with the same heads."""
    pair, names = stages["2 to 2"], ("t", "u")
    first, second = pair.ar.call_all(run_prompts, *thinking_requests(*names))
    assert [text for text, *_ in first] == [text for text, *_ in second]
    assert len({text for text, *_ in first}) == 2
    batch = requests(*names, kv_nbytes=max(sent.nbytes for _, _, sent, _ in first))
    assert pair.dit.call_all(receive, *batch) == [["ready", "ready"]] * 2
    for rank, mine in enumerate((first, second)):
        for name, (_, error, sent, bits) in zip(names, mine, strict=True):
            assert error is None
            assert sent.tokens > 12
            got = pair.dit.call(rank, received, name)
            assert {branch: found for branch, (_, found) in got.items()} == bits
    (images, *_), _ = (list(zip(*one, strict=True)) for one in pair.dit.call_all(execute, *batch))
    assert all(image.shape == (1, 16, 24, 3) for image in images)


def test_two_ranks_to_one(stages: dict[str, Any]) -> None:
    """One rank receives the heads of both."""
    pair, single = stages["2 to 1"], stages["single"]
    found = pair.ar.call_all(run_prompts, *thinking_requests("m", edit=True))
    sent = found[0][0][2]
    (batch,) = requests("m", edit=True, kv_nbytes=sent.nbytes)
    assert receive(single, batch) == ["ready"]
    assert single.runner.kv_manager.stats()["charged"] <= sent.nbytes + 64
    data = single.runner.kv_manager.get_kv_cache("m")
    for rank, ((_, _, _, bits),) in enumerate(found):
        for name in data:
            mine = digests(one[:, rank : rank + 1] for one in data[name].tensors())
            assert mine == bits[name], name
    del data
    ((image, error),) = execute(single, batch)
    assert error is None
    assert image.shape == (1, 64, 48, 3)


def test_keys_and_values_are_those_of_one_process_but_for_rounding(stages: dict[str, Any]) -> None:
    pair, single = stages["2 to 1"], stages["single"]
    ((text, *_),), _ = pair.ar.call_all(run_prompts, *thinking_requests("k", temperature=0.0))
    (batch,) = requests("k")
    assert receive(single, batch) == ["ready"]
    got = single.runner.kv_manager.get_kv_cache("k")
    model = pipeline()
    prompt: Any = batch.prompt
    right: Any = model.prefill(prompt, think=True, max_think_tokens=12, image_shape=(16, 24))
    assert text == right.text
    for layer, (key, value_) in enumerate(zip(*got["gen"].layer_blocks.values(), strict=True)):
        for ours, theirs in (
            (key, right.gen.past_key_values.key_cache[layer]),
            (value_, right.gen.past_key_values.value_cache[layer]),
        ):
            assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-5
    del got, key, value_, ours
    single.runner.kv_manager.free(batch)


def fail_send(worker: Any, name: str) -> None:
    """Let this rank's link fail to send one request."""
    sink = worker.runner.kv_sink
    put, stream_put = sink.link.put, sink.link.stream_put

    def full(send: Any, payload: Any, **options: Any) -> Any:
        if payload.request_id.startswith(name):
            raise MemoryError("no memory")
        return send(payload, **options)

    sink.link.put, sink.link.stream_put = partial(full, put), partial(full, stream_put)


def abort_during_prefill(worker: Any, name: str) -> None:
    """Abort a request on this rank while it runs the prompt."""
    utility = worker.runner.utility

    def prefill_steps(request: Any, *args: Any) -> Any:
        if request.request_id == name:
            worker.abort(name)
        return (yield from type(utility).prefill_steps(utility, request, *args))

    utility.prefill_steps = prefill_steps


@pytest.mark.parametrize(
    ("fault", "kind"), [(fail_send, RequestFailed), (abort_during_prefill, RequestAborted)]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_kv_that_one_rank_cannot_send_is_sent_by_no_rank(
    stages: dict[str, Any], fault: Any, kind: type[Exception], rank: int
) -> None:
    pair, bad = stages["2 to 2"], f"bad-{fault.__name__}-{rank}"
    pair.ar.call(rank, fault, bad)
    good = f"good-{bad}"
    for (_, error, _, _), (_, none, sent, _) in pair.ar.call_all(
        run_prompts, *thinking_requests(bad, good)
    ):
        assert type(error) is kind
        assert none is None
        assert sent is not None
    batch = requests(bad, good)
    assert pair.dit.call_all(receive, *batch) == [["failed", "ready"]] * 2
    for (image, failed), (_, none) in pair.dit.call_all(execute, *batch):
        assert image is None
        assert isinstance(failed, TransferFailed)
        assert none is None


def pool_shape(worker: Any) -> list[int]:
    return list(worker.runner.pools.keys[0].shape)


def test_blocks_have_a_ranks_own_heads(stages: dict[str, Any]) -> None:
    assert stages["2 to 2"].ar.call_all(pool_shape) == [[200, 4, 1, 16]] * 2


def test_a_prompt_that_all_ranks_refuse_is_its_own_error(stages: dict[str, Any]) -> None:
    pair = stages["2 to 2"]
    photo: Any = EDIT[0]
    bad = OmniDiffusionRequest([photo[:, :, :2]], params(), "no image", need_kv_transfer=True)
    for ((_, error, _, _),) in pair.ar.call_all(fail, bad):
        assert error is not None
    for ((text, error, _, _),) in pair.ar.call_all(run_prompts, *thinking_requests("after")):
        assert error is None
        assert text


def fail(worker: Any, batch: OmniDiffusionRequest) -> Any:
    tables = {batch.request_id: {"gen": [0], "cfg_img": [1]}}
    found = worker.execute_model(ARSchedulerOutput([batch], block_ids=tables))
    return [(None, found.result_of(batch.request_id).error, None, None)]


def test_an_adapter_that_one_rank_cannot_read_is_an_error_on_all(
    stages: dict[str, Any], tmp_path: Path
) -> None:
    """Of its request alone, in both kinds of stage: no rank waits for another one."""
    pair, lora = stages["2 to 2"], bagel_adapter(tmp_path)
    bad = OmniDiffusionRequest("a fox", params(lora_request=lora), "bad", need_kv_transfer=True)
    for ((_, error, _, _),) in pair.ar.call_all(without_files_on_rank_1, fail, bad):
        assert "nowhere: adapter_config.json cannot be read" in str(error)
    good = thinking_requests("next", lora_request=lora)
    for ((_, error, _, _),) in pair.ar.call_all(run_prompts, *good):
        assert error is None
    (one,) = requests("next", lora_request=lora)
    assert pair.dit.call_all(receive, one) == [["ready"]] * 2
    for ((_, error),) in pair.dit.call_all(without_files_on_rank_1, execute, one):
        assert "adapter_config.json cannot be read" in str(error)


def without_files_on_rank_1(worker: Any, call: Any, one: OmniDiffusionRequest) -> Any:
    if worker.rank == 1:
        lora = LoRARequest("style", 1, "nowhere")
        one.sampling_params.lora_request = lora
    return call(worker, one)
