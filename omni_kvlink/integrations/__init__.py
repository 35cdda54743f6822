"""Plug-ins for outside engines: each is imported by its own name, and imports its engine."""
