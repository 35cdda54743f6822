"""Schedulers: which requests run next."""
