"""Checks of the path that a link tells, and of what an end requires of it."""

from __future__ import annotations

from omni_kvlink.errors import ConnectorError
from omni_kvlink.testing.caches import Recipe
from omni_kvlink.testing.peer_harness import PATIENCE
from omni_kvlink.testing.rig import Rig, expect, until

FACTS = ("transport", "shared_kernel", "encrypted", "rdma", "lanes", "why")
"""The keys of `stats()["path"]`, in their order."""


def check_path_is_told(rig: Rig) -> None:
    """Both ends' stats tell the same path, and so do the ledgers of a payload that went by it."""
    producer, reader = rig.serve(), rig.connect()
    receipt = producer.put(Recipe("k").make())
    path = reader.call("get_path", key="k", timeout=PATIENCE)
    receipt.wait(timeout=PATIENCE)
    assert receipt.ledger.path == path
    facts = reader.call("stats")["path"]
    assert tuple(facts) == FACTS, facts
    assert facts["why"]
    name = f"{facts['transport']}{'+curve' * facts['encrypted']}{'+lanes' * bool(facts['lanes'])}"
    assert path.removesuffix("+inline") == name, (path, facts)
    until(lambda: len(producer.stats()["path"]) == 1, "the producer tells one reader's path")
    [mine] = producer.stats()["path"]
    del mine["reader"], mine["why"], facts["why"]  # each side has its own reason
    assert mine == facts


def check_path_requirement_is_kept(rig: Rig) -> None:
    """A path that does not exist is refused: by `serve`, and on both sides when one connects."""
    unmet = expect(ConnectorError, rig.serve, require="gpu", mentions=("require='gpu'",))
    producer = rig.serve()
    error = expect(ConnectorError, rig.connect, require="gpu", mentions=("require='gpu'",))
    for text in map(str, (unmet, error)):
        assert "no transport of this release" in text
    until(lambda: is_counted(producer.stats()), "the producer counts the refusal")


def is_counted(stats: dict[str, object]) -> bool:
    """Whether a producer has counted a reader whose path was refused, once."""
    listeners = stats.get("listeners", [stats])
    assert isinstance(listeners, list)
    return bool(sum(one["refused"].get("path", 0) for one in listeners) == 1)
