"""Which prefixes to keep, copy, fetch and give up."""
