"""`kvlink-bench`: how fast a link is on this machine, and whether it is exact."""
