"""Number fields of the form, told apart only by what differs."""

from __future__ import annotations

from typing import Any, Final

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

KEEP: Final = "session"
"""``persist_state`` of fields that are hidden for a while: they keep what was typed."""


def number(
    place: DeltaGenerator,
    label: str,
    key: str,
    value: Any,
    *,
    least: Any,
    most: Any = None,
    step: Any = None,
    empty: str = "auto",
    meaning: str | None = None,
) -> Any:
    """One number, an integer where ``least`` is one.

    Args:
        place: Column to draw it in.
        label: Name and unit on the screen.
        key: Name under which the page remembers it.
        value: Before the first click; None: empty.
        least, most: Smallest and largest number allowed.
        step: Of the buttons; None: 1 for integers, a hundredth otherwise.
        empty: What an empty field stands for.
        meaning: Shown on request.

    Returns:
        The number, or None for an empty field.
    """
    st.session_state.setdefault(f"form.{key}", value)
    return place.number_input(
        label,
        value=None,  # only a field that began empty can be emptied again
        min_value=least,
        max_value=most,
        step=step,
        format="%d" if isinstance(least, int) else "%g",
        placeholder=empty,
        help=meaning,
        key=f"form.{key}",
        persist_state=KEEP,
    )
