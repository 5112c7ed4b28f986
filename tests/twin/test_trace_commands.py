import errno
import gzip
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from traces import whole_file
from traces.readers import read_trace
from twin.trace_commands import trace_app
from twin.trace_plots import PICTURES, draw_trace

AZURE = "azure-llm-2023-conv/AzureLLMInferenceTrace_conv.csv.gz"
MOONCAKE = "mooncake-arxiv-1000/mooncake_trace_1000.jsonl"
CSV = "arrival_s,prompt_tokens,output_tokens\n0,100,10\n1.5,200,50\n2,50,5\n"


def twin_trace(*arguments: object) -> Result:
    return CliRunner().invoke(trace_app, [str(argument) for argument in arguments])


def fails_with_one_message(result: Result) -> str:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.csv"
    path.write_text(CSV)
    return path


def test_stats_in_a_pipe_are_plain_text_of_at_most_100_columns(data_file) -> None:
    result = twin_trace("stats", data_file(MOONCAKE))
    assert result.exit_code == 0
    assert "1,000 requests, format mooncake-jsonl" in result.stdout
    assert "15,303.9 ± 920 tokens" in result.stdout
    assert "39.07 % of prompt tokens hit" in result.stdout
    assert "5.641 per s" in result.stdout
    assert "\x1b" not in result.stdout
    assert "│" not in result.stdout
    assert max(len(line) for line in result.stdout.splitlines()) <= 100


def test_stats_as_json_carry_theta_and_its_standard_error(small: Path) -> None:
    result = twin_trace("stats", small, "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0
    assert found["theta_tokens"] == pytest.approx(192.769231)
    assert found["theta_se"] > 0.0
    assert found["num_requests"] == 3
    assert found["arrivals"]["duration_s"] == 2.0


def test_stats_of_several_files_are_a_list_in_their_order(small: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text(CSV + "9,1,1\n")
    found = json.loads(twin_trace("stats", small, other, "--json").stdout)
    assert [report["num_requests"] for report in found] == [3, 4]


def test_stats_write_pictures_and_the_numbers(data_file, tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    result = twin_trace("stats", data_file(MOONCAKE), "--out", out)
    assert result.exit_code == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "arrivals.png", "joint.png", "lengths.png", "stats.json",
    ]  # fmt: skip
    for picture in out.glob("*.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "stats.json").read_text())["num_requests"] == 1000


def test_pictures_of_several_files_lie_in_a_folder_each(small: Path, tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    other = tmp_path / "again" / "small.csv"
    other.write_text(CSV)
    out = tmp_path / "out"
    assert twin_trace("stats", small, other, "--out", out).exit_code == 0
    assert sorted(path.name for path in out.iterdir()) == ["small", "small-2"]


def test_pictures_of_the_measured_run_show_its_latencies(data_file, tmp_path: Path) -> None:
    file = data_file("vllm-bench-rtxpro6000-llama-3.1-8b/requests.jsonl")
    assert twin_trace("stats", file, "--out", tmp_path / "out").exit_code == 0
    assert (tmp_path / "out" / "latencies.png").exists()


@pytest.mark.parametrize(
    "rows",
    ["5,5\n", "5,5\n5,5\n", "1,1\n" * 40, "1,1\n100000,1\n", "7,3\n" * 600],
)
def test_traces_of_few_or_equal_requests_can_be_described_and_drawn(
    tmp_path: Path, rows: str
) -> None:
    path = tmp_path / "t.csv"
    times = "".join(f"{i},{row}\n" for i, row in enumerate(rows.split()))
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + times)
    assert twin_trace("stats", path, "--out", tmp_path / "out").exit_code == 0
    same = "".join(f"3,{row}\n" for row in rows.split())
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + same)
    assert twin_trace("stats", path, "--out", tmp_path / "same").exit_code == 0


def test_columns_can_be_named_by_role(tmp_path: Path) -> None:
    path = tmp_path / "odd.csv"
    path.write_text("when,fed,made\n0,10,1\n1000,20,2\n")
    result = twin_trace(
        "stats", path, "--json", "--columns", "prompt=fed,output=made", "--columns", "arrival=when",
        "--time-unit", "ms",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["arrivals"]["duration_s"] == 1.0


def test_skipped_rows_are_said(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(CSV + "3,-5,1\n")
    assert "line 5" in fails_with_one_message(twin_trace("stats", path))
    result = twin_trace("stats", path, "--skip-bad-rows")
    assert result.exit_code == 0
    assert "left out: 1 rows" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.csv"], "absent.csv"),
        (["azure-2023-conversation"], "a bundled workload, not a file"),
        (["small.csv", "--columns", "prompt"], "--columns must be role=NAME, found 'prompt'"),
        (["small.csv", "--columns", "prompt=a,prompt=b"], "names the role 'prompt' twice"),
        (["small.csv", "--columns", "x=a"], "x"),
        (["small.csv", "--format", "word"], "there is no format 'word'"),
        (["small.csv", "--time-unit", "h"], "time_unit must be one of"),
        (["small.csv", "--out", "small.csv"], "--out must be a folder, found a file"),
        (["empty.csv"], "empty.csv"),
        (["."], "directory"),
    ],
)
def test_stats_of_bad_input_end_with_code_2_and_one_message(
    small: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(small.parent)
    Path("empty.csv").write_text("")
    before = sorted(small.parent.iterdir())
    assert message in fails_with_one_message(twin_trace("stats", *arguments))
    assert sorted(small.parent.iterdir()) == before


def test_convert_writes_what_the_reader_reads_back(data_file, tmp_path: Path) -> None:
    source, target = data_file(MOONCAKE), tmp_path / "plain.jsonl.gz"
    result = twin_trace("convert", source, target)
    assert result.exit_code == 0
    assert "1,000 requests" in result.stdout
    before, after = read_trace(source), read_trace(target, block_tokens=512)
    assert after.arrival_s is not None
    assert np.array_equal(before.arrival_s, after.arrival_s)  # type: ignore[arg-type]
    assert np.array_equal(before.output_tokens, after.output_tokens)
    assert after.block_ids is not None
    assert np.array_equal(before.block_offsets, after.block_offsets)  # type: ignore[arg-type]


def test_convert_to_an_unknown_ending_ends_with_code_2(small: Path, tmp_path: Path) -> None:
    assert "must end in" in fails_with_one_message(twin_trace("convert", small, tmp_path / "t.txt"))


@pytest.mark.parametrize("command", ["convert", "generate", "servegen"])
def test_an_existing_file_is_not_overwritten(small: Path, command: str) -> None:
    source = {"convert": [small], "generate": [], "servegen": [small.parent]}[command]
    message = fails_with_one_message(twin_trace(command, *source, small))
    assert "small.csv: exists already; choose another name or remove it" in message
    assert small.read_text() == CSV
    assert list(small.parent.iterdir()) == [small]


def test_pictures_do_not_replace_files(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "joint.png").write_text("mine")
    message = fails_with_one_message(twin_trace("stats", small, "--out", out))
    assert "joint.png: exists already; choose another --out folder or remove it" in message
    assert [path.name for path in out.iterdir()] == ["joint.png"]
    assert (out / "joint.png").read_text() == "mine"


def test_a_disk_that_fills_while_pictures_are_written_leaves_no_partial_file(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_flushed = whole_file.write_flushed

    def full(path: Path, content: bytes) -> None:
        if "arrivals" not in path.name:
            return write_flushed(path, content)
        write_flushed(path, content[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(whole_file, "write_flushed", full)
    message = fails_with_one_message(twin_trace("stats", small, "--out", tmp_path / "out"))
    assert "No space left on device" in message
    assert list((tmp_path / "out").iterdir()) == []


def test_the_names_of_pictures_are_those_that_are_drawn(data_file) -> None:
    measured = read_trace(data_file("vllm-bench-rtxpro6000-llama-3.1-8b/requests.jsonl"))
    assert set(draw_trace(measured)) <= set(PICTURES)


def test_generate_draws_from_the_bundled_workload(tmp_path: Path) -> None:
    target = tmp_path / "t.csv"
    result = twin_trace("generate", target, "--num-requests", 19_366)
    assert result.exit_code == 0, result.output
    trace = read_trace(target)
    assert len(trace) == 19_366
    assert trace.prompt_tokens.mean() == pytest.approx(1154.7, rel=0.03)
    assert trace.duration_s == pytest.approx(3502, rel=0.05)


def test_generate_takes_laws_and_processes_by_name(tmp_path: Path) -> None:
    target = tmp_path / "t.csv"
    result = twin_trace(
        "generate", target, "--num-requests", 20_000,
        "--lengths", "geometric:prompt_tokens=100,mean_output_tokens=50",
        "--arrivals", "gamma:rate_per_s=5,cv=2",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    trace = read_trace(target)
    assert set(trace.prompt_tokens) == {100}
    assert trace.output_tokens.mean() == pytest.approx(50, rel=0.03)
    assert trace.duration_s == pytest.approx(4000, rel=0.05)


def test_the_same_seed_generates_the_same_file(tmp_path: Path) -> None:
    digests = []
    for name, seed in (("a.csv", 3), ("b.csv", 3), ("c.csv", 4)):
        twin_trace("generate", tmp_path / name, "--num-requests", 100, "--seed", seed)
        digests.append(hashlib.sha256((tmp_path / name).read_bytes()).hexdigest())
    assert digests[0] == digests[1] != digests[2]


def test_arrivals_and_lengths_are_drawn_from_streams_of_their_own(tmp_path: Path) -> None:
    for name, lengths in (
        ("a.csv", "fixed:prompt_tokens=1,output_tokens=1"),
        ("b.csv", "mooncake-conversation"),
    ):
        twin_trace(
            "generate", tmp_path / name, "--num-requests", 50, "--lengths", lengths,
            "--arrivals", "poisson:rate_per_s=1",
        )  # fmt: skip
    first, second = read_trace(tmp_path / "a.csv"), read_trace(tmp_path / "b.csv")
    assert np.array_equal(first.arrival_s, second.arrival_s)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "text", "message"),
    [
        ("--lengths", "zipf", "lengths: must be one of fixed, two_point"),
        ("--lengths", "fixed:prompt_tokens=1", "missing 'output_tokens'"),
        ("--lengths", "fixed:prompt_tokens=1,output_tokens=0", "output_tokens must be a whole"),
        ("--lengths", "fixed:prompt_tokens=1,size=2", "found 'size'"),
        ("--lengths", "fixed:prompt_tokens", "must be name:key=value"),
        ("--lengths", "fixed:prompt_tokens=many,output_tokens=1", "prompt_tokens must be a number"),
        ("--lengths", "fixed:prompt_tokens=nan,output_tokens=1", "prompt_tokens must be a whole"),
        ("--lengths", "geometric:prompt_tokens=1,mean_output_tokens=inf", "mean_output_tokens"),
        ("--lengths", "azure-2023-conversation:scale=2", "takes no values; found 'scale'"),
        ("--lengths", "fixed:prompt_tokens=99999999999,output_tokens=1", "at most 2,147,483,647"),
        ("--lengths", "fixed:prompt_tokens=1e30,output_tokens=1", "too large"),
        ("--arrivals", "poisson:rate_per_s=1e-300", "at most 1e+09 s"),
        ("--arrivals", "weekly", "arrivals: must be one of poisson"),
        ("--arrivals", "poisson:rate_per_s=-1", "rate_per_s must be finite and > 0, found -1"),
        ("--arrivals", "azure-2023-conversation:rate_scale=0", "rate_scale must be finite and > 0"),
    ],
)
def test_generate_with_bad_laws_ends_with_code_2_and_no_file(
    tmp_path: Path, option: str, text: str, message: str
) -> None:
    result = twin_trace("generate", tmp_path / "t.csv", option, text, "--num-requests", 10)
    assert message in fails_with_one_message(result)
    assert list(tmp_path.iterdir()) == []


def test_servegen_draws_a_span_of_the_recorded_weeks(data_file, tmp_path: Path) -> None:
    folder = data_file("servegen-m-small/m-small-trace.tar.gz").parent
    target = tmp_path / "t.csv.gz"
    result = twin_trace(
        "servegen", folder, target, "--start-s", 90_000, "--duration-s", 600, "--rate-scale", 0.05,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "5 of 43 clients have no length file" in result.stdout
    assert 1_000 < len(read_trace(target)) < 100_000


def test_servegen_without_client_files_ends_with_code_2(tmp_path: Path) -> None:
    result = twin_trace("servegen", tmp_path, tmp_path / "t.csv")
    assert "no ServeGen client files" in fails_with_one_message(result)
    result = twin_trace("servegen", tmp_path, tmp_path / "t.csv", "--duration-s", 0)
    assert "duration_s must be finite and > 0, found 0.0" in fails_with_one_message(result)


CONTENT = gzip.compress(CSV.encode(), mtime=0)


@pytest.fixture
def catalog(tmp_path: Path) -> Path:
    path = tmp_path / "catalog.json"
    entry = {
        "name": "tiny",
        "title": "three requests",
        "url": "https://example.invalid/a/b/tiny.csv.gz",
        "sha256": hashlib.sha256(CONTENT).hexdigest(),
        "size_bytes": len(CONTENT),
        "licence": "MIT",
        "attribution": "nobody",
        "citation": "none",
    }
    path.write_text(json.dumps({"version": 1, "traces": [entry]}))
    return path


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/a/b/tiny.csv.gz" else 404)
            self.send_header("Content-Length", str(len(CONTENT)))
            self.end_headers()
            self.wfile.write(CONTENT)

        def log_message(self, *args: object) -> None:
            pass

    listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listener.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.server_address[1]}"
    listener.shutdown()
    listener.server_close()
    thread.join()


def test_fetch_puts_a_trace_into_the_cache_that_stats_can_read(
    catalog: Path, mirror: str, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    options = ("--catalog", catalog, "--base-url", mirror, "--cache", cache)
    result = twin_trace("fetch", "tiny", *options)
    assert result.exit_code == 0, result.output
    assert str(cache / "tiny.csv.gz") in result.stdout
    assert "licence MIT, by nobody" in result.stdout
    assert json.loads(twin_trace("stats", cache / "tiny.csv.gz", "--json").stdout)[
        "num_requests"
    ] == 3  # fmt: skip
    again = json.loads(twin_trace("fetch", "tiny", *options, "--json").stdout)
    assert again["was_cached"] is True


def test_fetch_offline_ends_with_code_2_and_the_manual_way(catalog: Path, tmp_path: Path) -> None:
    message = fails_with_one_message(
        twin_trace(
            "fetch", "tiny", "--catalog", catalog, "--cache", tmp_path / "c",
            "--base-url", "http://127.0.0.1:9",
        )
    )  # fmt: skip
    assert "by hand: get https://example.invalid/a/b/tiny.csv.gz" in message


def test_fetch_of_an_unknown_name_ends_with_code_2(catalog: Path) -> None:
    message = fails_with_one_message(twin_trace("fetch", "gpt", "--catalog", catalog))
    assert "there are tiny" in message


def test_fetch_without_a_name_lists_what_there_is() -> None:
    for arguments in ([], ["--list"]):
        result = twin_trace("fetch", *arguments)
        assert result.exit_code == 0
        assert "azure-2023-conversation" in result.stdout
        assert "CC-BY-4.0" in result.stdout
    listed = json.loads(twin_trace("fetch", "--list", "--json").stdout)
    assert all(len(entry["sha256"]) == 64 for entry in listed)
