"""The params of a request, which a client wrote: read once, and never trusted.

`kv_transfer_params` name the cache of its prompt, `ec_transfer_params` the outputs of its media.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from omni_kvlink.errors import SchemaError
from omni_kvlink.lowlevel import check_request_id
from omni_kvlink.settings import shown

if TYPE_CHECKING:
    from vllm.v1.request import Request

T = TypeVar("T")

SEND, FETCH = "do_remote_decode", "do_remote_prefill"
"""vLLM's own keys in `kv_transfer_params`, so that its routers work with this connector."""

URL, KEY, READERS = "url", "key", "readers"
"""The keys in `ec_transfer_params`; `readers` is one of `kv_transfer_params`, too."""

MAX_READERS = 1 << 16


class ParamFields:
    """Reads fields of params: one that is null has its default, one that is wrong an empty value.

    `error` says which fields are wrong so far, and what they must be.
    """

    def __init__(self, name: str, params: object):
        self._params: Mapping[Any, Any] = params if isinstance(params, Mapping) else {}
        self.error = "" if isinstance(params, Mapping) else _wrong(name, params, "an object")

    def flag(self, name: str) -> bool:
        """Whether a flag is set. Another value than a boolean counts as set."""
        value = self._value(name, False)
        is_set = value not in (None, False)
        return value if isinstance(value, bool) else self._refuse(name, "true or false", is_set)

    def text(self, name: str) -> str:
        """A text; "" by default."""
        value = self._value(name, "")
        return value if isinstance(value, str) else self._refuse(name, "a string", "")

    def key(self, name: str, default: object = None, rule: str = "") -> str:
        """The request id of a payload."""
        value: Any = self._value(name, default)
        try:
            return check_request_id(value)
        except SchemaError:
            rule = rule or "a string of 1 to 1024 characters, no lone surrogates"
            return self._refuse(name, rule, "", default=default)

    def count(self, name: str, most: int, of: str = "", *, least: int = 1, default: int = 1) -> int:
        """A whole number from `least` to `most`, which is the number `of` something."""
        value = self._value(name, default)
        if type(value) is int and least <= value <= most:
            return value
        return self._refuse(name, f"an integer from {least} to {most}{of}", 0)

    def _value(self, name: str, default: object) -> object:
        value = self._params.get(name)
        return default if value is None else value

    def _refuse(self, name: str, rule: str, empty: T, *, default: object = None) -> T:
        error = _wrong(name, self._value(name, default), rule)
        self.error = f"{self.error}; {error}" if self.error else error
        return empty


@dataclasses.dataclass(frozen=True)
class TransferParams:
    """The transfers that one request asks for; with an `error`, it cannot have them."""

    sends: bool = False
    fetches: bool = False
    key: str = ""  # of the cache that is sent, or of the one that is loaded; "" if it is wrong
    url: str = ""  # the producer's; "" if none is named
    readers: int = 1  # 0 if it is wrong
    turn_key: str | None = None  # the key of an earlier turn's cache, if that is loaded
    tokens: int = 0  # the leading tokens that it has
    error: str = ""  # which field is wrong, and what it must be
    adapter: str = ""  # the identity of the request's adapter

    @classmethod
    def read(cls, request: Request, *, produces: bool, consumes: bool) -> TransferParams:
        """Read a request's params, for an engine of these roles; never raises."""
        params = request.kv_transfer_params
        if params is None:
            return cls()
        fields = ParamFields("kv_transfer_params", params)
        if fields.error:
            return cls(produces, consumes, error=fields.error)
        sends, fetches = produces and fields.flag(SEND), consumes and fields.flag(FETCH)
        if not (sends or fetches):
            return cls()
        key, url = fields.key("transfer_id", request.request_id), fields.text("remote_url")
        readers, turn_key, tokens = fields.count(READERS, MAX_READERS), None, 0
        if sends and consumes and not fetches and params.get("remote_num_tokens"):
            fetches, prompt = True, request.num_prompt_tokens
            turn_key = fields.key(
                "remote_request_id", None, "the id in the answer of the decode engine"
            )
            tokens = fields.count("remote_num_tokens", prompt, ", the tokens of the prompt")
        return cls(sends, fetches, key, url, readers, turn_key, tokens, fields.error)

    @property
    def source(self) -> str:
        """The key of the cache that is loaded."""
        return self.key if self.turn_key is None else self.turn_key

    @property
    def source_readers(self) -> int:
        """The number of requests that load it; an earlier turn's cache has one."""
        return self.readers if self.turn_key is None else 1


def is_answered(request: Request) -> bool:
    """Whether a request that has ended has an answer, in which params are passed on."""
    return str(request.get_finished_reason()) in ("stop", "length", "repetition")


@dataclasses.dataclass(frozen=True)
class Source:
    """The place of one encoder output; with an `error`, it cannot be loaded."""

    url: str = ""  # the producer's; the first of the peers if empty
    key: str = ""  # the payload's request id on the link
    readers: int = 1  # how many requests the producer put it for
    error: str = ""  # which field is wrong, and what it must be

    @classmethod
    def read(cls, entry: object) -> Source:
        """Read the params of one media item; never raises."""
        fields = ParamFields("ec_transfer_params", entry)
        url, key = fields.text(URL), fields.key(KEY)
        return cls(url, key, fields.count(READERS, MAX_READERS), fields.error)


def read_sources(params: object, items: Collection[str]) -> tuple[dict[str, Source], list[str]]:
    """The sources that a request's params name, of its items and by item; never raises.

    And the items that they name a source of, and that the request does not have.
    """
    if params is not None and not isinstance(params, Mapping):
        error = ParamFields("ec_transfer_params", params).error
        return dict.fromkeys(items, Source(error=error)), []
    named = {
        item: entry
        for item, entry in (params or {}).items()
        if isinstance(entry, Mapping) and KEY in entry  # without, it is media of a known size
    }
    sources = {item: Source.read(named[item]) for item in items if item in named}
    return sources, [str(item) for item in named if item not in items]


def read_readers(params: object, default: int) -> tuple[int, str]:
    """The number of requests that read the outputs of a producer's request; or 0 and an error."""
    fields = ParamFields("ec_transfer_params", {} if params is None else params)
    readers = fields.count(READERS, MAX_READERS, least=0, default=default)
    return (0 if fields.error else readers), fields.error


def _wrong(name: str, value: object, rule: str) -> str:
    return f"{name} is {shown(value)}, not {rule}"
