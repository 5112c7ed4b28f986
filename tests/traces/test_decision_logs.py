import gzip

import numpy as np
import pytest

from traces.decisions import CompactDecisionLog, DecisionLog, read_decisions


def filled(log, calls=50):
    rng = np.random.default_rng(3)
    log.policies["p"] = {"kind": "batching"}
    array = np.arange(40)
    for number in range(calls):
        array = array.copy()
        array[rng.integers(0, 40)] += 1
        log.record("p", "decide", {"number": number}, (1, 2), now=0.5 * number, arrays={"a": array})
    return log


def test_a_compact_log_reads_like_the_plain_one(tmp_path):
    found = []
    for kind in (DecisionLog, CompactDecisionLog):
        path = tmp_path / f"{kind.__name__}.jsonl.gz"
        path.write_bytes(filled(kind()).to_bytes())
        header, decisions = read_decisions(path)
        found.append((header, list(decisions)))
    assert found[0] == found[1]


def test_a_compact_log_goes_on_after_it_was_written(tmp_path):
    log = CompactDecisionLog()
    filled(log, 10)
    assert gzip.decompress(log.to_bytes()).count(b"\n") == 11
    log.record("p", "decide", {"number": 11}, None, now=99.0)
    path = tmp_path / "decisions.jsonl.gz"
    path.write_bytes(log.to_bytes())
    header, decisions = read_decisions(path)
    assert header["calls"] == 11
    assert [decision.n for decision in decisions] == list(range(11))


def test_a_full_compact_log_counts_what_it_leaves_out():
    log = filled(CompactDecisionLog(max_calls=7), 10)
    assert (log.num_calls, log.calls_left_out, log.is_full) == (7, 3, True)


@pytest.mark.parametrize("kind", [DecisionLog, CompactDecisionLog])
def test_the_same_calls_give_the_same_bytes(kind):
    assert filled(kind()).to_bytes() == filled(kind()).to_bytes()
