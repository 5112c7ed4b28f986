"""The prefix tensor store: shared memory, SSD, sockets, clients."""
