"""Peers that are killed, frozen or armed with faults, and what they may leave over."""
