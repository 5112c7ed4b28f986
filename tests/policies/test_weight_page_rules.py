"""Rules R1-R7: right verdicts from elsewhere, one illegal history per sub-case, a naive oracle."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from policies.weight_page_history import HistoryError
from policies.weight_page_rules import HistoryChecker, check_history

CASES = Path(__file__).resolve().parents[1] / "golden" / "pagedweight_cases.json"
TRACES = json.loads(CASES.read_text())["traces"]


def init(block="A", q=4, qmin=2, qmax=8, **more):
    return {"ev": "init", "block": block, "q": q, "qmin": qmin, "qmax": qmax, **more}


def plan(number=1, **want):
    return {"ev": "plan", "plan": number, "want": want}


def commit(number=1, **to):
    return {"ev": "commit", "plan": number, "set": to}


def launch(k, **use):
    return {"ev": "launch", "k": k, "use": use}


def retire(k):
    return {"ev": "retire", "k": k}


def close(number=1, **more):
    return {"ev": "close", "plan": number, **more}


def part(ev, plane, block="A", **more):
    return {"ev": ev, "block": block, "plane": plane, **more}


def table(ev, bits, block="A", **more):
    return {"ev": ev, "block": block, "table": bits, **more}


RAISED = [init(), plan(A=5), part("xfer", 4), part("xfer_ok", 4), commit(A=5), close()]
DROPPED = [init(), plan(A=3), commit(A=3), close()]
PAGED = [
    {"ev": "arena", "pages": 6},
    init(q=2, pages=[{"plane": 0, "pages": [0]}, {"plane": 1, "pages": [1]}]),
]

ILLEGAL = {
    "a launch uses the desired width": ("R1 width", [init(), plan(A=3), launch(1, A=3)]),
    "a launch uses d of a raise whose copy is under way": (
        "R1 width",
        [init(), plan(A=5), part("xfer", 4), launch(1, A=5)],
    ),
    "a launch uses d of a raise whose copy has landed": (
        "R1 width",
        [init(), plan(A=5), part("xfer", 4), part("xfer_ok", 4), launch(1, A=5)],
    ),
    "a launch uses the width before the commit": ("R1 width", [*DROPPED, launch(1, A=4)]),
    "one of two blocks is used at another width": (
        "R1 width",
        [init("A"), init("B", q=3), launch(1, A=4, B=4)],
    ),
    "a raise commits without its plane": ("R2 resident", [init(), plan(A=5), commit(A=5)]),
    "a raise commits before its copy has landed": (
        "R2 resident",
        [init(), plan(A=5), part("xfer", 4), commit(A=5)],
    ),
    "a raise commits although its copy failed": (
        "R2 resident",
        [init(), plan(A=5), part("xfer", 4), part("xfer_fail", 4), commit(A=5)],
    ),
    "a raise commits although its copy was cancelled": (
        "R2 resident",
        [init(), plan(A=5), part("xfer", 4), {"ev": "cancel", "block": "A"}, commit(A=5)],
    ),
    "a raise commits over a hole": (
        "R2 resident",
        [init(), plan(A=6), part("xfer", 4), part("xfer", 5), part("xfer_ok", 5), commit(A=6)],
    ),
    "a raise commits a plane that was freed": (
        "R2 resident",
        [*DROPPED, part("free", 3), plan(2, A=4), commit(2, A=4)],
    ),
    "a freed plane is wanted again without a copy": (
        "R2 resident",
        [*DROPPED, part("free", 3), plan(2, A=4), part("reraise", 3)],
    ),
    "a raise commits without its table": (
        "R2 resident",
        [init(tables="all"), plan(A=5), part("xfer", 4), part("xfer_ok", 4), commit(A=5)],
    ),
    "a drop commits without its only table": (
        "R2 resident",
        [init(tables="active"), plan(A=3), commit(A=3)],
    ),
    "a corrupt copy is taken as landed": (
        "R2 resident",
        [init(), plan(A=5), part("xfer", 4, checksum=7), part("xfer_ok", 4, checksum=8)],
    ),
    "a copy lands that never started": ("R2 resident", [init(), plan(A=5), part("xfer_ok", 4)]),
    "a copy lands that had failed": (
        "R2 resident",
        [init(), plan(A=5), part("xfer", 4), part("xfer_fail", 4), part("xfer_ok", 4)],
    ),
    "a freed plane lands without a new copy": (
        "R2 resident",
        [*DROPPED, part("free", 3), plan(2, A=4), part("xfer_ok", 3)],
    ),
    "a table lands that never started": (
        "R2 resident",
        [init(tables="all"), plan(A=5), part("xfer", 4), table("xfer_ok", 5)],
    ),
    "a plane below the committed width is freed": ("R3 committed", [init(), part("free", 3)]),
    "a plane is freed before the drop commits": (
        "R3 committed",
        [init(), plan(A=3), part("free", 3)],
    ),
    "a committed table is freed": ("R3 committed", [init(tables="all"), table("free", 3)]),
    "a plane is freed under a kernel from before the commit": (
        "R3 live",
        [init(), launch(1, A=4), plan(A=3), commit(A=3), part("free", 3)],
    ),
    "a plane is freed under the second of two such kernels": (
        "R3 live",
        [init(), launch(1, A=4), launch(2, A=4), *DROPPED[1:], retire(1), part("free", 3)],
    ),
    "a kernel from before counts although another block is all it names": (
        "R3 live",
        [init(), init("B"), launch(1, B=4), *DROPPED[1:], part("free", 3)],
    ),
    "a table is freed under a kernel from before the commit": (
        "R3 live",
        [init(tables="all"), launch(1, A=4), *DROPPED[1:], table("free", 4)],
    ),
    "a raise and a drop later, new kernels count": (
        "R3 live",
        [*RAISED, launch(1, A=5), plan(2, A=4), commit(2, A=4), part("free", 4)],
    ),
    "a close changes q": ("R4 unchanged", [init(), plan(A=3), close(set={"A": 3})]),
    "a failed copy changes q": (
        "R4 unchanged",
        [init(), plan(A=5), part("xfer", 4), part("xfer_fail", 4, q=5)],
    ),
    "a cancellation changes q": (
        "R4 unchanged",
        [init(), plan(A=5), part("xfer", 4), part("cancel", 4, q=5)],
    ),
    "a closed plan commits": ("R4 unchanged", [init(), plan(A=3), close(), commit(A=3)]),
    "a plane is freed twice": ("R5 free", [*DROPPED, part("free", 3), part("free", 3)]),
    "a plane that was never there is freed": ("R5 free", [init(), part("free", 6)]),
    "a plane is freed while it is copied": (
        "R5 free",
        [init(), plan(A=5), part("xfer", 4), part("free", 4)],
    ),
    "a committed plane is copied": ("R5 copy", [init(), part("xfer", 2)]),
    "a plane that waits for its release is copied": ("R5 copy", [*DROPPED, part("xfer", 3)]),
    "a landed plane is copied": (
        "R5 copy",
        [init(), plan(A=6), part("xfer", 4), part("xfer_ok", 4), part("xfer", 4)],
    ),
    "a plane is copied twice at once": (
        "R5 copy",
        [init(), plan(A=5), part("xfer", 4), part("xfer", 4)],
    ),
    "a copy fails that never started": ("R5 free", [init(), plan(A=5), part("xfer_fail", 4)]),
    "a copy fails twice": (
        "R5 free",
        [init(), plan(A=5), part("xfer", 4), part("xfer_fail", 4), part("xfer_fail", 4)],
    ),
    "a copy is cancelled that never started": (
        "R5 free",
        [init(), plan(A=5), part("xfer", 4), part("cancel", 5)],
    ),
    "a resident plane fails": ("R5 copy", [init(), part("xfer_fail", 3)]),
    "a block starts outside its range": ("R6 range", [init(q=9)]),
    "q falls below qmin": ("R6 range", [init(q=2), plan(A=1), commit(A=1)]),
    "q rises above qmax": (
        "R6 range",
        [init(qmax=4), plan(A=5), part("xfer", 4), part("xfer_ok", 4), commit(A=5)],
    ),
    "a plan outside the range is followed": (
        "R6 range",
        [init(qmax=4), plan(A=9), part("xfer", 4), part("xfer_ok", 4), commit(A=5)],
    ),
    "a drop goes below d": ("R6 between", [init(), plan(A=3), commit(A=2)]),
    "a raise goes beyond d": (
        "R6 between",
        [
            init(),
            plan(A=5),
            *(part(ev, p) for p in (4, 5) for ev in ("xfer", "xfer_ok")),
            commit(A=6),
        ],
    ),
    "a raise moves down": ("R6 between", [init(), plan(A=5), commit(A=3)]),
    "a block moves that the plan does not name": (
        "R6 between",
        [init(), init("B"), plan(A=3), commit(A=3, B=3)],
    ),
    "a plan nobody opened commits": ("R6 between", [init(), commit(7, A=3)]),
    "a plan is open at rest": ("R7 plan", [init(), plan(A=3)]),
    "a copy is pending at rest": ("R7 pending", [init(), plan(A=5), part("xfer", 4), close()]),
    "a plane that no width reads is never freed": (
        "R7 resident",
        [init(qmax=4), part("xfer", 4), part("xfer_ok", 4)],
    ),
    "a dropped plane is never freed": ("R7 resident", DROPPED),
    "a plane of a partial raise is never freed": (
        "R7 resident",
        [init(), plan(A=5), part("xfer", 4), part("xfer_ok", 4), close()],
    ),
    "a table is left behind": (
        "R7 resident",
        [init(tables="all"), *DROPPED[1:], part("free", 3)],
    ),
    "two planes share a page": (
        "R7 pages",
        [*PAGED, plan(A=3), part("xfer", 2, pages=[1])],
    ),
    "a KV block takes a page of the weights": (
        "R7 pages",
        [*PAGED, {"ev": "kv_alloc", "pages": [1]}],
    ),
    "a page outside the arena is used": ("R7 pages", [*PAGED, {"ev": "kv_alloc", "pages": [6]}]),
    "a KV page is given back twice": (
        "R7 pages",
        [
            *PAGED,
            {"ev": "kv_alloc", "pages": [3]},
            *[{"ev": "kv_free", "pages": [3]}] * 2,
        ],
    ),
    "a freed plane keeps a page": (
        "R7 pages",
        [
            *PAGED,
            plan(A=3),
            part("xfer", 2, pages=[2, 3]),
            part("xfer_ok", 2),
            part("free", 2, pages=[2]),
        ],
    ),
    "the sum of pages is wrong": (
        "R7 pages",
        [*PAGED, {"ev": "pages", "weights": 2, "kv": 0, "free": 3}],
    ),
    "the sum of pages is right and its terms are wrong": (
        "R7 pages",
        [*PAGED, {"ev": "pages", "weights": 3, "kv": 0, "free": 3}],
    ),
    "the sum is wrong where no page is followed": (
        "R7 pages",
        [init(), {"ev": "pages", "weights": 3, "kv": 1, "free": 3, "arena": 8}],
    ),
}

LEGAL = {
    "nothing happens": [init()],
    "a drop": [*DROPPED, part("free", 3)],
    "a raise": RAISED,
    "a kernel after the commit does not hold the plane": [
        *DROPPED,
        launch(1, A=3),
        part("free", 3),
        retire(1),
    ],
    "a kernel of an earlier width holds only what it reads": [
        init(),
        launch(1, A=4),
        plan(A=3),
        commit(A=3),
        close(),
        retire(1),
        launch(2, A=3),
        plan(2, A=2),
        commit(2, A=2),
        close(2),
        part("free", 3),  # kernel 2 was launched after plane 3 was given up
        retire(2),
        part("free", 2),
    ],
    "a retiring plane is wanted again": [
        *DROPPED,
        plan(2, A=4),
        part("reraise", 3),
        commit(2, A=4),
        close(2),
    ],
    "a landed plane that was given up is wanted again": [
        init(),
        plan(A=5),
        part("xfer", 4),
        part("xfer_ok", 4),
        close(),
        plan(2, A=5),
        part("reraise", 4),
        commit(2, A=5),
        close(2),
    ],
    "a landed plane that a newer plan took over is wanted again": [
        init(),
        plan(A=6),
        *(part(ev, p) for p in (4, 5) for ev in ("xfer", "xfer_ok")),
        plan(2, A=5),
        plan(3, A=6),
        part("reraise", 5),
        commit(3, A=6),
        close(),
        close(2),
        close(3),
    ],
    "a plane is wanted again before its plan is written": [
        *DROPPED,
        part("reraise", 3),
        plan(2, A=4),
        commit(2, A=4),
        close(2),
    ],
    "a plane is wanted again twice, and once more superseded between": [
        *DROPPED,
        plan(2, A=4),
        part("reraise", 3),
        commit(2, A=4),
        close(2),
        plan(3, A=3),
        commit(3, A=3),
        plan(4, A=4),
        part("reraise", 3),
        commit(4, A=4),
        close(3),
        close(4),
    ],
    "a plan outside the range leads nowhere": [init(qmax=5), plan(A=9), close()],
    "a plan outside the range is followed as far as the range": [
        init(qmax=5),
        plan(A=9),
        part("xfer", 4),
        part("xfer_ok", 4),
        commit(A=5),
        close(),
    ],
    "a plane that no width reads comes and goes": [
        init(qmax=4),
        part("xfer", 4),
        part("xfer_ok", 4),
        part("free", 4),
    ],
    "a landed plane that no commit ever used is freed under a kernel": [
        init(),
        launch(1, A=4),
        plan(A=5),
        part("xfer", 4),
        part("xfer_ok", 4),
        close(),
        part("free", 4),
        retire(1),
    ],
    "a copy fails and is tried again": [
        init(),
        plan(A=5),
        part("xfer", 4),
        part("xfer_fail", 4, q=4, reason="checksum"),
        close(set={"A": 4}),
        plan(2, A=5),
        part("xfer", 4),
        part("xfer_ok", 4),
        commit(2, A=5),
        close(2),
    ],
    "groups of one plan commit one after the other": [
        init("A"),
        init("B"),
        plan(A=5, B=5),
        *(part(ev, 4, b) for b in "AB" for ev in ("xfer", "xfer_ok")),
        commit(A=5),
        commit(B=5),
        close(),
    ],
    "a copy and a table for every width": [
        init(tables="all"),
        plan(A=5),
        part("xfer", 4, checksum=3),
        table("xfer", 5),
        table("xfer_ok", 5),
        part("xfer_ok", 4, checksum=3),
        commit(A=5),
        close(),
    ],
    "only the table of q": [
        init(tables="active"),
        plan(A=3),
        table("xfer", 3),
        table("xfer_ok", 3),
        commit(A=3),
        close(),
        part("free", 3),
        table("free", 4),
    ],
    "pages go from weights to the KV cache": [
        *PAGED,
        plan(A=3),
        part("xfer", 2, pages=[2]),
        part("xfer_ok", 2),
        {"ev": "pages", "weights": 3, "kv": 0, "free": 3},
        part("free", 2, pages=[2]),
        {"ev": "kv_alloc", "pages": [2, 3]},
        {"ev": "pages", "weights": 2, "kv": 2, "free": 2},
        {"ev": "kv_free", "pages": [2]},
        close(),
    ],
}


@pytest.mark.parametrize("trace", TRACES["legal"])
def test_given_legal_histories_are_legal(trace):
    assert check_history(trace) is None


@pytest.mark.parametrize("case", TRACES["illegal"])
def test_the_first_broken_rule_of_given_illegal_histories_is_named(case):
    assert str(check_history(case["trace"])) == case["first_broken"]


@pytest.mark.parametrize("name", ILLEGAL)
def test_every_way_to_break_a_rule_is_named(name):
    words, history = ILLEGAL[name]
    violation = check_history(history)
    assert str(violation) == words
    at_rest = words in ("R7 plan", "R7 pending", "R7 resident")
    assert violation.index == len(history) - (0 if at_rest else 1)


@pytest.mark.parametrize("name", LEGAL)
def test_legal_histories_are_accepted(name):
    assert check_history(LEGAL[name]) is None


def test_there_is_an_illegal_history_for_every_rule():
    rules = {words.split()[0] for words, _ in ILLEGAL.values()}
    assert rules == {f"R{n}" for n in range(1, 8)}


def test_a_history_that_goes_on_is_not_held_to_the_rules_of_rest():
    assert check_history([init(), plan(A=3)], at_rest=False) is None


def test_the_first_violation_stays():
    checker = HistoryChecker()
    for event in [init(), part("xfer", 0), part("free", 7)]:
        checker.feed(event)
    assert str(checker.violation) == str(checker.rest()) == "R5 copy"
    assert checker.violation.index == 1


@pytest.mark.parametrize(
    "history",
    [
        [{"ev": "lunch"}],
        [{"ev": "launch", "k": 1}],
        [retire(1)],
        [init(), init()],
        [init(), launch(1, B=2)],
        [init(), close()],
        [init(), plan(A=3), plan(A=3)],
        [init(), launch(1, A=4), launch(1, A=4)],
        [init(), part("reraise", 3)],  # the committed width reads it
        [init(tables="all"), table("reraise", 4)],
        [init(), plan(A=5), part("xfer", 4), part("xfer_ok", 4), part("reraise", 4)],
        [*DROPPED, plan(2, A=4), part("reraise", 3), part("reraise", 3)],
        [init(), {"ev": "arena", "pages": 6}],
        [{"ev": "arena", "pages": 6}, {"ev": "arena", "pages": 7}],
        [{"ev": "pages", "weights": 1, "kv": 1, "free": 1}],
    ],
)
def test_events_that_form_no_history_are_an_error_that_names_the_event(history):
    with pytest.raises(HistoryError, match=f"event {len(history) - 1}"):
        check_history(history)


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (None, "an event must be a mapping, found None"),
        ("init", "an event must be a mapping, found 'init'"),
        ([("ev", "init")], "an event must be a mapping"),
        ({}, "no such event None"),
        ({"ev": ["plan"]}, r"no such event \['plan'\]"),
        (init("B", q=4.0), "init: 'q' must be an integer, found 4.0"),
        (init("B", q="4"), "init: 'q' must be an integer, found '4'"),
        (init("B", q=None), "init: 'q' must be an integer, found None"),
        (init("B", q=True), "init: 'q' must be an integer, found True"),
        (init("B", qmin=2.0), "init: 'qmin' must be an integer >= 0, found 2.0"),
        (init("B", qmax=float("nan")), "init: 'qmax' must be an integer >= 0, found nan"),
        (init(["B"]), r"init: 'block' must be a name \(hashable\), found \['B'\]"),
        (init(("B", [])), r"init: 'block' must be a name"),
        (init(None), "init: 'block' must be a name"),
        (init("B", tables="some"), "init: 'tables' must be 'all' or 'active', found 'some'"),
        (init("B", tables=["all"]), "init: 'tables' must be 'all' or 'active'"),
        (init("B", pages=[[0]]), "init: 'pages' must be a list of a plane or a table"),
        (init("B", pages=[{"plane": 0}]), "init: 'pages' must be a list of a plane or a table"),
        (init("B", pages=[{"plane": 0, "table": 2, "pages": []}]), "init: 'pages' must be"),
        (part("xfer", "4"), "xfer: 'plane' must be an integer >= 0, found '4'"),
        (part("xfer", 4.0), "xfer: 'plane' must be an integer >= 0, found 4.0"),
        (part("xfer", -1), "xfer: 'plane' must be an integer >= 0, found -1"),
        (part("xfer_ok", None), "xfer_ok: 'plane' must be an integer >= 0, found None"),
        (part("free", "3"), "free: 'plane' must be an integer >= 0, found '3'"),
        (part("free", [3]), "free: 'plane' must be an integer >= 0"),
        (part("cancel", "4"), "cancel: 'plane' must be an integer >= 0, found '4'"),
        (table("reraise", 2.5), "reraise: 'table' must be an integer >= 0, found 2.5"),
        ({"ev": "xfer", "block": "A"}, "xfer: must name a plane or a table, found 0 of them"),
        ({**part("xfer", 4), "table": 5}, "xfer: must name a plane or a table, found 2 of them"),
        ({"ev": "cancel", "block": "A", "plane": 4, "table": 5}, "cancel: must name"),
        (part("xfer", 4, checksum="a1"), "xfer: 'checksum' must be an integer, found 'a1'"),
        (part("xfer", 4, pages=7), "xfer: 'pages' must be a list of integers >= 0, found 7"),
        (part("xfer", 4, pages=[0.5]), "xfer: 'pages' must be a list of integers >= 0"),
        (part("free", 4, pages="no"), "free: 'pages' must be a list of integers >= 0"),
        (part("xfer_fail", 4, q="4"), "xfer_fail: 'q' must be an integer, found '4'"),
        (part("xfer_fail", 4, q=None), "xfer_fail: 'q' must be an integer, found None"),
        (close(set=[]), r"close: 'set' must be a mapping from blocks to integers, found \[\]"),
        ({"ev": "plan", "plan": 2, "want": None}, "plan: 'want' must be a mapping .* found None"),
        (plan(2, A="5"), "plan: 'want' must be a mapping from blocks to integers"),
        (plan(2, A=None), "plan: 'want' must be a mapping from blocks to integers"),
        (plan([2], A=5), "plan: 'plan' must be a name"),
        ({"ev": "plan", "plan": 2}, "plan: 'want' is missing"),
        (launch(1, A=4.0), "launch: 'use' must be a mapping from blocks to integers"),
        ({"ev": "launch", "k": 1, "use": ["A"]}, "launch: 'use' must be a mapping"),
        (launch({}, A=4), "launch: 'k' must be a name"),
        ({"ev": "commit", "plan": 1, "set": 3}, "commit: 'set' must be a mapping"),
        (commit(A="3"), "commit: 'set' must be a mapping from blocks to integers"),
        ({"ev": "arena", "pages": [6]}, "arena: 'pages' must be an integer >= 0"),
        ({"ev": "kv_alloc", "pages": 3}, "kv_alloc: 'pages' must be a list of integers >= 0"),
        ({"ev": "pages", "weights": "2", "kv": 0, "free": 0}, "pages: 'weights' must be"),
        ({"ev": "pages", "weights": 2, "kv": 0, "free": 0, "arena": None}, "pages: 'arena' must"),
    ],
)
def test_malformed_events_are_an_error_that_names_key_and_value(event, message):
    with pytest.raises(HistoryError, match=f"^event 2: {message}"):
        check_history([init(), plan(A=3), event])


def test_numbers_of_numpy_and_stated_nothings_are_no_fault():
    kinds = {key: np.int64(value) for key, value in {"q": 4, "qmin": 2, "qmax": 8}.items()}
    history = [
        init(**kinds, tables=None, pages=None),
        plan(A=np.int32(5)),
        part("xfer", np.int64(4), pages=None, checksum=None),
        part("xfer_ok", 4, checksum=7),
        commit(A=5),
        close(),
    ]
    assert check_history(history) is None


# --- an oracle that looks back over the whole history at every event ---

BLOCKS = {"A": (2, 6), "B": (3, 5)}


def oracle(history):
    """Rule of the first break, "none", or "no history"; quadratic and without any state."""
    for place, event in enumerate(history):
        verdict = judge(history[:place], event)
        if verdict:
            return verdict
    return rest(history)


def q_of(past, block):
    q = None
    for event in past:
        if event["ev"] == "init" and event["block"] == block:
            q = event["q"]
        if event["ev"] == "commit":
            q = event["set"].get(block, q)
    return q


def last_word(past, block, plane):
    first = next(e for e in past if e["ev"] == "init" and e["block"] == block)
    word = "xfer_ok" if plane < first["q"] else "free"
    for event in past:
        if event["ev"] in ("xfer", "xfer_ok", "xfer_fail", "free") and (
            (event["block"], event["plane"]) == (block, plane)
        ):
            word = event["ev"]
    return word


def runs(past, k):
    return sum({"launch": 1, "retire": -1}.get(e["ev"], 0) for e in past if e.get("k") == k) == 1


def judge(past, event):
    kind = event["ev"]
    opened = [e for e in past if e["ev"] == "plan" and e["plan"] == event.get("plan")]
    closed = any(e["ev"] == "close" and e["plan"] == event.get("plan") for e in past)
    if kind == "init":
        return "no history" if any(e.get("block") == event["block"] for e in past) else None
    if "block" in event and q_of(past, event["block"]) is None:
        return "no history"
    named = event.get("use") or event.get("want") or event.get("set") or {}
    if any(q_of(past, block) is None for block in named):
        return "no history"
    if kind == "launch":
        if runs(past, event["k"]):
            return "no history"
        return "R1" if any(q_of(past, b) != w for b, w in event["use"].items()) else None
    if kind == "retire":
        return None if runs(past, event["k"]) else "no history"
    if kind == "plan":
        return "no history" if opened else None
    if kind == "close":
        return None if opened and not closed else "no history"
    if kind == "commit":
        return judge_commit(past, event, opened, closed)
    word = last_word(past, event["block"], event["plane"])
    if kind == "xfer":
        return "R5" if word in ("xfer", "xfer_ok") else None
    if kind == "xfer_ok":
        return {"xfer": None, "xfer_ok": "R5"}.get(word, "R2")
    if kind == "xfer_fail":
        return None if word == "xfer" else "R5"
    return judge_free(past, event, word)


def judge_commit(past, event, opened, closed):
    verdicts = []
    for block, new in event["set"].items():
        old = q_of(past, block)
        d = opened[0]["want"].get(block, old) if opened and not closed else old
        low, high = BLOCKS[block]
        here = all(last_word(past, block, p) == "xfer_ok" for p in range(new))
        if new != old:
            outside = not low <= new <= high or not min(old, d) <= new <= max(old, d)
            verdicts.append("R4" if closed else "R6" if outside else None if here else "R2")
    return next((verdict for verdict in verdicts if verdict), None)


def judge_free(past, event, word):
    block, plane = event["block"], event["plane"]
    if word != "xfer_ok":
        return "R5"
    if plane < q_of(past, block):
        return "R3"
    lowered = [
        place
        for place, e in enumerate(past)
        if e["ev"] == "commit"
        and q_of(past[:place], block) > plane >= q_of(past[: place + 1], block)
    ]
    landed = [
        place
        for place, e in enumerate(past)
        if e["ev"] == "xfer_ok" and (e["block"], e["plane"]) == (block, plane)
    ]
    if not lowered or (landed and landed[-1] > lowered[-1]):
        return None
    before = [e["k"] for e in past[: lowered[-1]] if e["ev"] == "launch"]
    still = [k for k in before if not any(e == retire(k) for e in past)]
    return "R3" if still else None


def rest(history):
    opened = Counter(e["ev"] for e in history)
    if opened["plan"] != opened["close"]:
        return "R7"
    for block in BLOCKS:
        q = q_of(history, block)
        for plane in range(8):
            if last_word(history, block, plane) == "xfer":
                return "R7"
            if q is not None and (last_word(history, block, plane) == "xfer_ok") != (plane < q):
                return "R7"
    return "none"


def draw(chance, kernels):
    """Any event about two blocks, most of them out of place."""
    kind = chance.choice(
        ["launch", "retire", "plan", "xfer", "xfer_ok", "xfer_fail", "commit", "free", "close"]
    )
    blocks = [str(b) for b in chance.permutation(["A", "B"])[: chance.integers(1, 3)]]
    widths = {b: int(chance.integers(1, 8)) for b in blocks}
    number = int(chance.integers(1, 8))
    return {
        "launch": launch(kernels, **widths),
        "retire": retire(int(chance.integers(1, kernels + 1))),
        "plan": plan(number, **widths),
        "commit": commit(number, **widths),
        "close": close(number),
    }.get(kind, part(str(kind), int(chance.integers(8)), blocks[0]))


def settle(history):
    """Events that bring a legal history to rest."""
    for block in BLOCKS:
        for plane in range(8):
            if last_word(history, block, plane) == "xfer":
                history.append(part("xfer_fail", plane, block))
    for event in list(history):
        if event["ev"] == "plan" and close(event["plan"]) not in history:
            history.append(close(event["plan"]))
        if event["ev"] == "launch" and retire(event["k"]) not in history:
            history.append(retire(event["k"]))
    for block in BLOCKS:
        for plane in range(q_of(history, block), 8):
            if last_word(history, block, plane) == "xfer_ok":
                history.append(part("free", plane, block))
    return history


def random_history(seed):
    chance = np.random.default_rng(seed)
    history = [init("A", 4, *BLOCKS["A"]), init("B", 4, *BLOCKS["B"])]
    kernels = 1
    for _ in range(400):
        event = draw(chance, kernels)
        if judge(history, event) is None and not (event["ev"] == "retire" and event in history):
            history.append(event)
            kernels += event["ev"] == "launch"
    return settle(history)


def corrupted(history, chance):
    place = int(chance.integers(2, len(history)))
    way = chance.choice(["drop", "double", "swap", "replace", "insert"])
    bad = list(history)
    if way == "drop":
        del bad[place]
    elif way == "double":
        bad.insert(place, bad[place])
    elif way == "swap":
        bad[place - 1], bad[place] = bad[place], bad[place - 1]
    else:
        bad[place : place + (way == "replace")] = [draw(chance, 9)]
    return bad


def verdict(history):
    try:
        violation = check_history(history)
    except HistoryError:
        return "no history"
    return "none" if violation is None else violation.rule


@pytest.mark.parametrize("seed", range(12))
def test_random_legal_histories_are_accepted_and_corrupted_ones_judged_as_by_the_oracle(seed):
    history = random_history(seed)
    kinds = {event["ev"] for event in history}
    assert {"commit", "free", "xfer_ok", "launch"} <= kinds
    assert check_history(history) is None
    chance = np.random.default_rng(1000 + seed)
    verdicts = Counter()
    for _ in range(60):
        bad = corrupted(history, chance)
        assert verdict(bad) == oracle(bad)
        verdicts[verdict(bad)] += 1
    assert verdicts["none"] < 0.6 * 60
