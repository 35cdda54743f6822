"""The time of a pass: the device's where it has one, and no call waits for the device."""

from __future__ import annotations

import time

import pytest
import torch

from omni_kvlink.engine.worker.pass_clock import PassClock

CUDA = torch.device("cuda", 0)


class Event:
    """An event of a device on which work takes so long; to wait for one is refused."""

    made: list[Event]
    is_reached = True

    def __init__(self, *, enable_timing: bool):
        assert enable_timing
        self.made.append(self)

    def record(self, stream: object) -> None:
        assert stream == ("stream of", CUDA)
        self.number = self.made.index(self)

    def query(self) -> bool:
        return self.is_reached

    def elapsed_time(self, end: Event) -> float:
        assert self.is_reached
        return 7000.0 * (end.number - self.number)


@pytest.fixture(autouse=True)
def events(monkeypatch: pytest.MonkeyPatch) -> None:
    Event.made = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("stream of", device))


def test_a_devices_own_time() -> None:
    clock = PassClock(CUDA)
    assert clock.seconds() == 0.0
    clock.stop()
    assert clock.seconds() == 7.0
    clock.stop()
    assert clock.seconds() == 14.0


def test_the_hosts_time_while_the_device_is_not_there_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "is_reached", False)
    clock = PassClock(CUDA)
    time.sleep(0.002)
    clock.stop()
    assert 0.002 <= clock.seconds() < 7.0


def test_the_hosts_time_without_a_device() -> None:
    clock = PassClock(torch.device("cpu"))
    time.sleep(0.002)
    clock.stop()
    assert 0.002 <= clock.seconds() < 7.0
    assert not Event.made
