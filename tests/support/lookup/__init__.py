"""Prompts for lookups by token prefix, and a process that is killed meanwhile."""
