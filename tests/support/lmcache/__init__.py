"""LMCache's own objects, and an adapter whose tasks are waited for."""
