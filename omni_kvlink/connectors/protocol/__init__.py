"""The protocol of the connectors: messages and state machines, without I/O."""
