"""Offline text of eight kinds, split into documents: what the small MoE is trained and judged on.

Two kinds come with the machine (POD of Debian's ``perl-doc``, fetched once with ``apt-get``
into the cache; sources of the Python standard library), six from the public data folder. Each kind
is one *domain*; every tenth document of a domain is held out and never trained on.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import subprocess
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("SERVING_TWIN_DATA", ROOT.parent / "shared" / "data"))
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "serving-twin"
HELD_OUT_EVERY = 10


@dataclass(frozen=True)
class Domain:
    """One kind of text: documents to train on and documents held out."""

    name: str
    train: tuple[str, ...]
    held_out: tuple[str, ...]


def _perl_doc() -> list[str]:
    folder = CACHE / "corpus" / "perl-doc"
    if not any(folder.glob("**/*.pod")):
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", "perl-doc"], cwd=folder, check=True)
        for package in folder.glob("perl-doc*.deb"):
            subprocess.run(["dpkg", "-x", package.name, "."], cwd=folder, check=True)
    paths = sorted(folder.glob("**/*.pod"), key=lambda path: path.name)
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths]


def _python_sources(limit_bytes: int = 8_000_000) -> list[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "encodings"}
    documents, size = [], 0
    for path in sorted(root.glob("**/*.py")):
        if skipped & set(path.relative_to(root).parts):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if 2_000 < len(text) < 150_000:
            documents.append(text)
            size += len(text)
        if size > limit_bytes:
            break
    return documents


def _wikipedia() -> list[str]:
    with gzip.open(DATA / "text-wikitext2-valid/wikitext-2.valid.txt.gz", "rt") as stream:
        lines = stream.readlines()
    documents: list[list[str]] = []
    for line in lines:
        is_title = line.startswith(" = ") and not line.startswith(" = = ")
        if is_title or not documents:
            documents.append([])
        documents[-1].append(line)
    return ["".join(lines) for lines in documents if len(lines) > 5]


def _speeches() -> list[str]:
    with zipfile.ZipFile(DATA / "text-state-union/state_union.zip") as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".txt"))
        return [archive.read(name).decode("latin-1") for name in names]


def _plays(pieces: int = 40) -> list[str]:
    with gzip.open(DATA / "text-tinyshakespeare/input.txt.gz", "rt") as stream:
        text = stream.read()
    length = len(text) // pieces
    return [text[i * length : (i + 1) * length] for i in range(pieces)]


def _meetings() -> list[str]:
    documents = []
    for name in ("academic-train", "committee-train", "all-val"):
        with gzip.open(DATA / f"qa-qmsum/{name}.jsonl.gz", "rt") as stream:
            for line in stream:
                turns = json.loads(line)["meeting_transcripts"]
                documents.append("\n".join(f"{t['speaker']}: {t['content']}" for t in turns))
    return documents


def _stories() -> list[str]:
    documents = []
    with tarfile.open(DATA / "qa-fairytale/fairytaleqa-train.tar.gz") as archive:
        members = {member.name: member for member in archive.getmembers()}
        for name in sorted(members):
            stream = archive.extractfile(members[name]) if name.endswith("-story.csv") else None
            if stream is not None:
                rows = csv.DictReader(io.StringIO(stream.read().decode("utf-8", "replace")))
                documents.append("\n".join(row["text"] for row in rows))
    return documents


def _mathematics(per_document: int = 20) -> list[str]:
    with gzip.open(DATA / "prompts-gsm8k-test/test.jsonl.gz", "rt") as stream:
        rows = [json.loads(line) for line in stream]
    problems = [f"Question: {row['question']}\nAnswer: {row['answer']}\n" for row in rows]
    return [
        "\n".join(problems[i : i + per_document]) for i in range(0, len(problems), per_document)
    ]


SOURCES = {
    "perl": _perl_doc,
    "python": _python_sources,
    "wikipedia": _wikipedia,
    "speeches": _speeches,
    "plays": _plays,
    "meetings": _meetings,
    "stories": _stories,
    "mathematics": _mathematics,
}


def read_domains() -> tuple[Domain, ...]:
    """All domains, in a fixed order.

    Raises:
        OSError: If a data file is absent (set SERVING_TWIN_DATA).
        subprocess.CalledProcessError: If ``perl-doc`` can be neither found nor fetched.
    """
    domains = []
    for name, read in SOURCES.items():
        documents = read()
        held_out = tuple(d for i, d in enumerate(documents) if i % HELD_OUT_EVERY == 7)
        train = tuple(d for i, d in enumerate(documents) if i % HELD_OUT_EVERY != 7)
        domains.append(Domain(name, train, held_out))
    return tuple(domains)
