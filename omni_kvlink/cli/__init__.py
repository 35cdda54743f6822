"""The `kvlink` command, and what `kvlink-bench` has in common with it."""
