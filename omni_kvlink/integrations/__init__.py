"""Engines that host the library: a room each, imported only by who has the engine."""
