"""The ``twin`` command as a user meets it: answers, files, and messages for bad input."""

import gzip
import json
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from traces.record import read_run
from twin import __main__ as entry
from twin import cli
from twin.replay import replay_log

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = str(ROOT / "scenarios" / "small.toml")
FAST = ["--set", "run.num_cycles=60", "--set", "run.replications=2"]


@pytest.fixture
def twin(monkeypatch, capsys, tmp_path):
    """``twin(*arguments)`` -> (exit code, standard output, standard error), in a new folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["twin", *arguments])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


def files(**content: bytes | str) -> dict[str, bytes]:
    return {k: v.encode() if isinstance(v, str) else v for k, v in content.items()}


TRACE_HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
GOOD_ROW = "2023-11-16 18:15:46.6805900,374,44\n"

# name of the case -> (content of the trace file, what the message must say)
BAD_TRACES = {
    "empty": (b"", "empty"),
    "header only": (TRACE_HEAD, "no "),
    "not a trace": (b"\x89PNG\r\n\x1a\n\x00\x00", "trace.csv"),
    "negative prompt": (TRACE_HEAD + GOOD_ROW + "2023-11-16 18:15:47,-5,44\n", "ContextTokens"),
    "fractional prompt": (TRACE_HEAD + "2023-11-16 18:15:47,5.5,44\n", "5.5"),
    "nan": (TRACE_HEAD + "2023-11-16 18:15:47,nan,44\n", "ContextTokens"),
    "inf": (TRACE_HEAD + "2023-11-16 18:15:47,10,inf\n", "GeneratedTokens"),
    "zero output": (TRACE_HEAD + "2023-11-16 18:15:47,10,0\n", ">= 1"),
    "zero prompt": (TRACE_HEAD + "2023-11-16 18:15:47,0,10\n", ">= 1"),
    "overflow": (TRACE_HEAD + "2023-11-16 18:15:47,99999999999999,10\n", "99999999999999"),
    "text length": (TRACE_HEAD + "2023-11-16 18:15:47,many,10\n", "many"),
    "bad time": (TRACE_HEAD + "yesterday,10,10\n", "yesterday"),
    "longer than any memory": (TRACE_HEAD + "2023-11-16 18:15:47,5,2000000000\n", "at most"),
    "missing cell": (TRACE_HEAD + "2023-11-16 18:15:47,10\n", "line 2"),
    "extra cell": (TRACE_HEAD + "2023-11-16 18:15:47,10,10,10\n", "line 2"),
    "torn gzip": (gzip.compress((TRACE_HEAD + GOOD_ROW * 50).encode())[:-30], "trace.csv"),
    "corrupt gzip": (b"\x1f\x8b\x08\x00garbage garbage garbage", "trace.csv"),
    "unknown columns": ("a,b,c\n1,2,3\n", "a"),
    "torn json": ('{"timestamp": 0, "input_length": 5, "output_length": 2, "hash', "trace.csv"),
    "json list": ("[1, 2, 3]\n", "trace.csv"),
    "mixed hash ids": (
        '{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, "a"]}\n',
        "hash_ids",
    ),
    "boolean length": (
        '{"timestamp": 0, "input_length": true, "output_length": 2, "hash_ids": [1]}\n',
        "input_length",
    ),
    "not utf-8": (TRACE_HEAD.encode() + b"\xff\xfe,1,2\n", "trace.csv"),
}

BAD_COMMANDS = [
    # arguments, what the message must say
    (["run", "none.toml"], "no such scenario file"),
    (["run", "."], "is a directory"),
    (["run", "--trace", "none.csv"], "none.csv"),
    (["run", "--trace", "."], "."),
    (["run", "--set", "run.seed"], "table.key=value"),
    (["run", "--set", "run.sed=1"], "did you mean seed?"),
    (["run", "--seed", "-1"], "[run] seed"),
    (["run", "--set", "attention_ffn.calibration=none"], "none"),
    (["run", "--set", "attention_ffn.max_tpot_s=0.000001"], "max_tpot_s"),
    (["run", "--set", "attention_ffn.kv_capacity_tokens=1000"], "kv_capacity_tokens"),
    (["run", "--set", "workload.trace=''"], "[workload] trace"),
    (["run", "--set", "workload.format=excel"], "workload"),
    (["run", "--set", "run.simulate_r=[500]"], "r_max"),
    (["run", "--set", "attention_ffn.r=3\nrun.seed=4"], "one setting at a time"),
    (["run", "--set", "run.num_cycles=1000000000"], "[run] num_cycles: must be <= 10,000,000"),
    (["run", "--out", "taken"], "exists already"),
    (["run", "--set", "faults=[{kind='slow',worker=99,factor=2}]"], "worker"),
    (["run", "--set", "workload.lengths.kind=pareto"], "[workload"),
    (["theory", "--set", "attention_ffn.r=none"], "[attention_ffn] r"),
    (["sweep"], "--over"),
    (["sweep", "--over", "r=1..3"], "table.key"),
    (["sweep", "--over", "attention_ffn.r=3..1"], "empty"),
    (["sweep", "--over", "attention_ffn.r=a..b"], "whole numbers"),
    (["sweep", "--over", "attention_ffn.rr=1..3"], "unknown key"),
    (["sweep", "--over", "attention_ffn.r=1,,3"], "empty value"),
    (["sweep", "--over", "attention_ffn.r=1..2", "--over", "attention_ffn.r=3"], "twice"),
    (["sweep", "--over", "attention_ffn.r=1..2", "--out", "taken"], "not a sweep"),
    (["replay", "none"], "none"),
    (["replay", "taken"], "taken"),
    (["calibrate", "attention-ffn", "none.csv"], "none.csv"),
    (["trace", "stats", "none.csv"], "none.csv"),
    (["trace", "fetch", "no-such-trace"], "no-such-trace"),
    (["run", "--no-such-option"], "--no-such-option"),
    (["validate", "nothing"], "nothing"),
]


def assert_refused(code: int, out: str, err: str, said: str) -> None:
    assert code == 2
    assert "Traceback" not in err
    assert said in " ".join(err.split())
    assert out == ""


@pytest.mark.parametrize("name", BAD_TRACES)
def test_a_bad_trace_is_refused_in_one_message(twin, tmp_path, name):
    content, said = BAD_TRACES[name]
    (tmp_path / "trace.csv").write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )
    code, out, err = twin("run", "--trace", "trace.csv", "--out", "here", *FAST)
    assert_refused(code, out, err, said)
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["trace.csv"]


@pytest.mark.parametrize(
    ("arguments", "said"), BAD_COMMANDS, ids=[" ".join(a) for a, _ in BAD_COMMANDS]
)
def test_a_bad_command_is_refused_and_writes_nothing(twin, tmp_path, arguments, said):
    (tmp_path / "taken").mkdir()
    assert_refused(*twin(*arguments), said)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    assert list((tmp_path / "taken").iterdir()) == []


def test_bad_rows_can_be_left_out_and_are_counted(twin, tmp_path):
    rows = GOOD_ROW * 40 + "2023-11-16 18:15:47,-5,44\n" + "2023-11-16 18:15:48,5,0\n"
    (tmp_path / "trace.csv").write_text(TRACE_HEAD + rows)
    code, out, _ = twin("theory", "--trace", "trace.csv", "--skip-bad-rows", "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["workload"]["num_requests"] == 40
    assert sum(answer["workload"]["skipped"].values()) == 2
    assert any("left out" in warning for warning in answer["warnings"])


def test_a_run_writes_a_directory_that_reads_back_and_replays(twin, tmp_path):
    code, out, _ = twin("run", SMALL, "--out", "here", *FAST)
    assert code == 0
    assert "Attention workers per FFN server" in out
    record = read_run(tmp_path / "here")
    assert {"decisions.jsonl.gz", "trace.json", "throughput.png", "report.txt"} <= set(record.files)
    assert record.summary["seed"] == 1
    assert len(record.timeseries["cycle_s"]) == 60
    assert replay_log(tmp_path / "here").difference is None
    events = json.loads(record.files["trace.json"])["traceEvents"]
    assert any(event["ph"] == "X" and event["cat"] == "attention" for event in events)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(twin, tmp_path):
    for name, seed in (("one", "5"), ("two", "5"), ("three", "6")):
        assert twin("run", SMALL, "--out", name, "--seed", seed, *FAST)[0] == 0
    for file in sorted((tmp_path / "one").iterdir()):
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes(), file.name
    one, three = (read_run(tmp_path / name).summary for name in ("one", "three"))
    assert one["simulation"] != three["simulation"]


def test_both_engines_give_the_same_simulation(twin):
    pytest.importorskip("numba")
    answers = []
    for engine in ("simpy", "compiled"):
        out = twin("run", SMALL, "--json", *FAST, "--set", f"run.engine={engine}")[1]
        simulation = json.loads(out)["simulation"]
        for point in simulation["points"]:
            del point["engine"]
        answers.append((simulation["points"], simulation["best_r"]))
    assert answers[0] == answers[1]


def test_theory_as_json_has_what_scripts_need(twin):
    code, out, _ = twin("theory", "--json")
    answer = json.loads(out)
    assert code == 0
    assert {"theta_tokens", "theta_se", "nu_tokens", "skew"} <= set(answer)
    for level in ("mean_field", "gaussian", "pearson3", "exact"):
        assert {"r", "r_real", "cycle_s", "throughput_per_instance", "regret"} <= set(
            answer["levels"][level]
        )


def test_theory_of_a_run_equals_theory_alone(twin):
    alone = json.loads(twin("theory", SMALL, "--json")[1])
    within = json.loads(twin("run", SMALL, "--json", *FAST)[1])
    for key in ("theta_tokens", "levels", "recommendation", "bundle", "kv"):
        assert within[key] == alone[key]


def test_an_open_loop_run_accounts_for_every_request(twin, tmp_path):
    code, _, _ = twin(
        *("run", "--out", "here"),
        *("--set", "run.mode=open_loop", "--set", "run.replications=2"),
        *("--set", "workload.num_requests=400", "--set", "workload.arrivals.kind=poisson"),
        *("--set", "workload.arrivals.rate_per_s=60", "--set", "attention_ffn.r=2"),
        *("--set", "attention_ffn.batch_per_worker=32", "--set", "slo.tpot_s=0.1"),
        *("--set", "routing.attention_worker=power_of_two", "--set", "run.horizon_s=8"),
    )
    assert code == 0
    record = read_run(tmp_path / "here")
    run = record.summary["open_loop"]
    assert run["injected"] == run["completed"] + run["running"] + run["queued"] + run["preparing"]
    assert run["running"] > 0
    assert any("not finished" in warning for warning in record.summary["warnings"])
    assert len(record.requests["ttft_s"]) == 800
    assert 0 < run["goodput"]["share"] <= 1
    replayed = replay_log(tmp_path / "here")
    assert replayed.difference is None
    assert replayed.num_calls > 50


def test_a_tampered_decision_is_found(twin, tmp_path):
    twin(
        *("run", "--out", "here", "--set", "run.mode=open_loop", "--set", "attention_ffn.r=2"),
        *("--set", "workload.num_requests=50", "--set", "run.replications=1"),
    )
    log = tmp_path / "here" / "decisions.jsonl.gz"
    lines = gzip.decompress(log.read_bytes()).splitlines()
    last = json.loads(lines[-1])
    last["orders"]["workers"] = [1 - worker for worker in last["orders"]["workers"]]
    lines[-1] = json.dumps(last).encode()
    log.write_bytes(gzip.compress(b"\n".join(lines)))
    code, out, _ = twin("replay", "here")
    assert code == 1
    assert f"call {last['n']} " in out


def test_a_sweep_of_which_nothing_could_be_run_fails(twin, tmp_path):
    (tmp_path / "lengths.csv").write_text(
        "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n10,5,15,2\n20,6,26,3.3\n"
    )
    code, _, err = twin(
        *("sweep", "--trace", "lengths.csv", "--set", "run.mode=open_loop"),
        *("--over", "attention_ffn.r=1,2", "--out", "s", "--jobs", "1"),
    )
    assert code == 2
    assert "no point could be run" in err
    assert "no arrival times" in err


LEGAL_EXTREMES = {
    "one request": ["--set", "workload.lengths={kind='fixed',prompt_tokens=5,output_tokens=1}"],
    "no load at all": ["--set", "workload.lengths={kind='fixed',prompt_tokens=0,output_tokens=1}"],
    "free attention per token": [
        "--set",
        "attention_ffn.coefficients={alpha_attention=0,beta_attention=5,alpha_ffn=1,beta_ffn=1}",
    ],
    "free FFN per token": [
        "--set",
        "attention_ffn.coefficients={alpha_attention=1,beta_attention=5,alpha_ffn=0,beta_ffn=1}",
    ],
    "one slot, one worker": [
        *("--set", "attention_ffn.batch_per_worker=1", "--set", "attention_ffn.r=1"),
        *("--set", "attention_ffn.r_max=1"),
    ],
    "many microbatches": [
        *("--set", "attention_ffn.semantics=pingpong", "--set", "attention_ffn.microbatches=8"),
    ],
    "cold start": ["--set", "run.start=cold"],
    "transfer of the whole bundle": [
        "--set",
        "attention_ffn.coefficients={alpha_attention=0.002,beta_attention=50,alpha_ffn=0.08,"
        "beta_ffn=100,alpha_communication=0.5,beta_communication=20,communication='bundle'}",
    ],
    "a horizon before the first arrival": [
        *("--set", "run.mode=open_loop", "--set", "run.horizon_s=0.001"),
        *("--set", "workload.arrivals={kind='poisson',rate_per_s=0.01}"),
        *("--set", "workload.num_requests=3", "--set", "attention_ffn.r=2"),
    ],
}


@pytest.mark.parametrize("name", LEGAL_EXTREMES)
def test_legal_extremes_are_answered(twin, tmp_path, name):
    fast = ["--set", "attention_ffn.batch_per_worker=16"]
    if "run.mode=open_loop" not in LEGAL_EXTREMES[name]:
        fast += [*FAST, "--set", "run.simulate_r=chosen"]
    code, out, err = twin("run", "--out", "here", "--json", *fast, *LEGAL_EXTREMES[name])
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert answer["recommendation"]["r"] >= 1
    assert (tmp_path / "here" / "run.json").exists()


def test_brackets_in_names_are_printed_as_they_are(twin, tmp_path):
    folder = tmp_path / "q["
    folder.mkdir()
    trace = folder / "x[red]y[b]z.csv"
    trace.write_text(TRACE_HEAD + GOOD_ROW * 40)
    out_name = "vv[b]6"
    code, out, err = twin("run", "--trace", str(trace), "--out", out_name, "--no-plots", *FAST)
    assert (code, err) == (0, "")
    assert f"written: {out_name}/ (run.json" in out
    assert "x[red]y[b]z" in out
    assert (tmp_path / out_name / "run.json").exists()
    (tmp_path / "calibration[b].json").write_text(
        (ROOT / "models" / "calibrations" / "deepseek-v3-ascend-910c.json")
        .read_text()
        .replace('"name": "', '"name": "[/red]')
    )
    code, out, err = twin("theory", "--set", "attention_ffn.calibration=calibration[b].json")
    assert (code, err) == (0, "")
    assert "[/red]deepseek" in out


def test_help_shows_the_brackets_of_a_table(twin):
    code, out, _ = twin("theory", "--help")
    assert code == 0
    assert "replaces [workload]" in " ".join(out.replace("│", " ").split())


def test_the_version_is_printed(twin):
    code, out, _ = twin("--version")
    assert (code, out) == (0, f"serving-twin {metadata.version('serving-twin')}\n")


def test_one_replayed_call_is_not_plural(twin):
    assert twin("run", SMALL, "--out", "here", "--no-plots", *FAST)[0] == 0
    assert twin("replay", "here")[:2] == (0, "1 call, no difference\n")


def test_a_scenario_file_names_its_trace_relative_to_itself(twin, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "t.csv").write_text(TRACE_HEAD + GOOD_ROW * 40)
    scenario = tmp_path / "there" / "s.toml"
    scenario.write_text("workload.trace = 't.csv'\n")
    code, out, _ = twin("theory", "there/s.toml", "--json")
    assert (code, json.loads(out)["workload"]["num_requests"]) == (0, 40)
    assert twin("run", "there/s.toml", "--out", "here", "--no-plots", *FAST)[0] == 0
    kept = tomllib.loads((tmp_path / "here" / "scenario.toml").read_text())
    assert kept["workload"]["trace"] == str(tmp_path / "there" / "t.csv")
    assert twin("theory", "--trace", "t.csv")[0] == 2


def test_an_interrupted_run_says_that_nothing_was_written(twin, tmp_path, monkeypatch):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("twin.experiment.run_experiment", interrupt)
    assert twin("run", SMALL, "--out", "here") == (130, "", "interrupted: nothing was written\n")
    monkeypatch.setattr("twin.theory.solve_theory", interrupt)
    assert twin("theory", SMALL) == (130, "", "interrupted\n")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_while_loading_is_one_line(monkeypatch, capsys):
    class Interrupted:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "twin.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "twin.cli")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as stop:
        entry.main()
    assert stop.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


def in_a_process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", **options.pop("env", {})}
    return subprocess.run(
        [sys.executable, "-m", "twin", *arguments], env=environment, check=False, **options
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_the_output_is_one_line(tmp_path):
    with Path("/dev/full").open("wb") as full:
        done = in_a_process("theory", "--json", cwd=tmp_path, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr == b"error: standard output: No space left on device\n"


def test_signs_that_the_encoding_lacks_do_not_stop_the_report(tmp_path):
    done = in_a_process(
        "theory", cwd=tmp_path, capture_output=True, env={"PYTHONIOENCODING": "ascii"}
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"Attention workers per FFN server" in done.stdout


def test_output_in_a_pipe_is_plain_text(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "twin.cli", "theory"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        check=True,
    )
    assert b"\x1b" not in done.stdout
    assert max(len(line) for line in done.stdout.decode().splitlines()) <= 100


def test_a_sweep_of_open_loop_runs_needs_no_settings_of_saturated_ones(twin):
    code, out, _ = twin(
        *("sweep", "--over", "attention_ffn.r=1..2", "--jobs", "1", "--json"),
        *("--set", "run.mode=open_loop", "--set", "workload.num_requests=40"),
        *("--set", "attention_ffn.batch_per_worker=16"),
    )
    assert code == 0
    assert [row["completed"] for row in json.loads(out)["rows"]] == [160, 160]


def test_arrivals_years_apart_are_served(twin):
    code, out, _ = twin(
        *("run", "--out", "here", "--no-plots", "--json", "--set", "run.mode=open_loop"),
        *("--set", "workload.num_requests=20", "--set", "run.replications=1"),
        *("--set", "workload.arrivals={kind='poisson',rate_per_s=1e-6}"),
        *("--set", "attention_ffn.batch_per_worker=4", "--set", "attention_ffn.r=1"),
    )
    assert (code, json.loads(out)["open_loop"]["completed"]) == (0, 20)


def test_tables_of_sweeps_and_calibrations_show_brackets(twin, tmp_path):
    rows = [f"attention,{k}000,,{50 + k}\nffn,,{k}00,{100 + 8 * k}\n" for k in range(1, 6)]
    (tmp_path / "m.csv").write_text("stage,tokens,batch,us\n" + "".join(rows))
    code, out, _ = twin("calibrate", "attention-ffn", "m.csv", "--name", "n[/x] y[b]z")
    assert code == 0
    assert "Calibration n[/x] y[b]z" in out
    (tmp_path / "q[").mkdir()
    for name in ("q[/red].csv", "x[b]y.csv"):
        (tmp_path / name).write_text(TRACE_HEAD + GOOD_ROW * 40)
    code, out, _ = twin(
        *("sweep", "--over", "workload.trace=q[/red].csv,x[b]y.csv", "--out", "s[/b]", *FAST),
        *("--jobs", "1", "--set", "attention_ffn.batch_per_worker=4"),
    )
    assert code == 0
    assert "q[/red].csv" in out
    assert "x[b]y.csv" in out
