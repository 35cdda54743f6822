"""Actors that make and read tensors, for the tests of the tensor transport."""
