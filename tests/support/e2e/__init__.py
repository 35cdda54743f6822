"""Stages in two processes."""
