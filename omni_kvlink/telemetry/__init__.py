"""Observers and metrics of a process's transfers; nothing is observed before it is enabled."""
