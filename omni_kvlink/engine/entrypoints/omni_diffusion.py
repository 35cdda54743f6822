"""`OmniDiffusion`: generates images and texts for prompts, over all stages of a deployment."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from omni_kvlink.engine.config import OmniDiffusionConfig
from omni_kvlink.engine.core.stage_engine import DiffusionEngine
from omni_kvlink.engine.entrypoints.deploy import DeployConfig
from omni_kvlink.engine.entrypoints.stage_configs import (
    environment,
    is_remote,
    stage_configs,
    with_sources,
)
from omni_kvlink.engine.entrypoints.streams import (
    RequestStream,
    StreamEvent,
    StreamTable,
    events_of,
    wait_for_output,
)
from omni_kvlink.engine.errors import EngineError
from omni_kvlink.engine.inputs.prompt import read_prompt
from omni_kvlink.engine.models.images import as_tensors, from_tensor
from omni_kvlink.engine.outputs import DiffusionOutput
from omni_kvlink.engine.ray.stage_actor import StageActor
from omni_kvlink.engine.request import OmniDiffusionRequest
from omni_kvlink.engine.sampling import OmniDiffusionSamplingParams
from omni_kvlink.engine.stage.remote_stage import RemoteStage, StageProcess
from omni_kvlink.engine.tokens.outputs import TextResult
from omni_kvlink.errors import KVLinkError, SchemaError, TransferTimeout, format_seconds

if TYPE_CHECKING:
    from omni_kvlink.engine.lora.request import LoRARequest

Stage: TypeAlias = RemoteStage | DiffusionEngine
Params: TypeAlias = OmniDiffusionSamplingParams | Mapping[str, Any] | None

_log = logging.getLogger(__name__)
_OF_TEXT = ("text", *(field.name for field in dataclasses.fields(TextResult)))
_PARAMS = [field.name for field in dataclasses.fields(OmniDiffusionSamplingParams)]


class OmniDiffusion:
    """Starts all stages of a model and connects them; thread-safe; a context manager.

    All stages but the last run in processes of their own, or in Ray actors.

    Args:
        model: directory of the checkpoint.
        deploy_config: a file, or its contents; two stages over shared memory if None.
        on_death: called with a stage's number and the error when a stage is gone.
        overrides: fields of each stage's configuration that has them, such as `dtype="float32"`.

    Raises:
        SchemaError: the deployment is not valid; and what starting a stage raises.
    """

    def __init__(
        self,
        model: str | Path,
        deploy_config: str | Path | DeployConfig | Mapping[str, Any] | None = None,
        *,
        on_death: Callable[[int, KVLinkError], None] | None = None,
        **overrides: Any,
    ):
        self.deploy = _deployment(deploy_config).overridden(overrides)
        for stage in self.deploy.stages:
            if stage.ignored:
                _log.info("stage %d: no use for %s", stage.stage_id, ", ".join(stage.ignored))
        self._on_death = on_death
        self._configs = stage_configs(self.deploy, str(model))
        self._lock = threading.Lock()
        self._aborted: set[str] = set()
        self._open: set[str] = set()
        self.stages: list[Stage] = []
        self._streams = StreamTable(self.stages)
        try:
            for number in range(len(self._configs)):
                self.stages.append(self._make(number))
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: Any,
        sampling_params: Params | Sequence[Params] = None,
        *,
        timeout: float | None = None,
        progress: bool | Callable[[int, int], None] = False,
        output_type: Literal["pil", "pt"] = "pil",
        on_error: Literal["raise", "return"] = "raise",
        request_ids: Sequence[str] | None = None,
        **params_of_all: Any,
    ) -> list[Any]:
        """Generate the images, or texts, of prompts, in their order; blocks until all are done.

        A prompt with the sampling param `modalities` of ("text",) is answered with a text, a `str`.

        Args:
            prompts: one, or a list of them; each a text, an image, or a list of texts, token ids
                and images (a tuple or list inside the list of prompts), or a map as `read_prompt`
                takes it. Images are PIL's, or uint8 [H, W, 3].
                For diffusers' pipelines also a map of `prompt_embeds` and the pipeline's other
                arguments of that kind, [1, …], and `image`; see `EmbedsPrompt`.
            sampling_params: for all prompts, or one for each.
            timeout: seconds for all prompts; those that are not done then are aborted.
            progress: show a bar, or call this with (done, total).
            output_type: "pil" gives a list of PIL images a prompt (one of `num_outputs_per_prompt`
                is one image; a video is a list of images), "pt" the uint8 tensor
                [num_outputs_per_prompt, H, W, 3] or [num_outputs_per_prompt, frames, H, W, 3].
            on_error: "raise" the first prompt's error when all have ended; or "return" a
                `DiffusionOutput` for each, whose `result()` raises its own.
            request_ids: for `abort`; generated if None.
            params_of_all: sampling params of all prompts by their names, in place of
                `sampling_params`: `generate("a fox", num_inference_steps=24)`.

        Raises:
            TransferTimeout: not done in time.
            SchemaError: sampling params of an unknown name, or another number of them or of
                request ids than of prompts; no prompt runs.
            EngineError: a request id is in use. After it, a signal handler's exception or a
                timeout, the prompts that were queued are aborted.
            KVLinkError: why a prompt has no image.
        """
        prompt_list = prompts if isinstance(prompts, list) else [prompts]
        if params_of_all and sampling_params is not None:
            given = ", ".join(params_of_all)
            raise SchemaError(f"{given}: beside sampling_params; give all of them in one way")
        sampling_params = params_of_all or sampling_params
        params = _params_by_prompt(sampling_params, len(prompt_list))
        names = request_ids or [uuid.uuid4().hex for _ in prompt_list]
        for one_params in params:
            self._params(one_params, 0)  # wrong ones are refused before a prompt runs
        if len(names) != len(prompt_list):
            raise SchemaError(f"{len(names)} request ids for {len(prompt_list)} prompts")
        queued = zip(names, prompt_list, params, strict=True)
        outputs = self._run_all(list(queued), timeout, _Bar(len(prompt_list), progress))
        if on_error == "return":
            return outputs
        return [_answer(output, output_type) for output in outputs]

    def _run_all(
        self, prompts: Sequence[tuple[str, Any, Params]], timeout: float | None, bar: _Bar
    ) -> list[DiffusionOutput]:
        """Return the outputs of prompts, each with its id; after any error abort all of them."""
        futures: dict[str, Future[DiffusionOutput]] = {}
        try:
            for name, prompt, params in prompts:
                futures[name] = self.submit(prompt, params, request_id=name)
                futures[name].add_done_callback(bar.count)
            pending = wait(futures.values(), timeout).not_done
            if pending:
                waited = format_seconds(timeout or 0.0)
                text = f"{len(pending)} of {len(prompts)} prompts not done after {waited}"
                raise TransferTimeout(text, waited=timeout or 0.0, phase="running")
        except BaseException:
            for name in futures:  # not one whose id another caller uses
                self.abort(name)
            raise
        return [future.result() for future in futures.values()]

    def submit(
        self, prompt: Any, sampling_params: Params = None, *, request_id: str
    ) -> Future[DiffusionOutput]:
        """Queue one prompt; its future has the output, which may hold its error.

        Raises SchemaError for params of an unknown name, EngineError if the id is in use,
        EngineDeadError if the first stage is gone.
        """
        return self._submit(prompt, sampling_params, request_id)

    def stream(
        self, prompt: Any, sampling_params: Params = None, *, request_id: str | None = None
    ) -> RequestStream:
        """Queue one prompt, and iterate over its events while it runs; see `RequestStream`.

        Raises as `submit`. `preview_interval` among the sampling params asks for previews.
        """
        stream = RequestStream(request_id or uuid.uuid4().hex, self.abort)
        self._streams.open(stream)
        try:
            done = self._submit(prompt, sampling_params, stream.request_id, stream=True)
        except BaseException:
            self._streams.forget(stream.request_id)
            raise
        done.add_done_callback(lambda future: self._streams.end(future.result()))
        return stream

    async def generate_async(
        self, prompt: Any, sampling_params: Params = None, *, request_id: str | None = None
    ) -> DiffusionOutput:
        """Return one prompt's output, or raise its error, in asyncio; cancelling aborts the prompt.

        The event loop is not blocked while the prompt runs.
        """
        key = request_id or uuid.uuid4().hex
        output = await wait_for_output(
            self.submit(prompt, sampling_params, request_id=key), partial(self.abort, key)
        )
        if output.error is not None:
            raise output.error
        return output

    def stream_async(
        self, prompt: Any, sampling_params: Params = None, *, request_id: str | None = None
    ) -> AsyncIterator[StreamEvent]:
        """Iterate over one prompt's events in asyncio; waiting for the first event submits it.

        It is aborted when the iteration is cancelled, or closed (`aclose`) before its end.
        """
        return events_of(partial(self.stream, prompt, sampling_params, request_id=request_id))

    def abort(self, request_id: str) -> None:
        """Abort a prompt in any stage; unknown ids are ignored."""
        with self._lock:
            if request_id in self._open:
                self._aborted.add(request_id)
        for stage in self.stages:
            stage.abort(request_id)

    def restart(self, number: int) -> None:
        """Restart a stage that is gone; the prompts that it had have ended in errors.

        If Ray places it on another node, the next stage is restarted, too, to connect to it there.
        """
        stage = self.stages[number]
        old_urls = stage.sink_urls
        stage.restart()
        if stage.sink_urls != old_urls:
            following = self.stages[number + 1]
            assert isinstance(following.config, OmniDiffusionConfig)
            following.config = with_sources(following.config, stage.sink_urls, stage.config.kv)
            self.restart(number + 1)

    def stats(self) -> list[dict[str, Any]]:
        """The statistics of each stage."""
        return [stage.stats() for stage in self.stages]

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter in every stage, or in none; False if all had it.

        Waits for the batches that run. Raises EngineError or SchemaError if it cannot be used.
        """
        added: list[bool] = []
        with contextlib.ExitStack() as started:
            for stage in self.stages:
                added.append(stage.add_lora(lora_request))
                if added[-1]:
                    started.callback(stage.remove_lora, lora_request.lora_int_id)
            started.pop_all()
        return any(added)

    def remove_lora(self, lora_int_id: int) -> bool:
        """Release an adapter in every stage; False if none had it."""
        removed = [stage.remove_lora(lora_int_id) for stage in self.stages]
        return any(removed)

    def list_loras(self) -> list[int]:
        """The numbers of the adapters that every stage holds."""
        return sorted(set.intersection(*(set(stage.list_loras()) for stage in self.stages)))

    def pin_lora(self, lora_int_id: int) -> bool:
        """Keep an adapter in every stage until it is removed; False if one has none of it."""
        pinned = [stage.pin_lora(lora_int_id) for stage in self.stages]
        return all(pinned)

    def start_profile(self, directory: str | Path = "") -> None:
        """Begin to record what every worker computes: of stage n in `directory`/stage-n.

        Without a directory, of each stage in its own `torch_profiler_dir`, see `ProfilerConfig`.
        Raises EngineError, and records nothing, if a stage has none, or its process is being
        profiled.
        """
        with contextlib.ExitStack() as started:
            for number, stage in enumerate(self.stages):
                stage_dir = str(Path(directory).absolute() / f"stage-{number}") if directory else ""
                stage.start_profile(stage_dir)
                started.callback(stage.stop_profile)
            started.pop_all()

    def stop_profile(self) -> list[list[str]]:
        """Write the Chrome traces; their paths by stage and rank."""
        paths: list[list[str]] = []

        def stop(stage: Stage) -> None:
            paths.append(stage.stop_profile())

        with contextlib.ExitStack() as stops:  # all are stopped, also after the error of one
            for stage in reversed(self.stages):
                stops.callback(stop, stage)
        return paths

    def close(self) -> None:
        """Close every stage, the last one first; prompts that are not done end in ClosedError."""
        for stage in reversed(self.stages):
            stage.close()

    def __enter__(self) -> OmniDiffusion:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _make(self, number: int) -> Stage:
        config, deploy = self._configs[number], self.deploy.stages[number]
        on_death = None if self._on_death is None else partial(self._on_death, number)
        if isinstance(config, OmniDiffusionConfig) and number:
            urls = self.stages[number - 1].sink_urls
            config = with_sources(config, urls, self._configs[number - 1].kv)
        if deploy.settings.get("own_process") == "ray":
            return StageActor(config, on_death=on_death)
        if is_remote(deploy, is_last=number == len(self._configs) - 1):
            return StageProcess(config, on_death=on_death, environment=environment(deploy))
        assert isinstance(config, OmniDiffusionConfig)  # an AR stage is remote
        return DiffusionEngine(config, on_death=on_death)

    def _submit(
        self, prompt: Any, sampling_params: Params, request_id: str, **extra: Any
    ) -> Future[DiffusionOutput]:
        items, prompt_params = read_prompt(prompt)
        prompt_params |= extra
        params = self._params(sampling_params, 0, **prompt_params)
        if self.deploy.stages[0].kind == "ar":
            params.latents = None  # the stage that denoises gets them
        request = OmniDiffusionRequest(as_tensors(items), params, request_id)
        request.need_kv_transfer = len(self.stages) > 1 and not params.is_text_only
        if params.transfer_hidden_states and not request.need_kv_transfer:
            raise SchemaError("transfer_hidden_states: this deployment has one stage; leave it off")
        done: Future[DiffusionOutput] = Future()
        done.set_running_or_notify_cancel()
        with self._lock:
            if request_id in self._open:
                raise EngineError(f"request {request_id!r} is here already")
            self._open.add(request_id)
        try:
            first = self.stages[0].submit(request)
        except BaseException:
            with self._lock:
                self._open.discard(request_id)
            raise
        first.add_done_callback(partial(self._on_stage, request, sampling_params, done, []))
        return done

    def _params(
        self, params: Params, number: int, **prompt_params: Any
    ) -> OmniDiffusionSamplingParams:
        """Complete params with the stage's defaults; `prompt_params` override both."""
        if isinstance(params, OmniDiffusionSamplingParams):
            blank = OmniDiffusionSamplingParams()
            params = {
                name: getattr(params, name)
                for name in _PARAMS
                if getattr(params, name) != getattr(blank, name)
            }
        fields = {**self.deploy.stages[number].sampling, **(params or {}), **prompt_params}
        if unknown := sorted(fields.keys() - set(_PARAMS)):
            raise SchemaError(
                f"{', '.join(unknown)}: no sampling params here; there are {', '.join(_PARAMS)}"
            )
        return OmniDiffusionSamplingParams(**fields)

    def _on_stage(
        self,
        request: OmniDiffusionRequest,
        sampling_params: Params,
        done: Future[DiffusionOutput],
        stages: list[DiffusionOutput],
        finished: Future[DiffusionOutput],
    ) -> None:
        """Called when a stage is done with a request: submit it to the next, or resolve `done`."""
        output, key = finished.result(), request.request_id
        stages.append(output)
        self._streams.put_rest(output)
        number = len(stages)  # of the next stage
        if output.error is not None and number > 1:
            self.stages[number - 2].fail_kv(key, str(output.error))
        if output.error is None and number < len(self.stages) and request.need_kv_transfer:
            try:
                following = self._following(number, request, sampling_params, output)
                coming = self.stages[number].submit(following)
            except Exception as error:
                self.stages[number - 1].fail_kv(key, str(error))
                output = DiffusionOutput(key, error=error)
            else:
                with self._lock:
                    aborted = key in self._aborted
                if aborted:  # between two stages: the next one releases its KV
                    self.stages[number].abort(key)
                coming.add_done_callback(
                    partial(self._on_stage, following, sampling_params, done, stages)
                )
                return
        with self._lock:
            self._open.discard(key)
            self._aborted.discard(key)
        text_fields = {name: _first(getattr(stage, name) for stage in stages) for name in _OF_TEXT}
        done.set_result(dataclasses.replace(output, **text_fields, stages=stages))

    def _following(
        self,
        number: int,
        request: OmniDiffusionRequest,
        sampling_params: Params,
        output: DiffusionOutput,
    ) -> OmniDiffusionRequest:
        """The request for the next stage, which receives the KV that was sent."""
        sent = output.kv_sent
        assert sent is not None  # a stage with a sink returns it, or an error
        params = self._params(sampling_params, number, stream=request.sampling_params.stream)
        if sent.image_shape is not None:
            params.height, params.width = sent.image_shape
        return OmniDiffusionRequest(
            request.prompt,
            params,
            request.request_id,
            need_kv_receive=True,
            need_kv_transfer=number < len(self.stages) - 1,
            need_hidden_receive=sent.has_hidden_states,
            kv_nbytes=sent.nbytes,
            kv_sender_info=sent.kv_sender_info,
        )


class _Bar:
    """Reports how many prompts are done, on standard error or to a function."""

    def __init__(self, total: int, show: bool | Callable[[int, int], None]):
        self._total, self._show, self._done = total, show, 0
        self._lock = threading.Lock()

    def count(self, _: object) -> None:
        with self._lock:
            self._done += 1
            if callable(self._show):
                self._show(self._done, self._total)
            elif self._show:
                bar = "█" * (30 * self._done // self._total)
                end = "\n" if self._done == self._total else ""
                sys.stderr.write(f"\r{bar:<30} {self._done}/{self._total}{end}")
                sys.stderr.flush()


def _deployment(source: str | Path | DeployConfig | Mapping[str, Any] | None) -> DeployConfig:
    if source is None:
        stages = [{"stage_id": 0}, {"stage_id": 1}]
        return DeployConfig.from_dict({"pipeline": "bagel", "stages": stages})
    if isinstance(source, DeployConfig):
        return source
    if isinstance(source, Mapping):
        return DeployConfig.from_dict(source)
    return DeployConfig.load(source)


def _answer(output: DiffusionOutput, output_type: str) -> Any:
    """The images of an output, or its text if it has none; raises its error."""
    if output.error is None and output.output is None and output.text is not None:
        return output.text
    images = output.result()
    return images if output_type == "pt" else from_tensor(images)


def _first(values: Iterable[Any]) -> Any:
    """The first value that is not None."""
    return next((value for value in values if value is not None), None)


def _params_by_prompt(params: Params | Sequence[Params], count: int) -> Sequence[Params]:
    if params is None or isinstance(params, (OmniDiffusionSamplingParams, Mapping)):
        return [params] * count
    if len(params) != count:
        raise SchemaError(f"{len(params)} sampling params for {count} prompts")
    return params
