"""Payloads and headers: random, right, and wrong on purpose."""
