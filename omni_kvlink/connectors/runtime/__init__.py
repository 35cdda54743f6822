"""Parts that the connectors share at run time: the event loop, the producer, the consumer."""
