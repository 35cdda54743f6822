"""Named places in the real code where a test can make a process die, stop, stall or fail.

Armed by the environment before import: `OMNI_KVLINK_FAULT="shm.commit=kill"`; several are joined
by commas. Off, a point costs one comparison. `omni_kvlink.testing.faults` is the public face.
"""

from __future__ import annotations

import os
import signal
import time

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
    """`"a=kill,b=sleep:0.2"` as a dict; refuses a point that does not exist."""
    armed = dict(item.split("=", 1) for item in text.split(",") if item)
    unknown = set(armed) - set(POINTS)
    if unknown:
        raise ValueError(f"{VARIABLE}: no point {sorted(unknown)}; there are {', '.join(POINTS)}")
    return armed


_ARMED = parse(os.environ.get(VARIABLE, ""))


def point(name: str) -> None:
    """Do here what was armed for `name`: kill, stop, `sleep:SECONDS` or `raise`."""
    if _ARMED and name in _ARMED:
        _act(name, _ARMED[name])


def _act(name: str, action: str) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action.startswith("sleep:"):
        time.sleep(float(action[6:]))
    else:
        raise RuntimeError(f"fault armed at {name}")
