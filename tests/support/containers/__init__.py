"""Processes in namespaces, as container runtimes make them."""
