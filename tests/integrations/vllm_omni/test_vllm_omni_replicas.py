"""Two replicas of a sending stage, each in a process of its own, and a stage that receives."""

from __future__ import annotations

import itertools
import tempfile
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm_omni", reason="make test-vllm-omni installs it")

from vllm_omni.distributed.omni_connectors.utils.initialization import compute_connector_zmq_port
from vllm_omni.distributed.omni_connectors.utils.kv_utils import kv_zmq_port

from omni_kvlink import BusyError, TransferFailed, UnavailableError
from omni_kvlink.integrations.vllm_omni.connector import VllmOmniConnector
from omni_kvlink.testing.rig import until
from support.vllm_omni.caches import Cache
from support.vllm_omni.stage import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EDGE = ("0", "1")
_names = itertools.count()

TRANSPORTS = ["shm", "zmq+ipc", "zmq+tcp"]


def section(folder: str, transport: str = "shm", **settings: Any) -> dict[str, Any]:
    options = {"directory": folder, "quota": 64 << 20}
    return {"transport": transport, "name": f"r{next(_names)}", "options": options, **settings}


def sender_info(replica: int) -> dict[str, Any]:
    """What vLLM-Omni's orchestrator passes on of the replica that a request ran on."""
    return {"host": "127.0.0.1", "zmq_port": kv_zmq_port(50051, 0, replica_id=replica)}


def metadata(replica: int) -> dict[str, Any]:
    """What its loops make of the port for chunks and stage payloads."""
    port = compute_connector_zmq_port(
        50051, purpose="request_forwarding", from_stage=0, replica_id=replica
    )
    return {"source_host": "127.0.0.1", "source_port": port}


@pytest.fixture
def folder() -> Iterator[str]:
    """For sockets: a stage that is killed leaves its own."""
    with tempfile.TemporaryDirectory(prefix="kvl-") as path:
        yield path


@pytest.fixture
def stages(folder: str) -> Iterator[Callable[..., Stage]]:
    """`stages(role, kvlink, replica)`: a manager in a process of its own."""
    opened: list[Stage] = []

    def make(role: str, kvlink: dict[str, Any], replica: int = 0) -> Stage:
        opened.append(Stage())
        assert opened[-1].call("make", role=role, kvlink=kvlink, replica=replica)
        return opened[-1]

    yield make
    for stage in opened:
        if stage.process.is_alive():
            stage.shutdown()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("is_told", [True, False], ids=["sender_info", "no sender_info"])
def test_each_replicas_requests_arrive(
    stages: Callable[..., Stage], folder: str, transport: str, is_told: bool
) -> None:
    """By the managers of vLLM-Omni, on both sides; a reader asks both replicas."""
    kvlink = section(folder, transport)
    senders = [stages("sender", kvlink, replica) for replica in range(2)]
    reader = stages("receiver", kvlink)
    for number, replica in enumerate((1, 0, 0, 1)):
        cache: dict[str, Any] = {"seed": number}
        senders[replica].call("send", request=f"r{number}", cache=cache)
        info = sender_info(replica) if is_told else None
        got = reader.call("receive", request=f"r{number}", sender_info=info)
        assert got["layers"] == Cache(**cache).expected()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_replica_dies(stages: Callable[..., Stage], folder: str, transport: str) -> None:
    """Its requests fail at once, those of the other one go on, and it may come back."""
    kvlink = section(folder, transport)
    first, second = (stages("sender", kvlink, replica) for replica in range(2))
    first.call("put", key="a_0_0", data="of the first")
    second.call("put", key="b_0_0", data="of the second")
    readers = [stages("receiver", kvlink) for _ in range(3)]
    assert "of the second" in readers[0].call("get", key="b_0_0", timeout=3600.0)
    waiting: list[tuple[Stage, dict[str, Any]]] = [
        (readers[0], {"key": "b_0_1"}),  # whose first chunk the second one has sent
        (readers[1], {"key": "c_0_0", "metadata": metadata(1)}),
        (readers[2], {"key": "d_0_0"}),  # which may come from both
    ]
    for reader, get in waiting:
        reader.begin("get", timeout=3600.0, **get)
    until(
        lambda: requested(first) == 2 and requested(second) == 3, "the gets have begun", timeout=60
    )
    second.kill()
    assert readers[0].result().startswith("PeerLostError")
    assert readers[1].result().startswith("PeerLostError")
    first.call("put", key="d_0_0", data="of the first")
    assert "of the first" in readers[2].result()
    assert "of the first" in readers[0].call("get", key="a_0_0", timeout=3600.0)
    successor = stages("sender", kvlink, 1)
    successor.call("put", key="e_0_0", data="of the successor")
    for reader in readers[:1]:
        assert "of the successor" in reader.call("get", key="e_0_0", timeout=3600.0)


def requested(sender: Stage) -> int:
    """The gets that wait at a sender."""
    links = sender.call("health", role="sender")["links"]
    return sum(link["transfers"]["waiting"] for link in links)


def test_the_last_replica_dies(stages: Callable[..., Stage], folder: str) -> None:
    """Nobody is left who could have the payload, whoever was to send it."""
    kvlink = section(folder)
    senders = [stages("sender", kvlink, replica) for replica in range(2)]
    for replica, sender in enumerate(senders):
        sender.call("put", key=f"before_{replica}_0_0", data=replica)
    reader = stages("receiver", kvlink)
    reader.begin("get", key="a_0_0", timeout=3600.0)
    until(lambda: all(requested(sender) for sender in senders), "the get has begun", timeout=60)
    for sender in senders:
        sender.kill()
    assert reader.result().startswith("PeerLostError")


def connector(kvlink: dict[str, Any], replica: int, monkeypatch: Any) -> VllmOmniConnector:
    monkeypatch.setenv("VLLM_OMNI_REPLICA_ID", str(replica))
    return VllmOmniConnector({"kvlink": kvlink})


def test_a_cleanup_is_its_requests(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the replica that sends, and of the gets that wait at both."""
    kvlink = section(folder, wait=3600.0)
    with (
        connector(kvlink, 0, monkeypatch) as first,
        connector(kvlink, 1, monkeypatch) as second,
        connector(kvlink, 0, monkeypatch) as reader,
    ):
        for sender, name in ((first, "a"), (second, "b")):
            assert sender.put(*EDGE, f"{name}_0_0", name)[0]
        second.cleanup("b")
        with pytest.raises(TransferFailed, match="cleaned up by the engine"):
            polled(reader, "b_0_0")
        assert reader.get(*EDGE, "c_0_0") is None
        until(lambda: waiting(first) == waiting(second) == 1, "both are requested")
        reader.cleanup("c")
        until(lambda: not waiting(first) and not waiting(second), "the gets are withdrawn")
        second.put(*EDGE, "c_0_0", "again")
        assert polled(reader, "c_0_0") == "again"
        assert polled(reader, "a_0_0") == "a"
        until(lambda: not waiting(second), "it is not requested any more for what the first had")


def test_what_put_returns_names_the_replica(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM-Omni passes it on in a handle; no other replica is requested then."""
    kvlink = section(folder, wait=3600.0)
    with (
        connector(kvlink, 0, monkeypatch) as first,
        connector(kvlink, 1, monkeypatch) as second,
        connector(kvlink, 0, monkeypatch) as reader,
    ):
        first.put(*EDGE, "a_0_0", 1)
        _, _, handle = second.put(*EDGE, "b_0_0", 2)
        assert handle is not None
        assert handle["replica"] == 1
        assert reader.get(*EDGE, "c_0_0", handle) is None
        until(lambda: waiting(second) == 1, "its replica is requested")
        assert not waiting(first)


def test_stages_that_send_to_each_other(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replica of either stage sends, and receives from both of the other one."""
    kvlink = section(folder, wait=3600.0)
    with (
        connector(kvlink, 0, monkeypatch) as first,
        connector(kvlink, 1, monkeypatch) as second,
        connector(kvlink, 0, monkeypatch) as third,
        connector(kvlink, 1, monkeypatch) as fourth,
    ):
        for number, sender in enumerate((first, second)):
            sender.put("0", "1", f"there{number}_0_0", number)
        for number, sender in enumerate((third, fourth)):
            sender.put("1", "0", f"back{number}_1_0", number)
        for number in range(2):
            reader = (fourth, third)[number]
            assert polled(reader, f"there{number}_0_0") == number
            reader = (second, first)[number]
            assert polled(reader, f"back{number}_1_0", "1", "0") == number


def test_one_process_for_each_replica(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kvlink = section(folder)
    with connector(kvlink, 1, monkeypatch) as second, connector(kvlink, 1, monkeypatch) as third:
        second.put(*EDGE, "a_0_0", 1)
        with pytest.raises(BusyError):
            third.put(*EDGE, "b_0_0", 1)


def test_one_address_is_for_one_replica(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kvlink = section(folder, "zmq+tcp", addresses={"data": "127.0.0.1:0"})
    refused = pytest.raises(UnavailableError, match=r"replica 1 of stage 0 .* leave addresses out")
    with connector(kvlink, 1, monkeypatch) as second, refused:
        second.put(*EDGE, "a_0_0", 1)


def test_a_reader_of_a_port_that_says_nothing(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another base of the ports than this stage's: each replica is requested all the same."""
    kvlink = section(folder, wait=3600.0)
    with (
        connector(kvlink, 0, monkeypatch) as first,
        connector(kvlink, 1, monkeypatch) as second,
        connector(kvlink, 0, monkeypatch) as reader,
    ):
        first.put(*EDGE, "a_0_0", "a")
        second.put(*EDGE, "b_0_0", "b")
        for port in (7, 50052, 50051 + 9 * 1024, 60000):
            reported = {"source_host": "127.0.0.1", "source_port": port}
            assert reader.get(*EDGE, "c_0_0", reported) is None
        assert polled(reader, "b_0_0", metadata=metadata(0)) == "b"


def polled(reader: Any, key: str, *edge: str, metadata: Any = None) -> Any:
    """A get that is repeated, as vLLM-Omni's loops do."""
    found: list[Any] = []

    def arrived() -> bool:
        found[:] = reader.get(*(edge or EDGE), key, metadata) or ()
        return bool(found)

    until(arrived, f"{key} has arrived", timeout=60)
    return found[0]


def waiting(sender: VllmOmniConnector) -> int:
    """The gets that wait at a sender."""
    return sum(link["transfers"]["waiting"] for link in sender.health()["links"])
