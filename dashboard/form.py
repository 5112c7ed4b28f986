"""The form: every field has a default, so that there is an answer before the first click."""

from __future__ import annotations

from typing import Any

import streamlit as st

from dashboard.fields import KEEP, number
from dashboard.form_latency import ask_latency
from dashboard.form_workload import ask_workload
from dashboard.questions import AUTO, CHOSEN, LISTED, Question
from policies.catalog import ROUTING
from twin.plots import LEVEL_STYLE

SEMANTICS = {"barrier": "in turn (barrier)", "pingpong": "in ping-pong"}
SIMULATE_WHICH = {
    AUTO: "a spread, and all near the best",
    CHOSEN: "only the ratio in use",
    LISTED: "these",
}


def ask_form() -> Question:
    """Draw the form; returns what it says now."""
    st.markdown("**Workload**")
    workload = ask_workload()
    st.markdown("**Latency of the three stages**")
    stages = ask_latency()
    st.markdown("**Bundle**")
    bundle = _ask_bundle()
    st.markdown("**Limits**")
    limits = _ask_limits()
    with st.expander("Prices and routing"):
        prices = _ask_prices()
    with st.expander("Advanced"):
        advanced = _ask_advanced()
    return Question(workload=workload, stages=stages, **bundle, **limits, **prices, **advanced)


def _ask_bundle() -> dict[str, Any]:
    semantics = st.segmented_control(
        "Attention and FFN work",
        tuple(SEMANTICS),
        default="barrier",
        required=True,
        format_func=SEMANTICS.__getitem__,
        key="form.semantics",
        width="stretch",
    )
    left, right = st.columns(2)
    bundle = {
        "semantics": semantics,
        "batch_per_worker": number(
            left,
            "Slots a worker, B",
            "batch_per_worker",
            256,
            least=1,
            most=65_536,
            meaning="Per microbatch. Empty: the best B within the limits.",
        ),
        "r": number(
            right,
            "Ratio, r",
            "r",
            None,
            least=1,
            most=4096,
            meaning="Attention workers per FFN server. Empty: the best within the limits.",
        ),
        "microbatches": number(
            left,
            "Microbatches, m",
            "microbatches",
            None,
            least=1,
            most=16,
            meaning="In flight at once. Empty: 1 in turn, 2 in ping-pong.",
        ),
        "r_max": number(
            right,
            "Largest r",
            "r_max",
            None,
            least=1,
            most=4096,
            meaning="Empty: about twice the mean-field optimum.",
        ),
    }
    if semantics == "pingpong":
        meaning = "Empty: half of the communication time."
        bundle["one_way_ms"] = number(
            left, "One way, ms", "one_way_ms", None, least=0.0, meaning=meaning
        )
    return bundle


def _ask_limits() -> dict[str, Any]:
    left, right = st.columns(2)
    return {
        "max_tpot_ms": number(
            left,
            "Max TPOT, ms",
            "max_tpot_ms",
            None,
            least=0.001,
            step=5.0,
            empty="none",
            meaning="Mean time per output token over all layers.",
        ),
        "kv_capacity_tokens": number(
            right,
            "KV tokens a worker",
            "kv_capacity_tokens",
            None,
            least=1,
            step=10_000,
            empty="none",
            meaning="KV tokens that one attention worker can hold.",
        ),
    }


def _ask_prices() -> dict[str, Any]:
    left, right = st.columns(2)
    meaning = "Throughput is per unit of price."
    return {
        "attention_price": number(
            left,
            "Attention worker",
            "attention_price",
            1.0,
            least=0.001,
            step=0.1,
            meaning=meaning,
        ),
        "ffn_price": number(right, "FFN server", "ffn_price", 1.0, least=0.001, step=0.1),
        "routing": st.selectbox("A free slot is refilled by", tuple(ROUTING), key="form.routing"),
    }


def _ask_advanced() -> dict[str, Any]:
    level = st.selectbox(
        "Level of theory that decides",
        tuple(LEVEL_STYLE),
        index=len(LEVEL_STYLE) - 1,
        format_func=lambda name: LEVEL_STYLE[name][0],
        key="form.level",
    )
    left, right = st.columns(2)
    return {
        "level": level,
        "kv_safety_z": number(
            left,
            "KV kept free, sd",
            "kv_safety_z",
            3.0,
            least=0.0,
            step=0.5,
            meaning="Standard deviations of load kept free below the KV capacity.",
        ),
        "confidence": number(
            right, "Confidence", "confidence", 0.95, least=0.5, most=0.9999, step=0.01
        ),
        "seed": number(left, "Seed", "seed", 1, least=0),
        "replications": number(right, "Replications", "replications", 4, least=2, most=10_000),
        **_ask_simulation(),
    }


def _ask_simulation() -> dict[str, Any]:
    left, right = st.columns(2)
    start = right.selectbox(
        "Slots start",
        ("stationary", "cold"),
        key="form.start",
        help="cold: every request is fresh at the first step.",
    )
    num_cycles = number(
        left,
        "Cycles",
        "num_cycles",
        None,
        least=20,
        step=100,
        meaning="Simulated cycles of one replication. Empty: a few lifetimes of a request.",
    )
    which = st.selectbox(
        "Ratios to simulate",
        tuple(SIMULATE_WHICH),
        format_func=SIMULATE_WHICH.__getitem__,
        key="form.simulate_r",
    )
    listed = ""
    if which == LISTED:
        listed = st.text_input(
            "Ratios", key="form.listed_r", persist_state=KEEP, placeholder="1, 4, 8, 16"
        )
    return {
        "start": start,
        "num_cycles": num_cycles,
        "simulate_r": which,
        "listed_r": listed,
        "compare_routing": st.checkbox(
            "Compare all routing policies", value=True, key="form.compare_routing"
        ),
    }
