"""The engine's loop, and the engine of each kind of stage."""
