"""Fixtures that the tests of connectors have, too."""

from __future__ import annotations

from victims import battlefield as battlefield
from victims import start as start
from victims import zmq_started as zmq_started
