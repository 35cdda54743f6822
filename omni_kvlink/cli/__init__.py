"""The `kvlink` command."""
