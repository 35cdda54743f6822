from __future__ import annotations

import copy

import pytest

import omni_kvlink
from omni_kvlink import errors

FAMILY: dict[str, tuple[type, ...]] = {
    "KVLinkError": (Exception,),
    "SchemaError": (errors.KVLinkError, ValueError),
    "WireError": (errors.KVLinkError, ValueError),
    "VersionError": (errors.WireError,),
    "IntegrityError": (errors.WireError,),
    "ConnectorError": (errors.KVLinkError,),
    "UnavailableError": (errors.ConnectorError, ImportError),
    "TransferTimeout": (errors.ConnectorError, TimeoutError),
    "TransferFailed": (errors.ConnectorError,),
    "PeerLostError": (errors.ConnectorError, ConnectionError),
    "CapacityError": (errors.ConnectorError, MemoryError),
    "DuplicateKeyError": (errors.ConnectorError,),
    "ClosedError": (errors.KVLinkError,),
    "BusyError": (errors.KVLinkError,),
    "NativeError": (errors.KVLinkError, RuntimeError),
}
"""Every error with the classes that an `except` may name instead."""

ALL = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, BaseException)
}


def test_the_family_is_complete() -> None:
    assert set(ALL) == set(FAMILY)


@pytest.mark.parametrize("name", FAMILY)
def test_an_error_is_what_the_caller_expects(name: str) -> None:
    error = ALL[name]
    assert error.__bases__ == FAMILY[name]
    assert issubclass(error, errors.KVLinkError)
    assert str(error("what happened")) == "what happened"
    assert getattr(omni_kvlink, name) is error
    assert error.__doc__


@pytest.mark.parametrize(
    ("error", "facts"),
    [
        (
            errors.TransferTimeout("m", key="k", waited=1.5, phase="never announced"),
            {"key": "k", "waited": 1.5, "phase": "never announced"},
        ),
        (errors.TransferFailed("m", key="k", reason="r"), {"key": "k", "reason": "r"}),
        (errors.CapacityError("m", requested=7, free=3), {"requested": 7, "free": 3}),
    ],
)
def test_facts_are_attributes(error: Exception, facts: dict[str, object]) -> None:
    assert str(error) == "m"
    assert {name: getattr(error, name) for name in facts} == facts


def test_a_copy_keeps_the_facts() -> None:
    """Process pools pickle an exception to return it."""
    error = copy.copy(errors.CapacityError("m", requested=7, free=3))
    assert (str(error), error.requested, error.free) == ("m", 7, 3)
