"""Deployments of several stages, and the public entry point."""
