"""What tests of observers, metrics and traces share."""
