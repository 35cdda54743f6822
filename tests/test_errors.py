from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest

import omni_kvlink
from omni_kvlink import errors
from omni_kvlink.errors import WireError
from omni_kvlink.system.waits import Answer

FAMILY: dict[str, tuple[type, ...]] = {
    "KVLinkError": (Exception,),
    "SchemaError": (errors.KVLinkError, ValueError),
    "WireError": (errors.KVLinkError, ValueError),
    "VersionError": (errors.WireError,),
    "IntegrityError": (errors.WireError,),
    "FileError": (errors.KVLinkError, OSError),
    "MissingFileError": (errors.FileError, FileNotFoundError),
    "ConnectorError": (errors.KVLinkError,),
    "UnavailableError": (errors.ConnectorError, ImportError),
    "TransferTimeout": (errors.ConnectorError, TimeoutError),
    "TransferFailed": (errors.ConnectorError,),
    "MissingError": (errors.TransferFailed,),
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
            errors.TransferTimeout("m", key="k", waited=1.5, phase="not announced"),
            {"key": "k", "waited": 1.5, "phase": "not announced"},
        ),
        (errors.TransferFailed("m", key="k", reason="r"), {"key": "k", "reason": "r"}),
        (errors.CapacityError("m", requested=7, free=3), {"requested": 7, "free": 3}),
    ],
)
def test_facts_are_attributes(error: Exception, facts: dict[str, object]) -> None:
    assert str(error) == "m"
    assert {name: getattr(error, name) for name in facts} == facts


@pytest.mark.parametrize(
    ("duration", "text"),
    [
        (0.4999991, "0.5 s"),
        (9.9999, "10 s"),
        (2.0 / 3, "0.667 s"),
        (1.23456, "1.23 s"),
        (0.00012345, "0.000123 s"),
        (0.0, "0 s"),
        (30, "30 s"),
        (1_234_567.0, "1234567 s"),
        (float("inf"), "inf s"),
    ],
)
def test_durations_are_rounded(duration: float, text: str) -> None:
    assert errors.format_seconds(duration) == text


def test_every_text_with_a_duration_uses_the_helper() -> None:
    package = Path(omni_kvlink.__file__).parent
    left_out = {"bench", "testing", "errors.py"}
    found = [
        f"{path.relative_to(package)}: {text}"
        for path in package.rglob("*.py")
        if path.relative_to(package).parts[0] not in left_out
        for text in re.findall(r"\{[\w.]+:[\w.]+\} ?s\b", path.read_text())
    ]
    assert found == []


def test_a_copy_keeps_the_facts() -> None:
    """Process pools pickle an exception to return it."""
    error = copy.copy(errors.CapacityError("m", requested=7, free=3))
    assert (str(error), error.requested, error.free) == ("m", 7, 3)


def test_the_error_of_an_answer_keeps_no_frames() -> None:
    """Nor do those that it came from: their frames would keep a payload until it is collected."""

    def decode() -> None:
        try:
            json.loads("{")
        except ValueError as origin:
            raise WireError("not a header") from origin

    answer: Answer[None] = Answer()
    try:
        decode()
    except WireError as error:
        answer.set_error(error)
    kept = answer.error
    assert kept is not None
    assert isinstance(kept.__cause__, ValueError)
    assert kept.__traceback__ is kept.__cause__.__traceback__ is None
