"""Stages of the reference engine, their ranks, and tiny models."""
