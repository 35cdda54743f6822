"""What child processes have of UCX: no descriptor after an exec, no use of it after a fork."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from omni_kvlink.connectors import ucx

if importlib.util.find_spec("ucxx") is None:
    pytest.skip(str(ucx.unavailable()), allow_module_level=True)

from support.connectors.ucx_killed_process import PATIENCE

START = """
import os, signal, subprocess, sys
from omni_kvlink import ClosedError, KVLink, TensorTransferData, UnavailableError
import torch

URL = "ucx://127.0.0.1:0?trusted_network=1"

def deliver(producer, reader, key, count=1 << 20):
    data = torch.arange(count, dtype=torch.int64)
    receipt = producer.put(TensorTransferData(key, {"t": data}))
    with reader.get(key, timeout=60) as found:
        assert torch.equal(found["t"], data)
    del found
    receipt.wait(timeout=60)
"""

INHERITED = """
def inherited():
    code = "import os; print([os.readlink(f'/proc/self/fd/{fd}') for fd in range(3, 200) " \\
           "if os.path.exists(f'/proc/self/fd/{fd}') or os.path.islink(f'/proc/self/fd/{fd}')])"
    return eval(subprocess.check_output([sys.executable, "-c", code], close_fds=False))

def inheritable():
    flags = {}
    for fd in os.listdir("/proc/self/fd"):
        if int(fd) > 2 and os.path.islink(f"/proc/self/fd/{fd}"):
            if os.get_inheritable(int(fd)):
                flags[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return flags

assert (inherited(), inheritable()) == ([], {})
with KVLink.serve(URL) as producer, KVLink.connect(producer.url, timeout=60) as reader:
    deliver(producer, reader, "a")
    assert (inherited(), inheritable()) == ([], {}), (inherited(), inheritable())
    with KVLink.serve(URL) as other, KVLink.connect(other.url, timeout=60) as another:
        with KVLink.connect(producer.url, timeout=60) as third:
            deliver(other, another, "b")
            deliver(producer, third, "c")
            assert (inherited(), inheritable()) == ([], {}), (inherited(), inheritable())
"""

FORKED = """
def in_child(check):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            check()
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def cannot_open():
    for end, how in ((KVLink.serve, {}), (KVLink.connect, {"timeout": 60})):
        try:
            end(URL.replace(":0?", ":7009?"), **how)
        except UnavailableError as error:
            assert "spawn" in str(error) and "forked" in str(error), error
        else:
            raise AssertionError("it was opened")
    with KVLink.serve(f"auto://forked-{os.getpid()}?tcp=127.0.0.1:0&trusted_network=1") as auto:
        assert "quarantined" not in str(auto.stats()), auto.stats()

def cannot_use():
    for use in (lambda: producer.abort("k", "x"), lambda: reader.get("k", timeout=1)):
        try:
            use()
        except ClosedError as error:
            assert "spawn" in str(error), error
        else:
            raise AssertionError("it worked")

def works():
    with KVLink.serve(URL) as own, KVLink.connect(own.url, timeout=60) as mine:
        deliver(own, mine, "a")

assert in_child(works) == 0  # UCX was not used before
with KVLink.serve(URL) as producer, KVLink.connect(producer.url, timeout=60) as reader:
    deliver(producer, reader, "a")
    assert in_child(cannot_use) == 0
    assert in_child(cannot_open) == 0
    deliver(producer, reader, "b")
assert in_child(cannot_open) == 0
"""


@pytest.mark.parametrize("script", [INHERITED, FORKED], ids=["exec", "fork"])
def test_a_child_process(script: str) -> None:
    """Nothing of UCX is inherited by an exec; a forked child is told to start by spawn."""
    done = subprocess.run(
        [sys.executable, "-c", START + script], capture_output=True, timeout=PATIENCE, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
