"""Stores and their clients as processes."""
