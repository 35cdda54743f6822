"""`check_connector`: hold a connector to its contract, one small named check for each behaviour."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from omni_kvlink.testing import (
    append_stream_checks,
    batch_checks,
    delivery_checks,
    ending_checks,
    kept_checks,
    leaving_checks,
    memory_checks,
    path_checks,
    stream_checks,
    zero_copy_checks,
)
from omni_kvlink.testing.link_commands import LinkCommands
from omni_kvlink.testing.peer_harness import Peer, ProcessPeer, ThreadPeer
from omni_kvlink.testing.rig import Rig, naming

if TYPE_CHECKING:
    from types import ModuleType

Check = Callable[[Rig], None]


def checks_of(*modules: ModuleType) -> tuple[Check, ...]:
    """The checks that are defined in these modules, in their order."""
    return tuple(
        function
        for module in modules
        for name, function in vars(module).items()
        if name.startswith("check_") and function.__module__ == module.__name__
    )


CONNECTOR_CHECKS = checks_of(
    delivery_checks,
    ending_checks,
    path_checks,
    memory_checks,
    stream_checks,
    append_stream_checks,
    leaving_checks,
    batch_checks,
    kept_checks,
    zero_copy_checks,
)
"""The checks of `check_connector`, in their order."""


def check_connector(
    make_url: Callable[[], str],
    *,
    options: Mapping[str, Any] | None = None,
    processes: bool = True,
    checks: Iterable[Check] = CONNECTOR_CHECKS,
) -> None:
    """Run every check against one connector.

    Args:
        make_url: returns a URL that was not used before, at each call.
        options: for `KVLink.serve` and `KVLink.connect`.
        processes: readers are in a process of their own; False for connectors within one process.
        checks: those to run.

    Raises:
        CheckFailed: names the first behaviour that is missing.
    """
    peer: Peer = ProcessPeer() if processes else ThreadPeer(LinkCommands())
    try:
        for check in checks:
            run_check(check, Rig(make_url, options or {}, peer))
    finally:
        peer.close()


def run_check(check: Check, rig: Rig) -> None:
    """Run one check on a fresh rig, wait until all memory is free, and close the rig.

    It raises `CheckFailed` if the check raises any error, or leaves memory in use that its readers
    have released.
    """
    try:
        with naming(check):
            check(rig)
            rig.until_freed()
    finally:
        rig.close()
