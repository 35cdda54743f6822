"""Checks and programs for the two ends of a link."""
