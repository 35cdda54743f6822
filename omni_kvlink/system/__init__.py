"""Refusals of the operating system, as errors of the library."""
