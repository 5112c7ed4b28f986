"""What the log may say of an error of this node."""

from __future__ import annotations

import traceback
from pathlib import Path


def what_failed(error: BaseException) -> dict[str, str]:
    """Kind and place of an error, for the log; its text and variables could hold contents."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return {"kind": type(error).__name__, "place": place}
