"""Stages and ranks in Ray actors."""
