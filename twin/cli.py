"""The ``twin`` command."""


def main() -> None:
    """Run the command line."""
