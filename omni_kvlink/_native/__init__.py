"""ctypes bindings of the compiled libraries in `csrc`."""
