"""The parts of the disk tier: files that several processes share, without a server between them."""
