"""What can go wrong in the store, by who can mend it."""

from __future__ import annotations


class StoreError(Exception):
    """The store cannot do what was asked; nothing wrong was served and nothing was lost."""


class StoreSetupError(StoreError, ValueError):
    """A setting, directory or address that the person at the keyboard can mend."""


class StoreUnavailableError(StoreError):
    """The server cannot be reached, or went away; callers recompute."""


class DeadlineError(StoreError):
    """Time ran out; what was under way is cancelled."""
