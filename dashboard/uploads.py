"""Uploaded files on disk: each keeps its name, so that error messages can name it."""

from __future__ import annotations

import hashlib
import re
import tempfile
from pathlib import Path

import streamlit as st
from streamlit.runtime.uploaded_file_manager import UploadedFile


@st.cache_resource(show_spinner=False)
def _folder() -> tempfile.TemporaryDirectory[str]:
    """One folder for the life of the server, removed when it ends."""
    return tempfile.TemporaryDirectory(prefix="serving-twin-")


def keep_upload(name: str, content: bytes) -> Path:
    """Write an upload under its own name; the same content always has the same path."""
    folder = Path(_folder().name) / hashlib.sha256(content).hexdigest()[:16]
    path = folder / (Path(name).name or "upload")
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        partial.write_bytes(content)
        partial.rename(path)
    return path


def path_of(upload: UploadedFile) -> Path:
    """Where the upload lies; written and hashed once, not on every change of the page."""
    paths: dict[str, Path] = st.session_state.setdefault("uploads", {})
    if upload.file_id not in paths:
        paths[upload.file_id] = keep_upload(upload.name, upload.getvalue())
    return paths[upload.file_id]


def without_folder(text: str) -> str:
    """The text with uploads called by their name alone, as their owner knows them."""
    return re.sub(re.escape(_folder().name) + r"/[0-9a-f]{16}/", "", text)
