"""Producers and consumers on a virtual clock."""
