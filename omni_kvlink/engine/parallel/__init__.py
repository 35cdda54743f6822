"""Ranks that work on one request together."""
