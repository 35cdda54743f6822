"""Campaigns of faults between processes, and two hosts on a cable."""
