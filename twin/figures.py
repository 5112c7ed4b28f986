"""What all pictures share: plain axes, and PNG bytes that are the same for the same picture."""

from __future__ import annotations

import io

from matplotlib.axes import Axes
from matplotlib.figure import Figure


def bare(axes: Axes) -> None:
    """A light grid, no frame above and on the right."""
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def png(figure: Figure) -> bytes:
    """The picture as PNG, without date or program."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
