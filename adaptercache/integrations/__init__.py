"""The library inside other people's code. Each module is imported only by who uses it."""
