"""Checks of a deployment's fields that this engine has no setting for.

A field that is in no table here is refused: it could change a result, or where a stage runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from omni_kvlink.engine.entrypoints.deploy_files import BAGEL_ARCHITECTURES
from omni_kvlink.engine.executor.pipeline_classes import PIPELINE_CLASSES
from omni_kvlink.errors import SchemaError
from omni_kvlink.settings import similar

_PROMPTS = "vllm_omni.model_executor.stage_input_processors.bagel."

_UNUSED = frozenset(
    (
        # memory and speed of another engine
        *("gpu_memory_utilization", "kv_cache_memory_bytes", "max_model_len"),
        *("mm_processor_cache_gb", "enable_prefix_caching", "enable_chunked_prefill"),
        *("async_scheduling", "async_chunk"),
        *("moe_backend", "enable_sleep_mode"),
        *("enable_flashinfer_autotune", "disable_hybrid_kv_cache_manager", "vae_use_slicing"),
        *("block_size", "max_num_batched_tokens"),
        # start, limits and reports
        *("trust_remote_code", "skip_mm_profiling", "limit_mm_per_prompt"),
        *("is_comprehension", "window_size", "max_inflight"),
    )
)
"""Fields on which neither a result nor a placement depends; any value."""

_SAME: dict[str, tuple[Any, ...]] = {
    "attention_backend": ("auto", "TORCH_SDPA", "SDPA"),
    "num_replicas": (1,),
    "allgather_degree": (1,),
    "vae_parallel_mode": ("tile",),
    "enable_expert_parallel": (False,),
    "use_hsdp": (False,),
    "hsdp_shard_size": (-1,),
    "hsdp_replicate_size": (1,),
    "kv_cache_dtype": ("auto",),
    "dtype": ("auto",),
    "load_format": ("auto", "safetensors"),
    "config_format": ("auto", "hf"),
    "tokenizer_mode": ("auto",),
    "skip_tokenizer_init": (False,),
    "streaming_output": (False,),
    "final_output": (True, False),
    "model_arch": BAGEL_ARCHITECTURES,
    "session_mode": ("turn",),
    "model_runner": ("v1",),
    "active_stream_window": (0,),
    "lora_backend": ("peft",),
    "lora_dtype": ("auto", "float32"),
    "fully_sharded_loras": (False,),
}
"""Fields that have no setting here, and the values for which this engine does what they say."""

_SAME_BY_KIND: dict[str, dict[str, tuple[Any, ...]]] = {
    "ar": {
        "cache_backend": ("none",),
        "request_batch_max_wait_ms": (0,),
        "step_execution": (False,),
        "model_stage": ("thinker", "ar"),
        "stage_type": ("llm",),
        "engine_output_type": ("text",),
        "final_output_type": ("text",),
        "worker_cls": ("auto", "vllm_omni.worker.gpu_ar_worker.GPUARWorker"),
        "worker_type": ("ar",),
        "scheduler_cls": ("vllm_omni.core.sched.omni_ar_scheduler.OmniARScheduler",),
        # the prompts of guidance, which this engine makes of the request's own
        "prompt_expand_func": (
            f"{_PROMPTS}expand_cfg_prompts",
            f"{_PROMPTS}expand_cfg_prompts_think",
        ),
        # by it, vLLM asks BAGEL for the positions that this engine always takes
        "hf_overrides": (
            {"rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]}},
        ),
    },
    "dit": {
        "model_stage": ("dit",),
        "stage_type": ("diffusion",),
        "engine_output_type": ("image",),
        "final_output_type": ("image",),
        "worker_cls": ("auto",),
        "cfg_kv_collect_func": (f"{_PROMPTS}collect_cfg_kv_caches",),
    },
}
_SAME_BY_KIND["all"] = _SAME_BY_KIND["dit"]
_SAME_BY_KIND["diffusers"] = {
    **_SAME_BY_KIND["dit"],
    "model_arch": tuple(PIPELINE_CLASSES),
    "model_stage": ("dit", "diffusion"),
    "engine_output_type": ("image", "video"),
    "final_output_type": ("image", "video"),
}

_SAME_SAMPLING: dict[str, tuple[Any, ...]] = {
    "detokenize": (True,),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "min_p": (0, 0.0),
    "min_tokens": (0,),
    "n": (1,),
    "output_type": ("pil",),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "skip_special_tokens": (True, False),  # a text is what lies between its markers
}

_TEXT_SAMPLING = frozenset(
    (
        *_SAME_SAMPLING,
        *("max_tokens", "repetition_penalty", "stop", "stop_token_ids"),
        *("temperature", "top_k", "top_p"),
    )
)
"""Params of a text, without effect in a stage that writes none."""


def unused_fields(
    kind: str, fields: Mapping[str, Any], location: str, settings: Collection[str] = ()
) -> tuple[str, ...]:
    """Return the fields without an effect, sorted; errors name their `location` in the deployment.

    `settings` are the fields that have an effect, of which one may have been meant.

    Raises:
        SchemaError: a field could change a result or a placement, and is not supported.
    """
    values = {**_SAME, **_SAME_BY_KIND.get(kind, {})}
    for name, value in sorted(fields.items()):
        is_known = (
            name in _UNUSED or _says_nothing(value) or _is_one_of(value, values.get(name, ()))
        )
        if not is_known:
            known = values.get(name)
            meant = "" if known else similar(name, {*settings, *values, *_UNUSED})
            raise _unsupported(f"{location}: {name} {value!r:.60}", known, meant)
    return tuple(sorted(fields))


def is_default(kind: str, name: str, value: Any) -> bool:
    """Whether a value of a setting says, in another engine's words, what is the default here."""
    return _is_one_of(value, {**_SAME, **_SAME_BY_KIND[kind]}.get(name, ()))


def unused_sampling(kind: str, params: Mapping[str, Any], location: str) -> tuple[str, ...]:
    """Return the sampling params without an effect, sorted; raises as `unused_fields`."""
    for name, value in params.items():
        is_text = kind == "dit" and name in _TEXT_SAMPLING
        values = _SAME_SAMPLING.get(name)
        if not (is_text or _says_nothing(value) or _is_one_of(value, values or ())):
            raise _unsupported(f"{location}: default_sampling_params {name} {value!r:.60}", values)
    return tuple(sorted(params))


def check_compilation(fields: Any, location: str) -> None:
    """Raise SchemaError if `compilation_config` asks for graphs, of which there are none here."""
    for name, value in fields.items() if isinstance(fields, Mapping) else ():
        if str(name).startswith("cudagraph_") or name == "use_cudagraph":
            raise SchemaError(
                f"{location}: compilation_config has {name} {value!r:.60}: no graph is captured "
                "here, because K and V of each request are at other addresses; mode: "
                "reduce-overhead lets torch capture what is between"
            )


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    """Whether a value is among these; a number is no boolean."""
    is_bool = isinstance(value, bool)
    return any(value == choice and isinstance(choice, bool) is is_bool for choice in values)


def _says_nothing(value: Any) -> bool:
    return value is None or (not value and isinstance(value, (str, list, dict)))


def _unsupported(subject: str, values: tuple[Any, ...] | None, meant: str = "") -> SchemaError:
    cure = f"only {' or '.join(map(repr, values))} is" if values else "it is not"
    return SchemaError(
        f"{subject}: {cure} supported here, and it could change a result, or where a stage runs; "
        f"remove it if it may be left out{meant}"
    )
