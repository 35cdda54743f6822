"""The control channel that `zmq`, `ucx` and `auto` share: messages over ZMQ, encrypted by CURVE."""
