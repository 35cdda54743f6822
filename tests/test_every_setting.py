"""Every setting of every layer, by its declaration, with values of every kind."""

from __future__ import annotations

import math
import re
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import omni_kvlink
from omni_kvlink import KVLink, KVLinkError, LinkOptions, SchemaError
from omni_kvlink.connectors.base import Options, Uids
from omni_kvlink.engine import config as engine
from omni_kvlink.engine.entrypoints import deploy
from omni_kvlink.engine.lora.request import LoRARequest
from omni_kvlink.engine.sampling import OmniDiffusionSamplingParams
from omni_kvlink.engine.step_cache.block_cache import BlockCacheSettings
from omni_kvlink.engine.step_cache.cache_dit import CacheDiTSettings
from omni_kvlink.engine.step_cache.tea_cache import TeaCacheSettings
from omni_kvlink.engine.tokens.sampling import TextSamplingParams
from omni_kvlink.integrations.ray.settings import RaySettings
from omni_kvlink.integrations.store_settings import StoreSettings
from omni_kvlink.integrations.vllm.settings import (
    EncoderSettings,
    EngineSettings,
    PoolConnectOptions,
    PoolServeOptions,
    VllmSettings,
)
from omni_kvlink.integrations.vllm.tier.settings import TierSettings
from omni_kvlink.integrations.vllm_omni.settings import OmniSettings
from omni_kvlink.link import ConnectOptions, ServeOptions
from omni_kvlink.settings import Choices, FilePath, Flag, Integer, Settings, Size, SomeOf, rules

ROOT = Path(omni_kvlink.__file__).parent
KINDS: dict[type[Settings], dict[str, Any]] = {
    Options: {},
    ConnectOptions: {},
    ServeOptions: {},
    PoolServeOptions: {},
    PoolConnectOptions: {},
    VllmSettings: {},
    EncoderSettings: {},
    TierSettings: {},
    OmniSettings: {},
    StoreSettings: {"serve": "shm://a", "revision": "r"},
    RaySettings: {},
    engine.DiffusionParallelConfig: {},
    engine.KVConfig: {},
    engine.CompilationConfig: {},
    engine.LoRAConfig: {},
    engine.KVTransferConfig: {"kv_role": "kv_producer", "url": "shm://p", "peers": ["shm://d"]},
    engine.RayConfig: {},
    engine.ProfilerConfig: {},
    engine.OmniDiffusionConfig: {"model": "x"},
    engine.OmniARConfig: {"model": "x"},
    OmniDiffusionSamplingParams: {},
    LoRARequest: {"lora_name": "a", "lora_int_id": 1, "lora_path": "a"},
    TeaCacheSettings: {},
    BlockCacheSettings: {},
    CacheDiTSettings: {},
    deploy.ConnectorSettings: {"name": "KVLinkConnector"},
    deploy.KVCriteriaSettings: {},
    deploy.OmniKVConfig: {},
    deploy.KVTransferSettings: {"kv_role": "kv_producer"},
    deploy.StageSettings: {"stage_id": 0},
}
"""Every class of settings, and the settings that have no default."""

DECLARED = re.compile(
    r"^@dataclasses\.dataclass.*\n"
    r"class (\w*(?:Settings|Options|Config|SamplingParams)|LoRARequest)\b",
    re.M,
)
NOT_READ = {
    "engine.entrypoints.deploy.DeployConfig": "made of a file, whose stages become settings",
    "engine.config.StageConfig": "a base",
    "integrations.vllm.settings.EngineSettings": "a base",
    "engine.tokens.sampling.TextSamplingParams": "a base",
}
"""Dataclasses with such a name that nobody configures."""


def test_the_list_is_complete() -> None:
    """No class of settings is missing, and none checks its fields in another way."""
    listed = {f"{kind.__module__.partition('.')[2]}.{kind.__name__}" for kind in KINDS}
    declared = set[str]()
    for path in ROOT.rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        declared |= {f"{module}.{name}" for name in DECLARED.findall(path.read_text())}
    assert declared - NOT_READ.keys() == listed
    assert NOT_READ.keys() <= declared
    subclasses = {kind for kind in _below(Settings) if kind.__module__.startswith("omni_kvlink.")}
    assert subclasses - {engine.StageConfig, EngineSettings, TextSamplingParams} == set(KINDS)


def _below(kind: type[Settings]) -> set[type[Settings]]:
    return set(kind.__subclasses__()).union(*map(_below, kind.__subclasses__()))


def test_keywords_are_the_options() -> None:
    """And a type checker allows of each what its rule allows."""
    types = {Flag: "bool", Size: "int | str", Integer: "int", FilePath: "str | os.PathLike[str]"}
    types[Uids] = "Collection[int]"
    types[Choices] = "str | Sequence[str]"
    options = {name: types.get(type(rule), "str") for name, rule in rules(Options).items()}
    options["prefault"] = "int | str | Payload | None"
    hints = LinkOptions.__annotations__.items()
    assert {name: hint.__forward_arg__ for name, hint in hints} == options


def test_each_option_is_described_once() -> None:
    described = re.findall(r"^        (\w+): ", Options.__doc__ or "", re.MULTILINE)
    assert described == list(rules(Options))
    assert not re.search(r"^\s+\w+: ", LinkOptions.__doc__ or "", re.MULTILINE)


TEXTS = ["", "false", "true", "0", "1", "no", "yes", "auto", "8GB", "cuda:0", "shm://x", "pooled"]
PLAIN: list[Any] = [
    *(None, False, True, -1, 0, 1, 2, 3, 7, 10**9, 2**63, 10**30),
    *(-1.0, 0.0, 0.5, 1.0, 1.5e9, math.inf, -math.inf, math.nan),
    *(*TEXTS, "a\0b", "\udcff", "inproc", "kv_consumer"),
    *(b"false", object(), {1}, 1j, Path("/x"), Settings),
]
VALUES = st.recursive(
    st.sampled_from(PLAIN),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.tuples(inner, inner)
        | st.dictionaries(
            st.sampled_from([*TEXTS, 1, "insecure", "quota", "depth"]), inner, max_size=2
        )
    ),
    max_leaves=4,
)


def hints_of(kind: type[Settings]) -> dict[str, Any]:
    if kind not in HINTS:
        HINTS[kind] = typing.get_type_hints(kind, include_extras=True)
    return HINTS[kind]


HINTS: dict[Any, dict[str, Any]] = {}


def means(hint: Any, source: Any, value: Any) -> bool:
    """Whether a value that was read means the input, by the declared type alone."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        options = next((rule for rule in inner[1:] if isinstance(rule, SomeOf)), None)
        if options is None:
            return means(inner[0], source, value)
        hints = hints_of(options.kind)
        return set(value) == set(source) and all(
            means(hints[name], source[name], value[name]) for name in source
        )
    if hint is bool:
        return source is value and type(source) is bool
    if hint is int:
        is_size = isinstance(source, str) and (source.endswith("GB") or source == str(value))
        return type(value) is int and (is_size or (type(source) is int and source == value))
    if hint is float:
        return type(value) is float and type(source) in (int, float) and float(source) == value
    if hint is str:
        return type(value) is str and (
            source == value or (isinstance(source, Path) and str(source) == value)
        )
    if origin is Literal:
        return value in inner and type(source) is type(value) and source == value
    if origin in (Union, types.UnionType):
        return source is None or any(
            means(kind, source, value) for kind in inner if kind is not type(None)
        )
    if origin is tuple:
        return len(source) == len(value) and all(
            map(lambda *pair: means(inner[0], *pair), source, value)
        )
    if origin is dict:
        return source.keys() == value.keys() and all(
            means(inner[1], source[name], value[name]) for name in source
        )
    if isinstance(hint, type) and issubclass(hint, Settings):
        hints = hints_of(hint)
        return source is value or all(means(hints[n], source[n], getattr(value, n)) for n in source)
    return hint is Any and str(source).replace("(", "[").replace(")", "]").replace(
        ",]", "]"
    ) == str(value)


def is_taken(kind: type[Settings], name: str, source: Any) -> bool:
    """Whether a setting takes a value; it then means the same. No other error leaves."""
    try:
        value = kind.read({**KINDS[kind], name: source})
    except SchemaError as error:
        return not str(error)
    hint = hints_of(kind)[name]
    assert means(hint, source, getattr(value, name)), (name, source, value)
    return True


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_value_is_taken_for_what_it_is_or_refused(kind: type[Settings]) -> None:
    """Nothing raises a bare error, and no value is taken for its opposite."""
    samples = PLAIN[::4]
    inner: list[Any] = [[], {}, *([item] for item in samples), *({"x": item} for item in samples)]
    for name in rules(kind):
        assert [is_taken(kind, name, value) for value in (*PLAIN, *inner)].count(False)


FIELDS = [(kind, name) for kind in KINDS for name in rules(kind)]


@settings(max_examples=200, deadline=None, database=None)
@given(st.sampled_from(FIELDS), VALUES)
def test_any_value(field: tuple[type[Settings], str], value: Any) -> None:
    is_taken(*field, value)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_words_nulls_and_misspellings(kind: type[Settings]) -> None:
    """A flag takes two values, None is taken where it is declared, and a name in one spelling."""
    hints = hints_of(kind)
    for name in rules(kind):
        needed, hint = KINDS[kind], hints[name]
        if hint is bool:
            word: Any
            for word in ("false", "true", "no", "off", "0", "1", "", 0, 1, 0.0, None, [], {}):
                with pytest.raises(SchemaError, match=f"^{name}=.*: wanted true or false"):
                    kind.read({**needed, name: word})
        if type(None) not in typing.get_args(hint):
            with pytest.raises(SchemaError, match=f"^{name}=None: wanted "):
                kind.read({**needed, name: None})
        for wrong in (f"{name}s_", name.upper(), name[:-1] + "_"):
            with pytest.raises(
                SchemaError, match=f"^{wrong}: no such setting.*there are |There are"
            ):
                kind.read({**needed, wrong: None})


@settings(max_examples=100, deadline=None, database=None)
@given(st.sampled_from(list(rules(Options))), VALUES, st.booleans())
def test_a_link_is_opened_with_what_was_said_or_not_at_all(
    name: str, value: Any, in_url: bool
) -> None:
    """Only errors of the library leave `KVLink.serve`, as a keyword and as a word of the URL."""
    options: dict[str, Any] = {} if in_url else {name: value}
    url = f"inproc://every-setting?{name}={value}" if in_url else "inproc://every-setting"
    try:
        KVLink.serve(url, **options).close()
    except KVLinkError:
        return
    text = str(value).lower()
    if rules(Options)[name].allowed.startswith("true"):
        assert text in (("true", "false", "0", "1") if in_url else ("true", "false"))
