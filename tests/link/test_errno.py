"""Each system call of the public API fails once: what leaves it is an error of the library."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

from support import FOLDER

HERE = FOLDER / "link"


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("no C compiler, or no LD_PRELOAD")
    built = str(tmp_path_factory.mktemp("shim") / "errno_shim.so")
    options = ("-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-fno-builtin")
    source = str(HERE / "errno_shim.c")
    subprocess.run([compiler, *options, "-o", built, source, "-ldl"], check=True)
    return built


def run(shim: str, directory: str, *plans: str) -> list[dict[str, Any]]:
    """Run cases as `errno_cases.py` takes them; for each plan their number."""
    program = [sys.executable, str(HERE / "errno_cases.py"), directory, *plans]
    environment = {**os.environ, "LD_PRELOAD": shim}
    done = subprocess.run(program, env=environment, stdout=subprocess.PIPE, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    found = [f"{line['case']}: {text}" for line in lines for text in line.get("wrong", ())]
    assert not found, "\n".join(found)
    assert done.returncode == 0
    totals = [line for line in lines if "cases" in line]
    assert len(totals) == len(plans)
    return totals


@pytest.mark.timeout(600)
def test_some_calls_fail(shim: str, sockets: str) -> None:
    """Some by chance, and all of a few functions."""
    chosen = "shm:12", "ipc:8", "tcp:4", "files:25"
    zmq = "ipc:0:zmq_connect", "ipc:0:zmq_socket_monitor", "tcp:0:zmq_bind", "tcp:0:stat"
    plans = *chosen, "shm:0:fstat", *zmq, "ipc:0:pthread_create", "shm:0:epoll_ctl"
    totals = run(shim, f"{sockets}/d", *plans)
    shutil.rmtree(f"{sockets}/d")
    shm, ipc, tcp, files, fstat, connects, monitors, binds, stats, threads, watches = totals
    assert [total["of"] for total in (shm, ipc, tcp, files)] == [12, 8, 4, 25]
    assert all(total["cases"] > total["of"] / 2 for total in totals)
    assert fstat["cases"] == fstat["of"] >= 2
    assert connects["cases"] == connects["of"] >= 9
    assert monitors["cases"] == monitors["of"] >= 4
    assert binds["cases"] == binds["of"] >= 10
    assert stats["cases"] == stats["of"] >= 20
    assert threads["cases"] == threads["of"] >= 3
    assert watches["of"] >= 20
    assert shm["calls"]["memfd_create"]
    assert ipc["calls"]["zmq_bind"]
    assert tcp["calls"]["zmq_bind"]
    assert files["calls"]["rename"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scheme", ["shm", "ipc", "tcp", "files"])
def test_every_call_fails(shim: str, sockets: str, scheme: str) -> None:
    (total,) = run(shim, f"{sockets}/d", f"{scheme}:0")
    shutil.rmtree(f"{sockets}/d")
    print(f"{scheme}: {total['cases']} of {total['of']} cases, calls {total['calls']}")
    assert total["cases"] > 0.8 * total["of"]
