"""What the sidebar asks about a prefix cache: whose requests, which policies, which sizes."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

import streamlit as st

from dashboard.fields import KEEP, number
from dashboard.uploads import path_of
from models.hardware import devices
from models.llm_catalog import catalog
from policies.catalog import EVICTION
from traces.prefix_workloads import WORKLOADS
from twin.cache_curves import DEFAULT_DEVICE, DEFAULT_MFU, DEFAULT_MODEL, CacheQuestion
from twin.cache_sizes import DEFAULT_SIZES

GENERATOR_KIND, TRACE_KIND = "Generator", "Trace file"
DEFAULT_POLICIES = ("lru", "lfu", "gdsf", "s3_fifo", "arc", "tree_hd")
SIZES = "1%, 2%, 5%, 10%, 20%, 50%"
NUM_REQUESTS = 500  # answered in seconds by one core


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixForm:
    """The fields of the form.

    Attributes:
        trace: A generator's name, or the path of a trace; empty until one was chosen.
        is_file: Whether it is a path.
        num_requests: The first so many; None for all.
        seed: Of generators and session starts.
        question: Policies, sizes, model and device.
    """

    trace: str
    is_file: bool
    num_requests: int | None
    seed: int
    question: CacheQuestion

    @property
    def key(self) -> str:
        """Equal for equal questions: the fields, and the state of the file."""
        state = ""
        if self.is_file and Path(self.trace).exists():
            stat = Path(self.trace).stat()
            state = f"{stat.st_size} {stat.st_mtime_ns}"
        return f"{self!r} {state}"

    def command_line(self) -> str:
        """The ``twin cache`` command that asks the same."""
        asked = self.question
        words = ["twin", "cache", self.trace]
        for name in asked.policies:
            words += ["--policy", name]
        for size in asked.sizes:
            words += ["--size", size]
        for option, value, default in (
            ("--requests", self.num_requests, None),
            ("--seed", self.seed, 1),
            ("--model", asked.model, DEFAULT_MODEL),
            ("--device", asked.device, DEFAULT_DEVICE),
            ("--mfu", asked.mfu, DEFAULT_MFU),
        ):
            if value != default:
                words += [option, str(value)]
        return shlex.join(words)


def ask_prefix() -> PrefixForm:
    """The form in the sidebar."""
    kind = st.segmented_control(
        "Requests",
        (GENERATOR_KIND, TRACE_KIND),
        default=GENERATOR_KIND,
        required=True,
        key="prefix.kind",
        label_visibility="collapsed",
        width="stretch",
    )
    is_file = kind == TRACE_KIND
    trace = _ask_trace() if is_file else _ask_generator()
    policies = st.multiselect(
        "Eviction policies",
        tuple(EVICTION),
        default=[name for name in DEFAULT_POLICIES if name in EVICTION],
        key="prefix.policies",
        persist_state=KEEP,
        placeholder="all of them",
    )
    sizes = st.text_input(
        "Cache sizes",
        SIZES,
        key="prefix.sizes",
        persist_state=KEEP,
        help="Shares of the different blocks (2%), blocks (10000) or memory (64GiB), by commas.",
    )
    left, right = st.columns(2)
    num_requests = number(
        left, "First requests", "prefix_requests", NUM_REQUESTS, least=1, empty="all"
    )
    seed = number(right, "Seed", "prefix_seed", 1, least=0)
    model = st.selectbox(
        "Model",
        tuple(catalog()),
        index=tuple(catalog()).index(DEFAULT_MODEL),
        key="prefix.model",
        persist_state=KEEP,
        help="It says what a block takes in memory and what computing it again costs.",
    )
    left, right = st.columns(2)
    device = left.selectbox(
        "Device",
        tuple(devices()),
        index=tuple(devices()).index(DEFAULT_DEVICE),
        key="prefix.device",
        persist_state=KEEP,
    )
    mfu = number(right, "MFU of prefill", "prefix_mfu", DEFAULT_MFU, least=0.01, most=1.0)
    return PrefixForm(
        trace=trace,
        is_file=is_file,
        num_requests=num_requests,
        seed=1 if seed is None else seed,
        question=CacheQuestion(
            policies=tuple(policies),
            sizes=split_sizes(sizes) or DEFAULT_SIZES,
            model=model,
            device=device,
            mfu=DEFAULT_MFU if mfu is None else mfu,
            jobs=1,
        ),
    )


def split_sizes(text: str) -> tuple[str, ...]:
    """The sizes between commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _ask_generator() -> str:
    name: str = st.selectbox(
        "Drawn by a generator",
        tuple(WORKLOADS),
        key="prefix.generator",
        persist_state=KEEP,
        help="Questions over documents, chats, agents, or all of them and one-off prompts.",
    )
    return name


def _ask_trace() -> str:
    upload = st.file_uploader(
        "Trace that names its prompt blocks",
        key="upload.prefix_trace",
        help="Mooncake, Qwen-Bailian, agentic sessions, Dynamo, vLLM benchmark; packed or not.",
    )
    path = st.text_input(
        "or its path on this machine",
        key="prefix.trace_path",
        persist_state=KEEP,
        placeholder="traces/conversation.jsonl.gz",
    )
    return str(path_of(upload)) if upload is not None else path.strip()
