"""Which block of a full memory goes first."""
