"""What the README shows runs: its code, and the demo with a verdict that can be lost."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from omni_kvlink.cli.commands import run as kvlink
from support.engine.fixtures import WAIT
from support.processes.fork_server import NESTED

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "bagel_two_stage.py"
TWO_HOSTS = ROOT / "examples" / "two_hosts.sh"


def run(script: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(script), *options],
        capture_output=True,
        text=True,
        timeout=2 * WAIT,
        env={**os.environ, NESTED: "1", **environment},
        check=False,
    )


def run_demo(out: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    name = f"shm://demo-{os.getpid()}"
    common = ["--out", str(out), "--url", name, "--steps", "4"]
    return run(DEMO, *common, *options, **environment)


@pytest.mark.parametrize(
    ("options", "copies"),
    [
        (["--dtype", "bfloat16"], "with 1 copy;"),
        (["--dtype", "float32", "--stream"], "with 1 copy;"),
        (["--in-place"], "with 0 copies;"),
    ],
)
def test_the_demo_ends_with_images_and_a_good_verdict(
    tmp_path: Path, options: list[str], copies: str
) -> None:
    if "--in-place" in options:  # room for one request: the second waits until it is released
        options = [*options, "--url", f"shm://demo-{os.getpid()}?quota=300000"]
    done = run_demo(tmp_path, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(copies) == 2
    streamed = [f"received in {layers} layers" in done.stdout for layers in (3, 6)]
    assert streamed == ["--stream" in options] * 2
    assert done.stdout.count("K/V   bit-exact") == 2
    assert done.stdout.count("image bit-exact") == 2
    assert "bytes not sent" in done.stdout
    for name in ("text-to-image", "image-edit"):
        image = np.asarray(Image.open(tmp_path / f"{name}.png").convert("L"))
        assert image.min() < image.max(), f"{name} is one flat colour"
        strip = np.asarray(Image.open(tmp_path / f"{name}-previews.png").convert("L"))
        assert strip.shape == (image.shape[0], 3 * image.shape[1])  # three denoising steps
        assert (strip[:, -image.shape[1] :] == image).all()
        assert (strip[:, : image.shape[1]] != image).any()
    assert done.stdout.count("  text  same tokens") == 1
    assert "random tiny weights" in done.stdout
    assert "The same: 2 requests" in done.stdout.splitlines()[-2]
    answer = r"image-edit: what is in the image\?\n +(\d+) tokens in .*\n +token ids: ([\d ]+)\n"
    found = re.search(answer, done.stdout)
    assert found
    assert len(found[2].split()) == int(found[1])
    assert done.stdout.index("first use of the link") < done.stdout.index("text-to-image: prefill")


@pytest.mark.parametrize(
    ("how", "pairs"), [(["--in-place", "--stream"], []), (["--direct"], ["producer", "consumer"])]
)
def test_the_demo_over_tcp_at_any_port_and_encrypted(
    tmp_path: Path, how: list[str], pairs: list[str]
) -> None:
    """With pairs that the demo makes, and with those of the `kvlink keygen` lines of start.md."""
    keys = str(tmp_path / "keys")
    for name in pairs:
        assert kvlink(["keygen", keys, name]) == 0
    made = {file: file.read_bytes() for file in tmp_path.glob("keys/*")}
    link = ["--url", "zmq+tcp://127.0.0.1:0", "--keys", keys]
    done = run_demo(tmp_path, *link, *how, "--timeout", "120")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"serves zmq\+tcp://127.0.0.1:[1-9]", done.stdout)
    assert done.stdout.count("bit-exact") == 4
    assert done.stdout.count("with 0 copies;") == 2
    assert len(list(tmp_path.glob("keys/*"))) == 4
    assert all(file.read_bytes() == key for file, key in made.items())


def test_the_demo_names_a_key_that_is_missing(tmp_path: Path) -> None:
    kvlink(["keygen", str(tmp_path / "keys"), "producer"])
    (tmp_path / "keys" / "producer.secret").unlink()
    done = run_demo(tmp_path, "--url", "zmq+tcp://127.0.0.1:0", "--keys", str(tmp_path / "keys"))
    assert done.returncode == 1
    assert done.stderr.startswith(f"{tmp_path}/keys/producer.public exists; remove it")
    assert done.stderr.count("\n") == 1


def two_hosts(out: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            str(TWO_HOSTS),
            "zmq+tcp://10.77.0.1:0",
            "--steps",
            "2",
            "--timeout",
            "120",
            "--out",
            str(out),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "TMPDIR": str(out)},
    )


def left_behind(script: subprocess.Popen[str], out: Path) -> list[Path]:
    return [*Path("/run/netns").glob(f"*-{script.pid}"), *out.glob("tmp*")]


def test_two_hosts(tmp_path: Path) -> None:
    with two_hosts(tmp_path) as script:
        output, errors = script.communicate(timeout=2 * WAIT)
    if script.returncode == 77:
        pytest.skip(errors)
    assert script.returncode == 0, output + errors
    assert output.count("bit-exact") == 4
    sent = re.search(r"AR host sent (\d+) bytes", output)
    assert sent
    assert int(sent[1]) > 20_992 + 19_392 + 146_368, "not all of it went over the cable"
    assert left_behind(script, tmp_path) == []


def test_two_hosts_interrupted(tmp_path: Path) -> None:
    with two_hosts(tmp_path) as script:
        deadline = time.monotonic() + WAIT
        while script.poll() is None and len(left_behind(script, tmp_path)) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        script.terminate()
        _, errors = script.communicate(timeout=WAIT)
    if script.returncode == 77:
        pytest.skip(errors)
    assert script.returncode == 143, errors
    assert left_behind(script, tmp_path) == []


def test_the_demo_says_when_its_capacity_is_too_small(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--in-place", "--capacity", "100")
    assert done.returncode == 1
    output = "image-edit: the cache has a capacity of 100 tokens, wanted 258"
    assert output in done.stderr
    assert "the ar stage failed with status 1" in done.stdout
    assert "bit-exact" not in done.stdout


def test_the_demo_fails_loudly_when_a_stage_dies(tmp_path: Path) -> None:
    done = run_demo(tmp_path, OMNI_KVLINK_FAULT="put.copied=kill")
    assert done.returncode == 1
    assert "the ar stage failed with status -9" in done.stdout
    assert "the dit stage failed" in done.stdout
    assert "bit-exact" not in done.stdout
    assert "The same" not in done.stdout


def test_the_streaming_example_receives_every_layer() -> None:
    done = run(ROOT / "examples" / "streaming.py")
    assert done.returncode == 0, done.stderr
    times = re.findall(r"layer \d: written at +([\d.]+) ms, there at +([\d.]+) ms", done.stdout)
    assert len(times) == 8


def test_the_growing_example_is_bit_exact() -> None:
    done = run(ROOT / "examples" / "growing.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("▒") >= 10
    assert "10240 bytes of audio, bit for bit those of one process" in done.stdout
