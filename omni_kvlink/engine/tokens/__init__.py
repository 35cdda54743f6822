"""Texts of a stage: how they are sampled, and what is known of their tokens."""
