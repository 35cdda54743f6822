"""A session that connects: which thread sets the outcome, whoever ends it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from omni_kvlink import ClosedError, KVLink, PeerLostError
from omni_kvlink.connectors.control.session import ControlSession
from omni_kvlink.connectors.runtime.consumer import cancel_connect
from omni_kvlink.system.waits import Answer
from omni_kvlink.testing.rig import expect, until
from support.connectors.zmq_addresses import fresh_url

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[ControlSession]:
    """The sessions that were asked to connect."""
    found, connect = list[ControlSession](), ControlSession.connect_in_loop

    def recorded(session: ControlSession) -> None:
        connect(session)
        found.append(session)

    monkeypatch.setattr(ControlSession, "connect_in_loop", recorded)
    return found


def test_the_loop_alone_sets_the_outcome(
    sockets: str, sessions: list[ControlSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a `connect` that another thread cancels: an answer has one owner."""
    end, setters = Answer.set, list[tuple[object, str]]()

    def recorded(answer: Answer[Any]) -> None:
        setters.append((answer, threading.current_thread().name))
        end(answer)

    monkeypatch.setattr(Answer, "set", recorded)
    errors = list[ClosedError]()
    connecting = threading.Thread(
        target=lambda: errors.append(
            expect(ClosedError, lambda: KVLink.connect(fresh_url("ipc", sockets), timeout=60))
        )
    )
    connecting.start()
    until(lambda: bool(sessions), "it connects")
    assert connecting.ident is not None
    cancel_connect(connecting.ident)
    connecting.join(60)
    assert len(errors) == 1
    assert [name for answer, name in setters if answer is sessions[0].ready] == ["kvlink-reader"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_loop_that_breaks_down_ends_the_wait(
    sockets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(session: ControlSession) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(ControlSession, "connect_in_loop", broken)
    connect = lambda: KVLink.connect(fresh_url("ipc", sockets), timeout=60)  # noqa: E731
    assert "broken" in str(expect(PeerLostError, connect))
