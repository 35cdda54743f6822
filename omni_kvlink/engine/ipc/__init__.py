"""Calls between the processes of an engine."""
