"""Fixtures for links over every connector."""

from __future__ import annotations

from support.faults.leak_checks import zmq_started as zmq_started
