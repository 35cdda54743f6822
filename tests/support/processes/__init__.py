"""Python processes of tests: how they start, and what interrupts them."""
