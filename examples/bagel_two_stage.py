"""BAGEL in two processes: the AR stage reads the prompt, the DiT stage generates the image.

One KV bundle is sent between them. The AR stage answers a question about an image, too, and the DiT
stage writes a strip of previews for each image. At the end every byte of K and V, and every pixel,
is compared with a run in a single process; the exit status says whether all of it is equal.

    python examples/bagel_two_stage.py                      # tiny random weights, shared memory
    python examples/bagel_two_stage.py --checkpoint DIR     # published weights
    python examples/bagel_two_stage.py --in-place           # prefill in the link's memory: 0 copies
    python examples/bagel_two_stage.py --stream             # sent and received layer by layer
    python examples/bagel_two_stage.py --url zmq+tcp://127.0.0.1:0 --keys keys  # encrypted
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from bagel_director import (
    Request,
    Stages,
    answer_path,
    bundle_path,
    conclude,
    image_path,
    orders,
    preview_path,
    report,
    verdict,
)
from PIL import Image

from omni_kvlink import (
    KVCacheBundle,
    KVCacheTransferData,
    KVLink,
    KVLinkError,
    KVProducer,
    Receipt,
    Received,
    ReceivedStream,
    SchemaError,
    TensorTransferData,
)
from omni_kvlink.adapters import BagelAdapter, pack_generator, unpack_generator
from omni_kvlink.models.bagel import (
    BagelContext,
    BagelContexts,
    BagelPipeline,
    DenoiseParams,
    InPlaceCache,
    NaiveCache,
    TextOutput,
    decode_preview,
    make_tiny_checkpoint,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MAX_ANSWER = 24  # tokens
WARM_UP = "warm-up"
PREVIEWS = 6  # in a strip, at most


# The two stages. Each is a process of its own.


def run_ar(args: argparse.Namespace) -> None:
    """Read prompts, and send their caches."""
    pipeline = load(args, "ar")
    end, requests = orders()
    with KVLink.serve(**end) as link:
        report("serving", url=link.url)
        warm_up(args, link)
        receipts, refused = [], []
        for request in requests:
            try:
                receipts.append(send(args, link, pipeline, request))
            except SchemaError as error:  # noqa: PERF203 - such as: over capacity
                link.fail(request.request_id, str(error))  # or its reader would wait for it
                refused.append(f"{request.request_id}: {error}")
        for request in requests:
            if request.question:
                answer(args, pipeline, request)
        for receipt in receipts:
            receipt.wait(timeout=args.timeout)
    if refused:
        sys.exit("\n".join(refused))


def warm_up(args: argparse.Namespace, link: KVProducer) -> None:
    """Send a payload before the requests: a link maps its memory at its first use."""
    receipt = link.put(
        TensorTransferData(WARM_UP, {"rows": torch.zeros(5, 1024)}), timeout=args.timeout
    )
    receipt.wait(timeout=args.timeout)
    report("warmed up", ledger=receipt.ledger.to_dict())


def send(
    args: argparse.Namespace, link: KVProducer, pipeline: BagelPipeline, request: Request
) -> Receipt:
    start = time.perf_counter()
    generator = torch.Generator().manual_seed(request.seed)
    caches = allocate(args, link, pipeline, request, generator) if args.in_place else {}
    bundle = prefill(pipeline, request, generator, caches)
    prefilled = time.perf_counter()
    if args.stream:
        receipt = stream(link, bundle)
    else:
        receipt = link.put(bundle, direct=args.direct, timeout=args.timeout)
    report(
        "put",
        request=request.request_id,
        prefill_ms=1e3 * (prefilled - start),
        tokens={name: bundle[name].metadata.seq_len for name in bundle},
        ledger=receipt.ledger.to_dict(),
    )
    # In place, the memory is free when its last tensor is gone: those that the pipeline caches,
    # and those of this function.
    pipeline.release_caches()
    return receipt


def answer(args: argparse.Namespace, pipeline: BagelPipeline, request: Request) -> None:
    """Image to text: no KV is sent for it."""
    start = time.perf_counter()
    found = write(pipeline, request)
    Path(answer_path(args, request)).write_text(json.dumps(found.token_ids))
    report(
        "answered",
        request=request.request_id,
        question=request.question,
        text=found.text,
        token_ids=found.token_ids,
        answer_ms=1e3 * (time.perf_counter() - start),
    )


def write(pipeline: BagelPipeline, request: Request) -> TextOutput:
    inputs: list[Any] = [Image.open(request.image), request.question]
    contexts = pipeline.prefill(inputs, understanding=True)
    pipeline.release_caches()
    return pipeline.generate_text_output(contexts.gen, max_length=MAX_ANSWER)


def allocate(
    args: argparse.Namespace,
    link: KVProducer,
    pipeline: BagelPipeline,
    request: Request,
    generator: torch.Generator,
) -> dict[str, InPlaceCache]:
    """Empty caches in the link's memory, before it is known how many tokens there will be."""
    capacities = {"gen": args.capacity}
    if request.image:  # without one, cfg_img is the same as gen
        capacities["cfg_img"] = len(pipeline.encode_prompt(request.prompt))
    llm, layers = pipeline.config.llm, pipeline.num_layers
    row = (llm.num_key_value_heads, llm.head_dim)
    blank = partial(KVCacheTransferData.blank, request.request_id, row=row, dtype=pipeline.dtype)
    # The header needs memory, too: for the same metadata as later, with a generator's state.
    common = {"num_layers": layers, "extra": extra(request, generator)}
    plan = {
        name: blank(metadata={"kv_lens": [tokens], "ropes": [tokens], **common})
        for name, tokens in capacities.items()
    }
    data = link.allocate(KVCacheBundle(request.request_id, plan), timeout=args.timeout).data
    assert isinstance(data, KVCacheBundle)
    blocks: dict[str, Any] = {name: data[name].layer_blocks for name in capacities}
    return {name: InPlaceCache(**layers) for name, layers in blocks.items()}


def stream(link: KVProducer, bundle: KVCacheBundle) -> Receipt:
    """Send layer by layer; what a branch shares with `gen` is a reference, and not sent."""
    with link.stream_put(bundle) as out:
        for name, branch in bundle.branches.items():
            if isinstance(branch, KVCacheTransferData) and not branch.is_empty:
                caches = branch.layer_blocks.values()
                for layer, (key, value) in enumerate(zip(*caches, strict=True)):
                    out.write_layer(layer, key, value, branch=name)
    assert out.receipt
    return out.receipt


def run_dit(args: argparse.Namespace) -> None:
    """Receive caches and generate images; the cache stays in the link's memory."""
    pipeline = load(args, "dit")
    end, requests = orders()  # not before the AR stage serves
    with KVLink.connect(**end, timeout=args.timeout) as link:
        link.get(WARM_UP, timeout=args.timeout).release()
        for request in requests:
            received: Received | ReceivedStream
            if args.stream:
                received = link.stream_get(request.request_id, timeout=args.timeout)
            else:
                received = link.get(request.request_id, timeout=args.timeout, verify="full")
            with received as data:
                # Each denoising step reads every layer, so nothing can start before the last one.
                bundle = data.wait() if isinstance(data, ReceivedStream) else data
                assert isinstance(bundle, KVCacheBundle)
                start = time.perf_counter()
                contexts, generator, params = unpack(bundle)
                strip = Previews(pipeline, contexts, params.num_steps)
                pipeline.hooks.on_clean = strip.on_clean
                image = pipeline.render(
                    contexts,
                    params,
                    generator=generator,
                    on_step=lambda done, total: report("step", done=done, total=total),
                )
                seconds = time.perf_counter() - start
                Image.fromarray(image.numpy()).save(image_path(args, request))
                strip.save(preview_path(args, request))
                bundle.save(bundle_path(args, request))  # kept for the verdict
            del contexts, bundle, data, strip
            pipeline.hooks.on_clean = None
            pipeline.release_caches()  # the last views are gone: the memory is released
            report(
                "generated",
                request=request.request_id,
                render_ms=1e3 * seconds,
                previews=preview_path(args, request),
                layers=len(received) if isinstance(received, ReceivedStream) else 0,
                ledger=received.ledger.to_dict(),
            )


class Previews:
    """What the image would be after some of the denoising steps, the last one included."""

    def __init__(self, pipeline: BagelPipeline, contexts: BagelContexts, steps: int):
        assert contexts.image_shape
        self._pipeline, self._shape, self._steps = pipeline, contexts.image_shape, steps
        self._images: list[torch.Tensor] = []

    def on_clean(self, done: int, rows: list[torch.Tensor]) -> None:
        """Called by the pipeline after each step."""
        every = -(-self._steps // PREVIEWS)
        if (self._steps - done) % every == 0:
            self._images.append(decode_preview(self._pipeline, rows[0], self._shape))

    def save(self, path: str) -> None:
        """Write them side by side."""
        Image.fromarray(torch.cat(self._images, dim=1).numpy()).save(path)


def prefill(
    pipeline: BagelPipeline,
    request: Request,
    generator: torch.Generator,
    caches: Mapping[str, NaiveCache] | None = None,
) -> KVCacheBundle:
    """The AR half, with all that the DiT half needs to generate the same image."""
    contexts = pipeline.prefill(request.inputs(), generator=generator, caches=caches)
    return BagelAdapter().export_contexts(
        {name: getattr(contexts, name) for name in ("gen", "cfg_text", "cfg_img")},
        request_id=request.request_id,
        image_shape=contexts.image_shape,
        extra=extra(request, generator),
    )


def extra(request: Request, generator: torch.Generator) -> dict[str, Any]:
    return {
        "params": {**dataclasses.asdict(request.params()), "cfg_interval": None},
        "cfg_interval": list(request.params().cfg_interval),
        "generator": pack_generator(generator),
    }


def unpack(bundle: KVCacheBundle) -> tuple[BagelContexts, torch.Generator, DenoiseParams]:
    """The bundle in the pipeline's form, its tensors still in the link's memory."""
    loaded = BagelAdapter().load_contexts(bundle, NaiveCache)
    metadata = bundle["gen"].metadata
    contexts = BagelContexts(
        gen=BagelContext(**loaded["gen"]),
        cfg_text=BagelContext(**loaded["cfg_text"]),
        cfg_img=BagelContext(**loaded["cfg_img"]),
        image_shape=metadata.image_shape,
    )
    params = {**metadata.extra["params"], "cfg_interval": tuple(metadata.extra["cfg_interval"])}
    return contexts, unpack_generator(metadata.extra["generator"]), DenoiseParams(**params)


# The same in one process, and the comparison.


def main() -> int:
    args = parse_arguments()
    # Two stages share the cores; and the same number everywhere, for the same sums.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    if args.stage:
        {"ar": run_ar, "dit": run_dit}[args.stage](args)
        return 0
    Path(args.out).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        args.scratch, args.is_random = scratch, not args.checkpoint
        args.checkpoint = args.checkpoint or str(make_tiny_checkpoint(Path(scratch) / "tiny"))
        try:
            return direct(args)
        except KVLinkError as error:
            sys.exit(str(error))


def direct(args: argparse.Namespace) -> int:
    weights = "random tiny weights" if args.is_random else args.checkpoint
    print(f"BAGEL from {weights}, {args.dtype}, two processes over {args.url}")
    if args.is_random:
        print("Pictures are noise and answers are meaningless: what counts is that two processes")
        print("compute the same as one.")
    print()
    alone = SingleProcess(args)
    with Stages(args) as stages, ThreadPoolExecutor(1) as beside:
        image_request = Request("text-to-image", "a red fox in the snow, at dawn", steps=args.steps)
        picture, question = alone.run(image_request), "what is in the image?"
        edit = Request("image-edit", "make it night", picture, question, steps=args.steps)
        reference, requests = beside.submit(alone.run, edit), [image_request, edit]
        failed = stages.run(requests)
        reference.result()
    for stage, status in failed.items():
        print(f"the {stage} stage failed with status {status}; no verdict")
    if failed:
        return 1
    verdicts = [
        verdict(args, one, alone.bundles[one.request_id], alone.answers.get(one.request_id, []))
        for one in requests
    ]
    conclude(all(verdicts), len(requests))
    return 0 if all(verdicts) else 1


class SingleProcess:
    """The same requests without a link: the reference."""

    def __init__(self, args: argparse.Namespace):
        self._args, self._pipeline = args, load(args, "all")
        self.bundles: dict[str, KVCacheBundle] = {}
        self.answers: dict[str, list[int]] = {}

    def run(self, request: Request) -> str:
        """Generate the image; returns its file."""
        generator = torch.Generator().manual_seed(request.seed)
        self.bundles[request.request_id] = prefill(self._pipeline, request, generator)
        generator = torch.Generator().manual_seed(request.seed)
        image = self._pipeline.generate(request.inputs(), request.params(), generator=generator)
        path = str(Path(self._args.scratch) / f"{request.request_id}.png")
        Image.fromarray(image.numpy()).save(path)
        if request.question:
            self.answers[request.request_id] = write(self._pipeline, request).token_ids
        return path


def load(args: argparse.Namespace, stage: Any) -> BagelPipeline:
    return BagelPipeline.from_pretrained(args.checkpoint, dtype=DTYPES[args.dtype], stage=stage)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--checkpoint", default="", help="a BAGEL checkpoint; tiny and random if none"
    )
    parser.add_argument(
        "--url", "--connector", default="shm://bagel-demo", help="the link's URL", metavar="URL"
    )
    parser.add_argument(
        "--keys",
        default="",
        help="encrypt, by the pairs producer and consumer of this directory; made if missing",
    )
    parser.add_argument("--prefix-ar", default="", help="command to start the AR stage by")
    parser.add_argument("--prefix-dit", default="", help="... as in 'ip netns exec NAME'")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES))
    parser.add_argument("--steps", default=24, type=int, help="denoising timesteps")
    parser.add_argument("--out", default="out", help="where the images and caches go")
    parser.add_argument("--timeout", default=60.0, type=float, help="seconds for each wait")
    parser.add_argument("--in-place", action="store_true", help="prefill in the link's memory")
    parser.add_argument(
        "--capacity",
        default=512,
        type=int,
        help="capacity in tokens, in place; an edit with published weights needs about 9000",
    )
    parser.add_argument("--stream", action="store_true", help="send and receive layer by layer")
    parser.add_argument("--direct", action="store_true", help="put without a copy (zmq, ucx)")
    parser.add_argument("--stage", default="", choices=["", "ar", "dit"], help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
