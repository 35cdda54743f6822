"""Named points of the code at which a test can make the process die, stop, stall or fail.

They are armed by the environment before import: `OMNI_KVLINK_FAULT="publish.before=kill"`; several
are separated by commas. `omni_kvlink.testing.faults` is the public interface.

    fault_points.point("publish.before")

A point that is not armed costs a look into an empty dict.
"""

from __future__ import annotations

import os
import re
import signal
import time
from typing import TYPE_CHECKING

from omni_kvlink.errors import SchemaError
from omni_kvlink.settings import check_names, shown

if TYPE_CHECKING:
    from collections.abc import Callable

VARIABLE = "OMNI_KVLINK_FAULT"
POINTS = (
    "put.reserved",
    "put.copied",
    "put.encoded",
    "stream.layer",
    "publish.before",
    "publish.after",
    "get.offered",
    "get.mapped",
    "fetch.chunk",
    "send.chunk",
)


def parse(text: str) -> dict[str, str]:
    """Return `"a=kill,b=sleep:0.2"` as a dict; SchemaError if it is something else."""
    pairs = [item.partition("=") for item in text.split(",") if item]
    check_names((name for name, _, _ in pairs), POINTS, f"{VARIABLE}: ")
    for name, _, action in pairs:
        if not re.fullmatch(r"kill|stop|raise|sleep:[0-9]+(\.[0-9]+)?", action):
            actions = "wanted kill, stop, raise or sleep:SECONDS"
            raise SchemaError(f"{VARIABLE}: {name}={shown(action)}: {actions}")
    return {name: action for name, _, action in pairs}


_ARMED = parse(os.environ.get(VARIABLE, ""))


def _act(name: str) -> None:
    """Do what was armed for this point: `kill`, `stop` (once), `sleep:SECONDS` or `raise`."""
    action = _ARMED.get(name, "")
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        del _ARMED[name]
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action.startswith("sleep:"):
        time.sleep(float(action[6:]))
    elif action:
        raise RuntimeError(f"fault armed at {name}")


point: Callable[[str], object] = _act if _ARMED else _ARMED.get
"""Marks a named point. The tests replace it."""
