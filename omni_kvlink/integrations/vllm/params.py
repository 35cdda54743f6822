"""A request's `kv_transfer_params`, which a client wrote: read once, and never trusted."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from omni_kvlink.errors import SchemaError
from omni_kvlink.lowlevel import check_request_id

if TYPE_CHECKING:
    from vllm.v1.request import Request

SEND, FETCH = "do_remote_decode", "do_remote_prefill"
"""vLLM's own keys in `kv_transfer_params`, so that its routers work with this connector."""

MAX_READERS = 1 << 16


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
        if not isinstance(params, Mapping):
            return cls(produces, consumes, error=_wrong("kv_transfer_params", params, "an object"))
        errors: list[str] = []
        sends = produces and _flag(params, SEND, errors)
        fetches = consumes and _flag(params, FETCH, errors)
        if not (sends or fetches):
            return cls()
        names = ("transfer_id", "remote_url", "readers")
        defaults = (request.request_id, "", 1)
        key, url, readers = (
            default if params.get(name) is None else params[name]
            for name, default in zip(names, defaults, strict=True)
        )
        try:
            key = check_request_id(key)
        except SchemaError:
            rule = "a string of 1 to 1024 characters, no lone surrogates"
            errors.append(_wrong("transfer_id", key, rule))
            key = ""
        if not isinstance(url, str):
            errors.append(_wrong("remote_url", url, "a string"))
            url = ""
        if type(readers) is not int or not 1 <= readers <= MAX_READERS:
            errors.append(_wrong("readers", readers, f"an integer from 1 to {MAX_READERS}"))
            readers = 0
        turn_key, tokens = None, 0
        if sends and consumes and not fetches and params.get("remote_num_tokens"):
            fetches = True
            turn_key, tokens = _turn(params, request.num_prompt_tokens, errors)
        return cls(sends, fetches, key, url, readers, turn_key, tokens, "; ".join(errors))

    @property
    def source(self) -> str:
        """The key of the cache that is loaded."""
        return self.key if self.turn_key is None else self.turn_key

    @property
    def source_readers(self) -> int:
        """The number of requests that load it; an earlier turn's cache has one."""
        return self.readers if self.turn_key is None else 1


def _turn(params: Mapping[Any, Any], prompt: int, errors: list[str]) -> tuple[str, int]:
    """The key and the tokens of the earlier turn's cache that a prompt begins with."""
    key: Any = params.get("remote_request_id")
    tokens: Any = params["remote_num_tokens"]
    try:
        key = check_request_id(key)
    except SchemaError:
        errors.append(_wrong("remote_request_id", key, "the id in the answer of the decode engine"))
        key = ""
    if type(tokens) is not int or not 1 <= tokens <= prompt:
        rule = f"an integer from 1 to {prompt}, the tokens of the prompt"
        errors.append(_wrong("remote_num_tokens", tokens, rule))
        tokens = 0
    return key, tokens


def _flag(params: Mapping[Any, Any], name: str, errors: list[str]) -> bool:
    """Return whether a flag is set. Another value than a boolean is an error, and counts as set."""
    value = params.get(name)
    if not isinstance(value, (bool, type(None))):
        errors.append(_wrong(name, value, "true or false"))
    return value not in (None, False)


def _wrong(name: str, value: object, rule: str) -> str:
    try:
        shown = f"{value!r:.100}"
    except RecursionError:
        shown = f"a deep {type(value).__name__}"
    return f"{name} is {shown}, not {rule}"
