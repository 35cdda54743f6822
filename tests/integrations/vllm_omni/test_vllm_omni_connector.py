"""The connector's own verbs, as vLLM-Omni's loops call them; both ends in this process."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import itertools
import linecache
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import yaml

pytest.importorskip("vllm_omni", reason="make test-vllm-omni installs it")

from omni_kvlink import (
    ClosedError,
    ConnectorError,
    DuplicateKeyError,
    IntegrityError,
    SchemaError,
    TransferFailed,
    TransferTimeout,
)
from omni_kvlink.integrations.vllm_omni import register
from omni_kvlink.integrations.vllm_omni.connector import VllmOmniConnector
from omni_kvlink.integrations.vllm_omni.settings import OmniSettings
from omni_kvlink.integrations.vllm_omni.stage_edges import StageEdge
from omni_kvlink.lowlevel import LazyEvent, Options
from omni_kvlink.testing.rig import until
from support.link.ends import end_of
from support.vllm_omni.stage import NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from omni_kvlink import KVConsumer, PeerLostError

# Reaches into _closed, _links, _lock, _pending: `health()` says what the other side sees; what is
# kept here of gets that are over costs memory, and shows nowhere.

EDGE = ("0", "1")
CACHE = "omni_0_to_1_kv_cache_r"
ROOT = Path(__file__).resolve().parents[3]
_names = itertools.count()


@pytest.fixture(params=["shm", "zmq+ipc", "zmq+tcp", "ucx"])
def ends(
    request: pytest.FixtureRequest, sockets: str
) -> Iterator[tuple[VllmOmniConnector, VllmOmniConnector]]:
    if request.param == "ucx" and importlib.util.find_spec("ucxx") is None:
        pytest.skip("ucxx is not installed: pip install 'omni-kvlink[ucx]'")
    name = f"c{next(_names)}"
    with make(request.param, sockets, name) as sender, make(request.param, sockets, name) as reader:
        yield sender, reader


def make(transport: str, sockets: str, name: str) -> VllmOmniConnector:
    """A connector whose `wait` is an hour: a call that waits so long hangs its test."""
    is_ucx = transport == "ucx"
    options = {"directory": sockets, "quota": 64 << 20, "trusted_network": is_ucx}
    section = {"transport": transport, "name": name, "options": options, "wait": 3600.0}
    return VllmOmniConnector({"kvlink": section})


def packed(tokens: int = 3) -> bytes:
    """A cache as the manager packs it, by the manager's own class."""
    from vllm_omni.distributed.omni_connectors.kv_transfer_manager import KVCacheTransferData

    layers = [torch.arange(tokens * 8).reshape(tokens, 2, 4).float() + i for i in range(4)]
    blocks = {"key_cache": layers[:2], "value_cache": layers[2:]}
    data: bytes = KVCacheTransferData("r", blocks, [0], {"seq_len": tokens}).to_bytes()
    return data


CHUNK = {
    "codes": {"audio": torch.arange(12, dtype=torch.int64).reshape(3, 4)},
    "meta": {"finished": True, "left": 3, "name": "ein Füchslein", "none": None},
    "raw": b"\x00\xff",
    "ids": [1, 2, 3],
}


def test_a_required_path(sockets: str) -> None:
    """Where only a socket is, neither side is given RDMA; a receiver's refusal is counted, too."""
    section: dict[str, Any] = {"transport": "zmq+ipc", "name": f"c{next(_names)}"}
    section["options"] = {"directory": sockets}
    unmet = "require='rdma', and the path is zmq.ipc "
    strict = {"sender": {"require": "rdma"}, "receiver": {"require": ["rdma"]}}
    with (
        VllmOmniConnector({"kvlink": section}) as sender,
        VllmOmniConnector({"kvlink": {**section, **strict}}) as reader,
    ):
        with pytest.raises(ConnectorError, match=unmet):
            reader.put(*EDGE, "r_0_0", CHUNK)
        assert sender.put(*EDGE, "r_0_0", CHUNK)[0]
        with pytest.raises(ConnectorError, match=unmet):
            reader.get(*EDGE, "r_0_0")
        [link] = sender.health()["links"]
        assert (link["refused"]["path"], link["path"]) == (1, [])
    with pytest.raises(SchemaError, match=r"require\[0\]='smh'.*did you mean shm"):
        VllmOmniConnector({"kvlink": {**section, "options": {"require": "smh"}}})


def test_a_chunk_arrives_as_it_was(ends: tuple[Any, Any]) -> None:
    sender, reader = ends
    assert sender.put(*EDGE, "r_0_0", CHUNK)[0]
    got = polled(reader, "r_0_0")
    assert torch.equal(got["codes"].pop("audio"), CHUNK["codes"]["audio"])  # type: ignore[index]
    assert got == {**CHUNK, "codes": {}}


def test_hidden_states_arrive_as_they_were(ends: tuple[Any, Any]) -> None:
    """As tensors, in whatever order they lie; what arrives is the receiver's own."""
    sender, reader = ends
    hidden = torch.randn(300, 512).to(torch.bfloat16)
    sender.put(*EDGE, "r_0_0", {"layers": {0: hidden, 24: hidden.T[::2]}, "left": 3})
    got = polled(reader, "r_0_0")
    assert (got["left"], list(got["layers"])) == (3, [0, 24])
    assert torch.equal(got["layers"][0].add_(0), hidden)
    assert torch.equal(got["layers"][24], hidden.T[::2])
    until(lambda: sender.health()["unread"] == 0, "the link's memory is free again")


def polled(reader: Any, key: str, timeout: float = 5.0) -> Any:
    """As the chunk adapter's loop: ask, and a millisecond later ask again."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        found = reader.get(*EDGE, key)
        if found is not None:
            return found[0]
        time.sleep(0.001)
    raise AssertionError(f"{key} did not come")


def test_polling_many_keys_asks_once_and_holds_nobody_up(ends: tuple[Any, Any]) -> None:
    sender, reader = ends
    sender.put(*EDGE, "first_0_0", 1)
    assert polled(reader, "first_0_0") == 1  # connected
    keys = [f"r{i}_0_0" for i in range(8)]
    for _ in range(5):
        assert [reader.get(*EDGE, key) for key in keys] == [None] * 8
    assert reader.health()["links"][0]["waiting"] == 8
    for key in reversed(keys):
        sender.put(*EDGE, key, key)
    assert [polled(reader, key) for key in keys] == keys
    assert len(reader._pending) == 0


class WaitlessEvent(LazyEvent):
    """An event that notes for how long it is waited for, and does not wait."""

    __slots__ = ("_waits",)

    def __init__(self, waits: list[float]):
        super().__init__()
        self._waits = waits

    def wait(self, timeout: float) -> bool:
        self._waits.append(timeout)
        return self.is_set()


def test_gets_that_are_pending_share_the_wait(
    ends: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round of an engine's loop takes no longer because many requests wait."""
    sender, reader = ends
    sender.put(*EDGE, "first_0_0", 1)
    assert polled(reader, "first_0_0") == 1
    waits = list[float]()
    wait = "omni_kvlink.integrations.vllm_omni.polled_get.LazyEvent"
    monkeypatch.setattr(wait, partial(WaitlessEvent, waits))
    keys = [f"r{i}_0_0" for i in range(64)]
    usual, reader.settings = reader.settings, dataclasses.replace(reader.settings, poll=600.0)
    for key in keys[:4]:
        assert reader.get(*EDGE, key) is None
    assert waits == pytest.approx([600, 600, 300, 200], abs=60)
    assert reader.get_with_deadline(*EDGE, keys[4], deadline=time.monotonic() + 600) is None
    assert waits[4:] == pytest.approx([600], abs=60), "a deadline is kept"
    reader.settings, waits = usual, []
    for _ in range(2):
        assert [reader.get(*EDGE, key) for key in keys] == [None] * 64
    waits.clear()
    assert [reader.get(*EDGE, key) for key in keys] == [None] * 64
    assert waits == [], "to wait for so short takes longer than to look"
    sender.put(*EDGE, keys[40], "here")
    assert polled(reader, keys[40]) == "here"


def test_what_nobody_polls_any_more_goes_back(
    ends: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, reader = ends
    sender.put(*EDGE, "first_0_0", 1)
    assert polled(reader, "first_0_0") == 1
    for cancel in (lambda: reader.abandon_get("r_0_0"), reader.reap_consumed):
        assert reader.get(*EDGE, "r_0_0") is None
        monkeypatch.setattr("omni_kvlink.integrations.vllm_omni.pending_gets.STALE_SECONDS", 0.0)
        time.sleep(0.01)
        cancel()
        assert len(reader._pending) == 0
        monkeypatch.undo()
    sender.put(*EDGE, "r_0_0", "for another reader")
    assert polled(reader, "r_0_0") == "for another reader"


@pytest.mark.parametrize("key", [CACHE, "r_0_7"])
def test_a_deadline_is_kept(key: str, ends: tuple[Any, Any]) -> None:
    """While nobody serves, and while somebody does."""
    sender, reader = ends
    for other in ("a_0_0_0_0" if key == CACHE else "a_0_0", ""):
        began = time.monotonic()
        assert reader.get_with_deadline(*EDGE, key, deadline=began + 0.3) is None
        assert time.monotonic() - began > 0.25
        reader.abandon_get(key)
        if other:  # of the same channel
            sender.put(*EDGE, other, packed())
    assert reader.health()["timeouts"] == 2


def test_a_waiting_deadline_is_met_early(ends: tuple[Any, Any]) -> None:
    sender, reader = ends
    sender.put(*EDGE, "first_0_0", 1)
    assert polled(reader, "first_0_0") == 1
    found: list[Any] = []

    def get() -> None:
        deadline = time.monotonic() + 3600
        found.append(reader.get_with_deadline(*EDGE, "r_0_0", deadline=deadline))

    thread = threading.Thread(target=get, daemon=True)
    thread.start()
    until(lambda: reader.health()["links"][0]["waiting"] == 1, "it waits")
    sender.put(*EDGE, "r_0_0", "here")
    thread.join(60)
    assert found[0][0] == "here"


def raises(edge: StageEdge, link: KVConsumer, error: PeerLostError) -> None:
    raise error


BLOCKS_OF_PYTHON = ("with ", "try:", "finally:", "pass", "def ", "@")
"""Beginnings of lines that are traced, too, where Python itself looks for no signal."""


def test_a_poll_that_is_interrupted_at_any_line(sockets: str) -> None:
    """No payload is lost, and the next poll of the key has it."""
    lines, number = itertools.count(), 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        path = frame.f_code.co_filename
        if not any(part in path for part in ("pending_gets", "polled_get", "answer", "threading")):
            return None
        line = linecache.getline(path, frame.f_lineno).strip()
        if event == "line" and not line.startswith(BLOCKS_OF_PYTHON) and next(lines) == number:
            raise KeyboardInterrupt
        return trace

    with make("shm", sockets, "cut") as sender, make("shm", sockets, "cut") as reader:
        sender.put(*EDGE, "first_0_0", 1)
        assert polled(reader, "first_0_0") == 1
        edge = StageEdge.of(*EDGE, "r_0_0")
        links = {edge: reader._links.receiver(edge, timeout=60)}
        for number in itertools.count():
            lines, key = itertools.count(), f"r{number}_0_0"
            wait = partial(reader._pending.get, links, edge, key, timeout=0.001, lost=raises)
            sys.settrace(trace)
            try:
                wait()
            except (KeyboardInterrupt, TransferTimeout) as error:
                ended = type(error)  # its frames would keep the get
            finally:
                sys.settrace(None)
            sender.put(*EDGE, key, number)
            assert polled(reader, key) == number
            if ended is TransferTimeout:
                break
        assert number > 10


def test_a_packed_cache_is_a_buffer(ends: tuple[Any, Any]) -> None:
    sender, reader = ends
    data = packed()
    ok, nbytes, where = sender.put(*EDGE, CACHE, torch.tensor(list(data), dtype=torch.uint8))
    assert (ok, nbytes) == (True, len(data))
    assert where["size"] == len(data)
    buffer, size = reader.get(*EDGE, CACHE, {"source_host": "elsewhere", "source_port": 1})
    assert (buffer.tensor.numpy().tobytes(), size) == (data, len(data))
    assert sender.health()["unread"] == 1
    buffer.release()
    buffer.release()
    until(lambda: sender.health()["unread"] == 0, "the memory went back")


def test_wrong_bytes_are_not_handed_out(sockets: str) -> None:
    """A bit flips after the commit; the sender's receipt says what the reader said."""
    with make("shm", sockets, "flip") as sender, make("shm", sockets, "flip") as reader:
        sender.put(*EDGE, CACHE, packed(200))  # more than travels inside an offer
        link = sender._links.sender(StageEdge.of(*EDGE, CACHE))
        memory = end_of(link).pool.mapping(0).region.view()
        memory[memory.tobytes().index(b'"rid":"r"') + 7] ^= 1
        with pytest.raises(IntegrityError):
            reader.get(*EDGE, CACHE)
        assert reader.health()["failures"] == 1


def test_what_is_taken_back_is_not_waited_for(ends: tuple[Any, Any]) -> None:
    sender, reader = ends
    sender.put(*EDGE, CACHE, packed())
    sender.put(*EDGE, f"{CACHE}2", packed())
    sender.cleanup(CACHE)
    sender.cleanup("no such key")
    with pytest.raises(TransferFailed, match="cleaned up"):
        reader.get(*EDGE, CACHE)
    buffer, _ = reader.get(*EDGE, f"{CACHE}2")  # a prefix is not a key
    buffer.release()
    sender.put(*EDGE, CACHE, packed())
    reader.get(*EDGE, CACHE)[0].release()


def test_what_a_request_has_sent_is_taken_back(ends: tuple[Any, Any]) -> None:
    """All of its chunks, also those of several ranks, and its cache; nothing of another request."""
    sender, reader = ends
    sender.put(*EDGE, "first_0_0", 1)
    assert polled(reader, "first_0_0") == 1  # connected
    until(lambda: sender.health()["unread"] == 0, "it was released")
    mine = ["r_0_0", "r_0_1", "r_0_12", "r_0_0_1_0", CACHE]
    others = ["r_0_0x", "rr_0_0", "r_1_0", "a_r_0_0", f"{CACHE}_0_1"]
    for key in mine + others:
        sender.put(*EDGE, key, packed())
    assert reader.get(*EDGE, "r_0_99") is None
    assert reader.get(*EDGE, "rr_0_99") is None
    before = sender.health()["unread"], len(reader._pending)
    for end in ends:
        end.cleanup("r")
    assert before == (len(mine + others), 2)
    assert (sender.health()["unread"], len(reader._pending)) == (len(others), 1)
    for key in mine:
        with pytest.raises(TransferFailed, match="cleaned up"):
            polled(reader, key)
    for key in others:
        polled(reader, key).release()


@pytest.mark.parametrize("request_id", ["r", "r_0", "0_0", "ä b\n", "a_1_2"])
def test_the_request_of_a_key(request_id: str) -> None:
    """As vLLM-Omni makes keys: of caches, of chunks, and of chunks between ranks."""
    edge = StageEdge("0", "1", "data")
    forms = ("omni_0_to_1_kv_cache_{}", "{}_0_0", "{}_0_17", "{}_0_3_1_0")
    assert {edge.request_of(form.format(request_id)) for form in forms} == {request_id}
    assert edge.request_of(request_id) == request_id


def test_a_key_is_not_put_twice(ends: tuple[Any, Any]) -> None:
    sender, reader = ends
    sender.put(*EDGE, CACHE, packed(3))
    with pytest.raises(DuplicateKeyError):
        sender.put(*EDGE, CACHE, packed(4))
    buffer, size = reader.get(*EDGE, CACHE)
    assert size == len(packed(3))
    buffer.release()


def test_no_object_is_sent(ends: tuple[Any, Any]) -> None:
    sender, reader = ends
    sender.put(*EDGE, "first_0_0", 1)
    assert polled(reader, "first_0_0") == 1
    with pytest.raises(SchemaError, match="cannot be serialized"):
        sender.put(*EDGE, "r_0_0", {"f": threading.Lock()})
    with pytest.raises(TransferFailed, match="cannot be serialized"):
        polled(reader, "r_0_0")


def test_closed_is_closed(ends: tuple[Any, Any]) -> None:
    sender, _ = ends
    sender.put(*EDGE, CACHE, packed())
    assert sender.health()["status"] == "healthy"
    sender.close()
    sender.close()
    assert sender.health() == {"status": "closed"}
    sender.cleanup(CACHE), sender.reap_consumed(), sender.abandon_get(CACHE)
    with pytest.raises(ClosedError):
        sender.put(*EDGE, CACHE, b"x")
    with pytest.raises(ClosedError):
        sender.get(*EDGE, CACHE)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_half_built_ones_close() -> None:
    VllmOmniConnector.__new__(VllmOmniConnector).close()
    with pytest.raises(ValueError, match="trasnport: no such setting; did you mean transport"):
        VllmOmniConnector({"kvlink": {"trasnport": "shm"}})
    gc.collect()


def test_one_that_is_dropped_takes_no_lock(sockets: str) -> None:
    """The garbage collector may come at any line, in a thread that has one of the locks."""
    dropped = [make("zmq+tcp", sockets, "dropped")]
    dropped[0].put(*EDGE, "r_0_0", 1)
    links, pending = dropped[0]._links, dropped[0]._pending

    def collect() -> None:
        dropped.clear()
        gc.collect()

    collecting = threading.Thread(target=collect, daemon=True)
    with links._lock, pending._lock:
        collecting.start()
        collecting.join(60)
        assert not collecting.is_alive()
        assert not links._closed
    until(lambda: links._closed, "it is closed by another thread")
    until(lambda: not os.listdir(sockets), "its published address is removed")


UNCLOSED = """
import sys
from omni_kvlink.integrations.vllm_omni.connector import VllmOmniConnector
transport, directory = sys.argv[1:]
kvlink = {"transport": transport, "name": "exit", "options": {"directory": directory}}
kept = VllmOmniConnector({"kvlink": kvlink})
kept.put("0", "1", "r", {"a": 1})
"""


@pytest.mark.parametrize("transport", ["shm", "zmq+ipc", "zmq+tcp"])
def test_a_process_that_ends_without_closing_leaves_nothing(transport: str, sockets: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", UNCLOSED, transport, sockets],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for word in ("Exception ignored", "ResourceWarning", "Traceback"):
        assert word not in done.stderr


def deploy_file_of_the_guide() -> str:
    """The deploy file of BAGEL that comes with vLLM-Omni, with the change of the guide's `diff`."""
    import vllm_omni

    shipped = (Path(vllm_omni.__file__).parent / "deploy" / "bagel.yaml").read_text()
    page = (ROOT / "docs" / "guides" / "bagel_in_vllm_omni.md").read_text()
    code = re.search(r"```diff\n(.*?)```", page, re.DOTALL)
    assert code
    lines = code[1].splitlines()
    before = "".join(f"{line[1:]}\n" for line in lines if line[0] != "+")
    after = "".join(f"{line[1:]}\n" for line in lines if line[0] != "-")
    assert (shipped.count(before), sum(line[0] in "+-" for line in lines)) == (1, 4)
    return shipped.replace(before, after)


def deploy_file_of_the_page() -> str:
    page = (ROOT / "docs" / "vllm_omni.md").read_text()
    code = re.search(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert code
    return code[1]


def test_the_configuration_for_containers() -> None:
    """Each side of the page's lines allows the other's user, and takes no other path."""
    page = (ROOT / "docs" / "vllm_omni.md").read_text()
    _, text = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    extra = yaml.safe_load(text)["connectors"]["kv"]["extra"]
    settings = OmniSettings.of(extra)
    for options, user in ((settings.of_sender, 1001), (settings.of_receiver, 1000)):
        assert Options(**options).allow_uids == (user,)
        assert (options["directory"], Options(**options).require) == ("/run/kvlink", ("shm",))


@pytest.mark.parametrize("text", [deploy_file_of_the_page, deploy_file_of_the_guide])
def test_it_is_found_by_its_entry_point(
    text: Callable[[], str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM-Omni's own loader and factory make both stages' connectors, which say their path."""
    from vllm_omni.distributed.omni_connectors import ConnectorSpec, OmniConnectorFactory
    from vllm_omni.distributed.omni_connectors.utils.initialization import (
        load_omni_transfer_config,
        resolve_omni_kv_config_for_stage,
    )
    from vllm_omni.plugins import load_omni_general_plugins

    load_omni_general_plugins()
    register()
    assert NAME in OmniConnectorFactory.list_registered_connectors()
    (file := tmp_path / "deploy.yaml").write_text(text())
    transfer = load_omni_transfer_config(config_path=str(file))
    stages = []
    for stage, role in ((0, "sender"), (1, "receiver")):
        config, *edge = resolve_omni_kv_config_for_stage(transfer, stage)
        assert edge == ["0", "1"]
        assert config is not None
        assert (config.pop("type"), config["role"]) == (NAME, role)
        stages.append(OmniConnectorFactory.create_connector(ConnectorSpec(NAME, config)))
    sender, receiver = stages
    with caplog.at_level("INFO"), receiver, sender:
        assert sender.settings.name == "bagel"
        sender.put("0", "1", "omni_0_to_1_kv_cache_req-1", b"packed")
        assert receiver.get("0", "1", "omni_0_to_1_kv_cache_req-1") is not None
    for verb in ("sent", "received"):
        line = f"stage edge bagel.0-1.kv0 is {verb} over shm://bagel.0-1.kv0"
        assert line in caplog.messages
        assert line in (ROOT / "docs" / "guides" / "bagel_in_vllm_omni.md").read_text()


@pytest.mark.parametrize("transport", ["shm", "zmq+tcp"])
def test_the_example_says_exact(transport: str, sockets: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "vllm_omni_connector.py"), transport],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "XDG_RUNTIME_DIR": sockets},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "4 layers × 1000 tokens" in done.stdout
    assert done.stdout.count(": exact") == 2
    assert "hidden states, 1024000 bytes" in done.stdout
    assert set(os.listdir(os.path.join(sockets, "kvlink"))) <= {"user.secret"}, "nothing was left"
    shutil.rmtree(os.path.join(sockets, "kvlink"))
