"""What the tests of one transport share: addresses, keys, peers that misbehave."""
