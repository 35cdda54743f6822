"""What the operating system refuses, in the errors of the library."""
