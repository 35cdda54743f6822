"""The scripts of the README's five-minute start, each copied into a file and run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
MOST_LINES = 15
pytestmark = pytest.mark.skipif(not README.exists(), reason="installed without the sources")


def blocks(section: str, language: str) -> list[str]:
    """The code blocks of one language below a heading of the README."""
    text = README.read_text().partition(f"### {section}\n")[2]
    body = re.split(r"^##", text, maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(rf"```{language}\n(.*?)```", body, re.DOTALL)


@pytest.mark.parametrize(
    ("section", "output"),
    [
        ("Send a cache to another process", "28 layers"),
        ("Send any tensors", "torch.Size([64, 896]) {'finished': False}"),
        ("Send between machines", "tensor(57344.)"),
    ],
)
def test_the_readmes_code_runs(section: str, output: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(tmp_path)}
    for commands in blocks(section, "sh"):
        kvlink = f"{sys.executable} -c 'from omni_kvlink.cli.main import main; main()' "
        script = commands.replace("kvlink ", kvlink)
        subprocess.run(["sh", "-ec", script], cwd=tmp_path, env=environment, check=True)
    scripts = blocks(section, "python")
    assert len(scripts) == 2
    assert all(script.count("\n") <= MOST_LINES for script in scripts)
    producer, consumer = (
        subprocess.Popen(
            [sys.executable, "-W", "error::ResourceWarning", "-c", script],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
        )
        for script in scripts
    )
    found, _ = consumer.communicate(timeout=100)
    assert (producer.wait(timeout=100), consumer.returncode) == (0, 0)
    assert output in found.decode()
    assert producer.stdout is not None
    producer.stdout.close()


@pytest.mark.parametrize("example", ["first_cache", "nested_tensors", "tcp_with_keys"])
def test_the_example(example: str) -> None:
    script = ROOT / "examples" / f"{example}.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, str(script)], env=environment, check=True, timeout=100)
