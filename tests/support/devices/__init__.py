"""The fake device, the native copier's plans, and a real GPU."""
