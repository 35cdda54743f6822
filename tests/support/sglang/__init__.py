"""SGLang's host pools without its engine."""
