"""`kvlink doctor`: what a machine, a container and a build can do, and what is wrong with them."""
