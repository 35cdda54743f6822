"""Every code block of README and docs is run, or is in the table of those that are not.

Python: the blocks of a page share one namespace, in this process; an `output` block is what the one
before printed. The five-minute start is run as pairs of processes. Shell: `kvlink`, `mkdir` and
`cp` are run; of other commands, targets, options, files, extras and modules must exist.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import yaml

from omni_kvlink import KVCacheBundle, KVCacheTransferData, KVLink, TensorTransferData, errors
from omni_kvlink.adapters import PagedCache
from omni_kvlink.bench import commands as bench
from omni_kvlink.cli.commands import run as kvlink
from omni_kvlink.connectors import registry
from omni_kvlink.engine.entrypoints.deploy import DeployConfig
from omni_kvlink.models.bagel import make_tiny_checkpoint
from omni_kvlink.payload.views import dense
from support.connectors.zmq_addresses import free_port
from support.doc_blocks import DOCS, ROOT, Block, blocks, directory, execute, pages
from support.engine.lora_adapters import bagel_adapter

if TYPE_CHECKING:
    from collections.abc import Iterator

if not DOCS.exists():
    pytest.skip("installed without the sources", allow_module_level=True)

ELSEWHERE = {
    ("docs/ucx.md", "from omni_kvlink import KVLink"): "UCX: tests/connectors/ucx/test_ucx_page.py",
    ("docs/ucx.md", "url = "): "UCX: tests/connectors/ucx/test_ucx_page.py",
    ("docs/transformers.md", "import torch"): "transformers: tests/adapters/test_hf.py",
    ("docs/transformers.md", "5 (1, 1, 128)"): "transformers: tests/adapters/test_hf.py",
    ("docs/vllm_omni.md", "connectors:"): (
        "vLLM-Omni: tests/integrations/vllm_omni/test_vllm_omni_connector.py"
    ),
    ("docs/guides/bagel_in_vllm_omni.md", " connectors:"): (
        "vLLM-Omni: tests/integrations/vllm_omni/test_vllm_omni_connector.py"
    ),
    ("docs/guides/ray.md", "# pass_tensors.py"): "Ray: tests/integrations/ray/test_ray_actors.py",
    ("docs/guides/ray.md", "[3072.0"): "Ray: tests/integrations/ray/test_ray_actors.py",
    ("docs/guides/ray.md", "# settings.py"): "Ray: tests/integrations/ray/test_ray_actors.py",
    ("docs/vllm.md", "vllm serve MODEL "): ("vLLM: tests/integrations/vllm/test_vllm_page.py"),
    ("docs/vllm.md", "python -m dynamo.vllm "): "vLLM: tests/integrations/vllm/test_vllm_page.py",
    ("docs/vllm_tiers.md", "vllm serve MODEL "): "vLLM: tests/integrations/vllm/test_vllm_page.py",
    ("docs/guides/lmcache.md", "lmcache server "): (
        "LMCache: tests/integrations/lmcache/test_lmcache_bench.py"
    ),
    ("docs/guides/lmcache.md", "make .venv-lmcache/.ready"): (
        "LMCache: tests/integrations/lmcache/test_lmcache_bench.py"
    ),
    ("docs/guides/hicache.md", "python -m sglang.launch_server "): (
        "SGLang: tests/integrations/sglang/test_hicache_backend.py"
    ),
    ("docs/vllm_encoder.md", 'vllm serve MODEL --ec-transfer-config \'{"ec_connector": '): (
        "vLLM: tests/integrations/vllm/test_vllm_encoder_page.py"
    ),
    ("docs/guides/store.md", "pip install ."): "processes: tests/kept/test_store_page.py",
    ("docs/guides/store.md", "# writer.py"): "processes: tests/kept/test_store_page.py",
    ("docs/guides/store.md", "# reader.py"): "processes: tests/kept/test_store_page.py",
    ("docs/guides/store.md", "[True, False]"): "processes: tests/kept/test_store_page.py",
}
"""Blocks that a suite of a host runs, by page and the beginning of their first line."""

NOT_RUN = {
    ("docs/engine.md", "stages:"): "its addresses and key files are those of a Ray cluster",
    ("docs/transformers.md", "  found   36158 of 46006"): "figures of one run, on one machine",
}
"""Blocks that nothing runs, and why."""

PAIRS = {
    "Send a cache to another process": "28 layers",
    "Send any tensors": "torch.Size([64, 896]) {'finished': False}",
    "Send between machines": "tensor(57344.)",
}
"""Sections of the start with a producer's and a consumer's script; what the consumer prints."""

START = "docs/start.md"

ALL = {page: blocks(page) for page in pages()}


def is_in(table: dict[tuple[str, str], str], block: Block) -> bool:
    return any(block.page == page and block.first.startswith(first) for page, first in table)


def runs_here(block: Block) -> bool:
    in_a_pair = block.page == START and block.section in PAIRS
    return not (in_a_pair or is_in(ELSEWHERE, block) or is_in(NOT_RUN, block))


def python_of(page: str) -> list[Block]:
    return [one for one in ALL[page] if one.language in ("python", "output") and runs_here(one)]


def layers(count: int, tokens: int, *row: int, value: float | None = None) -> list[torch.Tensor]:
    """Random tensors, or bfloat16 ones of this value."""
    if value is not None:
        return [torch.full((tokens, *row), value, dtype=torch.bfloat16) for _ in range(count)]
    return [torch.randn(tokens, *row) for _ in range(count)]


def cache(request_id: str) -> KVCacheTransferData:
    metadata = {"kv_lens": [40], "ropes": [40], "num_layers": 2}
    tensors = {"key_cache": layers(2, 40, 4, 128), "value_cache": layers(2, 40, 4, 128)}
    return KVCacheTransferData(request_id, tensors, metadata=metadata)


class Model:
    """Computes two layers of ones."""

    def layers(self, prompt: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield from zip(*(layers(2, 40, 4, 128, value=1.0) for _ in range(2)), strict=True)

    def steps(self, prompt: str) -> Iterator[torch.Tensor]:
        yield from (torch.full((2, 128), float(step)) for step in range(9))


@contextlib.contextmanager
def sending() -> Iterator[dict[str, Any]]:
    """What the fragments of "Send and receive" need, over a link that has all features."""
    pools = [layers(2, 12, 16, 4, 128) for _ in range(4)]
    fifth, mine = cache("req-5"), layers(4, 40, 4, 128)
    keys, values = (layers(2, 40, 4, 128, value=0.0) for _ in range(2))
    spoken = list[float]()
    with (
        KVLink.serve("zmq+tcp://127.0.0.1:0", quota=1 << 28) as producer,
        KVLink.connect(producer.url, timeout=5.0, quota=1 << 28) as consumer,
    ):
        direct = threading.Thread(  # a direct put waits for its reader
            target=lambda: consumer.get("direct", timeout=60.0).release()
        )
        direct.start()
        producer.put(fifth)
        yield {
            "torch": torch,
            "KVCacheTransferData": KVCacheTransferData,
            "producer": producer,
            "consumer": consumer,
            "cache": cache("req-1"),
            "bundle": KVCacheBundle("req-0", {"gen": cache("req-0")}),
            "states": TensorTransferData("direct", {"hidden": torch.ones(4, 8)}),
            "plan": cache("req-7"),
            "key_pools": pools[0],
            "value_pools": pools[1],
            "free_blocks": PagedCache(pools[2], pools[3], block_size=16, block_ids=[1, 4, 3]),
            "my_tensors": mine,
            "model": Model(),
            "talker": lambda hidden: spoken.append(hidden.mean().item()),
            "prompt": "",
            "step": [(f"many-{number}", torch.full((1, 8), float(number))) for number in (9, 10)],
            "my_keys": keys,
            "my_values": values,
        }
        direct.join()
        for kind in (0, 1):
            assert torch.equal(pools[2 + kind][0][4], pools[kind][0][2])
        assert all(
            torch.equal(one, dense(other)) for one, other in zip(mine, fifth.tensors(), strict=True)
        )
        assert all(one.min() == 1 for one in [*keys, *values])
        assert spoken == [*range(11), 8]  # the last: what the stream had sent last


@contextlib.contextmanager
def engine() -> Iterator[dict[str, Any]]:
    """A tiny checkpoint, an adapter, and a deployment of two stages."""
    checkpoint = make_tiny_checkpoint("tiny")
    bagel_adapter(Path("adapters"))
    params = "default_sampling_params: {height: 32, width: 32}"
    Path("bagel.yaml").write_text(
        "stages:\n  - {stage_id: 0, own_process: true}\n"
        f"  - {{stage_id: 1, input_connectors: {{from_stage_0: wire}}, {params}}}\n"
        "connectors:\n  wire: {name: SharedMemoryConnector}\n"
    )
    photo = torch.randint(0, 255, (32, 32, 3), dtype=torch.uint8)
    namespace: dict[str, Any] = {"checkpoint": checkpoint, "photo": photo}
    yield namespace
    assert len(namespace["images"]) == 2


PRELUDES = {"docs/sending.md": sending, "docs/engine.md": engine}
PYTHON = [page for page in ALL if any(one.language == "python" for one in python_of(page))]


@pytest.fixture
def here(tmp_path: Path, sockets: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory of its own, and sockets in a directory of their own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", sockets)
    # A page registers a connector, which has no opposite: the table is restored after it.
    monkeypatch.setattr(registry, "_ROWS", dict(registry._ROWS))
    monkeypatch.syspath_prepend(str(tmp_path))
    with directory(tmp_path):
        yield tmp_path
    with contextlib.suppress(FileNotFoundError):
        (Path(sockets) / "kvlink" / "user.secret").unlink(missing_ok=True)
        (Path(sockets) / "kvlink").rmdir()  # no socket is left


def run_commands(found: list[Block]) -> None:
    """Run those of these blocks that make files."""
    for block in found:
        if block.language == "sh":
            for argv in commands(block.text):
                if argv[0] in RUN:
                    RUN[argv[0]](argv)


@pytest.mark.parametrize("page", PYTHON)
def test_the_python_of_a_page_runs(page: str, here: Path) -> None:
    run_commands([block for block in ALL[page] if runs_here(block)])
    with PRELUDES.get(page, lambda: contextlib.nullcontext({}))() as namespace:
        execute(python_of(page), namespace)
        if page == "docs/sending.md":
            namespace.clear()


@pytest.mark.parametrize("section", PAIRS)
def test_the_scripts_of_the_start_run_in_two_processes(section: str, here: Path) -> None:
    found = [block for block in ALL[START] if block.section == section]
    run_commands(found)
    scripts = [block.text for block in found if block.language == "python"]
    assert len(scripts) == 2
    assert all(script.count("\n") <= 15 for script in scripts)
    port = free_port()
    scripts = [script.replace(":27000", f":{port}") for script in scripts]
    assert section != "Send between machines" or all(f":{port}" in script for script in scripts)
    producer, consumer = (
        subprocess.Popen(
            [sys.executable, "-W", "error::ResourceWarning", "-c", script],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for script in scripts
    )
    with producer, consumer:
        output, _ = consumer.communicate()
        assert (producer.wait(), consumer.returncode) == (0, 0)
    assert PAIRS[section] in output


def test_every_block_has_a_language_that_is_checked() -> None:
    found = {block.language for page in ALL.values() for block in page}
    assert found == {"python", "output", "sh", "yaml", "toml", "text", "diff"}
    patches = [block for page in ALL.values() for block in page if block.language == "diff"]
    assert all(is_in(ELSEWHERE, block) for block in patches)


@pytest.mark.parametrize("table", [ELSEWHERE, NOT_RUN], ids=["elsewhere", "not run"])
def test_the_tables_name_blocks_that_exist(table: dict[tuple[str, str], str]) -> None:
    for (page, first), reason in table.items():
        assert reason
        assert any(block.first.startswith(first) for block in ALL[page]), (page, first)
    if table is ELSEWHERE:
        assert all((ROOT / reason.partition(": ")[2]).exists() for reason in table.values())


# Shell


def commands(text: str) -> Iterator[list[str]]:
    """The arguments of each command; quotes may go over several lines."""
    pending = ""
    for line in text.splitlines():
        pending += line + "\n"
        try:
            argv = shlex.split(pending, comments=True)
        except ValueError:  # an open quote
            continue
        pending = ""
        while argv:
            end = argv.index("&&") if "&&" in argv else len(argv)
            yield argv[:end]
            argv = argv[end + 1 :]
    assert not pending, pending


def run_kvlink(argv: list[str]) -> None:
    with contextlib.redirect_stdout(None):
        assert kvlink(argv[1:]) == 0


def run_program(argv: list[str]) -> None:
    subprocess.run(argv, check=True)


Command = Callable[[list[str]], None]
RUN: dict[str, Command] = {"kvlink": run_kvlink, "mkdir": run_program, "cp": run_program}
MAKEFILE = (ROOT / "Makefile").read_text()
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def check_make(argv: list[str]) -> None:
    for target in argv[1:]:
        if "=" not in target:
            versioned = re.sub(r"\d.*", "%", target)
            assert re.search(rf"^({target}|{versioned}):", MAKEFILE, re.MULTILINE), argv


def check_pip(argv: list[str]) -> None:
    """`install`: this package and its extras; files that exist; versions that the project pins."""
    assert argv[1] == "install"
    pins = "".join((ROOT / name).read_text() for name in ("Makefile", "constraints.txt"))
    for number, word in enumerate(argv[2:], 2):
        if argv[number - 1] == "-r":
            assert (ROOT / word).exists(), argv
        elif extras := re.search(r"\[([\w,]+)\]", word):
            for extra in extras[1].split(","):
                assert re.search(rf"^{extra} = ", PYPROJECT, re.MULTILINE), argv
        elif not word.startswith("-") and word not in (".", "omni-kvlink"):
            assert word in pins or word.endswith(".*"), argv


def check_python(argv: list[str]) -> None:
    """The module or script exists, and so does each option; the code of `-c` runs."""
    if argv[1] == "-c":
        with contextlib.redirect_stdout(None):
            exec(argv[2], {})
        return
    if argv[1] == "-m":
        module, options = argv[2], argv[3:]
        assert module in ("pytest", "pip") or importlib.util.find_spec(module), argv
        if module == "pydoc":
            assert importlib.util.find_spec(argv[3]), argv
        return
    script, options = ROOT / argv[1], argv[2:]
    assert script.exists(), argv
    for option in options:
        if option.startswith("--"):
            assert f'"{option.partition("=")[0]}"' in script.read_text(), (argv, option)


def check_bench(argv: list[str]) -> None:
    bench.parse(argv[1:])


def check_script(argv: list[str]) -> None:
    assert (ROOT / argv[1]).exists(), argv


def is_run(argv: list[str]) -> None:
    assert argv[0] in RUN


CHECKS: dict[str, Command] = {
    "make": check_make,
    "pip": check_pip,
    "python": check_python,
    ".venv/bin/python": check_python,
    "kvlink-bench": check_bench,
    "bash": check_script,
    **dict.fromkeys(RUN, is_run),
}


@pytest.mark.parametrize("page", ALL)
def test_the_commands_of_a_page_exist(page: str) -> None:
    """Those of blocks, and those in the text."""
    for block in ALL[page]:
        if block.language == "sh" and not is_in(ELSEWHERE, block):
            for argv in commands(block.text):
                CHECKS[argv[0]](argv)
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    for command in re.findall(r"`((?:make|kvlink-bench|python|\.venv/bin/python) [^`]+)`", text):
        if "…" not in command and "DIR" not in command:
            for argv in commands(re.sub(r"\[(.*?)\]", r"\1", command)):
                CHECKS[argv[0]](argv)


# Files and diagrams


@pytest.mark.parametrize("page", ALL)
def test_the_yaml_of_a_page_is_read(page: str) -> None:
    for block in ALL[page]:
        if block.language == "yaml" and not is_in(ELSEWHERE, block):
            found = yaml.safe_load(block.text)
            name = next(iter(found.setdefault("connectors", {"wire": {"name": "KVLinkConnector"}})))
            second = {"stage_id": 1, "input_connectors": {"from_stage_0": name}}
            stages = found.get("stages", [{"stage_id": 0}, second])
            whole = {"pipeline": "bagel", **found, "stages": stages}
            assert DeployConfig.from_dict(whole).stages[1].connector


def test_the_entry_point_is_of_the_group_that_is_read() -> None:
    tables = [one for page in ALL.values() for one in page if one.language == "toml"]
    assert tables
    for block in tables:
        assert block.first == f'[project.entry-points."{registry.GROUP}"]'


def test_the_tree_of_errors() -> None:
    def lines(error: type[Exception], indent: str) -> Iterator[str]:
        children = [one for one in vars(errors).values() if isinstance(one, type)]
        children = [one for one in children if error in one.__bases__]
        for child in children:
            is_last = child is children[-1]
            builtin = ", ".join(base.__name__ for base in child.__bases__ if base is not error)
            name = f"{child.__name__}({builtin})" if builtin else child.__name__
            yield f"{indent}{'└' if is_last else '├'}─ {name}"
            yield from lines(child, indent + ("    " if is_last else "│   "))

    expected = ["KVLinkError", *lines(errors.KVLinkError, " ")]
    for page in ("docs/errors.md", "docs/architecture.md"):
        trees = [one.text for one in ALL[page] if one.first.startswith("KVLinkError")]
        found = [re.sub(r"  +[^ ├└│].*", "", line).rstrip() for line in trees[0].splitlines()]
        assert found == expected


def test_the_demos_verdict() -> None:
    printed = (ROOT / "examples" / "bagel_director.py").read_text()
    block = next(one for one in ALL["README.md"] if one.first.startswith("text-to-image"))
    for line in block.text.splitlines()[1:]:
        assert line.replace("bit-exact", "{'bit-exact' ") in printed
