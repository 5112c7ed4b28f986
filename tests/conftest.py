"""Where tests find public data: ``$SERVING_TWIN_DATA``, else ``../shared/data``."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # Ray reads it when imported
ROOT = Path(__file__).resolve().parent.parent
LONG_TESTS = "SERVING_TWIN_LONG_TESTS"
DATA = Path(os.environ.get("SERVING_TWIN_DATA", ROOT.parent / "shared" / "data"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """More of the same kind runs on request only, so that all tests take minutes."""
    if LONG_TESTS not in os.environ:
        for item in items:
            if item.get_closest_marker("long") is not None:
                item.add_marker(pytest.mark.skip(reason=f"set {LONG_TESTS} to run it"))


@pytest.fixture(scope="session")
def data_file() -> Callable[[str], Path]:
    """``data_file("folder/X.csv.gz")``: the path, or a skip that says what is absent."""

    def find(relative: str) -> Path:
        path = DATA / relative
        if not path.exists():
            pytest.skip(f"public data {relative} is not under {DATA} (set SERVING_TWIN_DATA)")
        return path

    return find
