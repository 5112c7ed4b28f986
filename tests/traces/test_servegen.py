import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from traces.errors import TraceError
from traces.servegen import client_arrivals, generate_servegen
from traces.servegen_files import Client, read_clients

WINDOW_S = 600.0


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def client(rate: float, process: str, shape: float, num_windows: int = 1) -> Client:
    return Client(
        client_id=0,
        start_s=np.arange(num_windows) * WINDOW_S,
        end_s=num_windows * WINDOW_S,
        rate_per_s=np.full(num_windows, rate),
        gap_cv=np.ones(num_windows),
        process=(process,) * num_windows,
        shape=np.full(num_windows, shape),
        dataset_name=None,
        dataset=None,
    )


def write_chunks(folder: Path, rows: dict[int, str], lengths: dict[int, object]) -> Path:
    for n, text in rows.items():
        (folder / f"chunk-{n}-trace.csv").write_text(text)
    for n, windows in lengths.items():
        (folder / f"chunk-{n}-dataset.json").write_text(json.dumps(windows))
    return folder


def simple(folder: Path) -> Path:
    rows = {
        0: "0,2.0,1.0,Gamma,1.0,0.5\n600,0,0,,0,0\n",
        1: "0,5.0,2.0,Weibull,0.6,0.1\n600,1.0,1.0,Gamma,4.0,0.2\n",
        2: "0,9.0,1.0,Gamma,1.0,0.1\n600,9.0,1.0,Gamma,1.0,0.1\n",
    }
    law = {"input_tokens": "{100: 0.25, 300: 0.75}", "output_tokens": "{5: 0.5, 7: 0.5}"}
    other = {"input_tokens": "{1000: 1.0}", "output_tokens": "{50: 1.0}"}
    return write_chunks(folder, rows, {0: {"0": law}, 1: {"0": law, "600": other}})


@pytest.mark.parametrize(
    ("process", "shape", "law"),
    [
        ("Gamma", 0.2, stats.gamma(0.2, scale=1 / 0.2)),
        ("Gamma", 6.0, stats.gamma(6.0, scale=1 / 6.0)),
        ("Weibull", 0.5, stats.weibull_min(0.5, scale=1 / 2.0)),
        ("", 0.0, stats.expon()),
    ],
)
def test_gaps_follow_the_fitted_process_at_the_rate_of_the_window(process, shape, law) -> None:
    arrivals = client_arrivals(client(20.0, process, shape), rng(), 0.0, WINDOW_S, 1.0)
    assert law.mean() == pytest.approx(1.0)
    gaps = np.diff(arrivals) * 20.0
    tiny = law.cdf(1e-9)
    rest = gaps[gaps > 1e-9]
    assert stats.kstest(rest, lambda x: (law.cdf(x) - tiny) / (1 - tiny)).pvalue > 0.01


@pytest.mark.parametrize(("process", "shape"), [("Gamma", 0.02), ("Weibull", 0.35), ("Gamma", 9.0)])
def test_the_expected_count_is_rate_times_time_however_bursty_the_client_is(
    process: str, shape: float
) -> None:
    # 3 requests a window on average: a window that began with a fresh gap would miss that widely
    source, generator = client(0.005, process, shape, num_windows=1), rng(3)
    counts = np.array(
        [len(client_arrivals(source, generator, 0.0, WINDOW_S, 1.0)) for _ in range(6_000)]
    )
    standard_error = counts.std() / np.sqrt(len(counts))
    assert counts.mean() == pytest.approx(3.0, abs=4 * standard_error)
    assert standard_error < 0.3


def test_a_span_takes_only_its_part_of_the_first_and_last_window() -> None:
    arrivals = client_arrivals(client(50.0, "Gamma", 1.0, 4), rng(), 500.0, 1300.0, 1.0)
    assert arrivals[0] >= 500.0
    assert arrivals[-1] < 1300.0
    assert np.all(np.diff(arrivals) >= 0.0)
    assert len(arrivals) == pytest.approx(800 * 50, rel=0.03)


def test_clients_are_merged_with_their_own_lengths_and_windows(tmp_path: Path) -> None:
    trace = generate_servegen(simple(tmp_path), rng(), start_s=0.0, duration_s=1200.0)
    assert trace.arrival_s is not None
    late = trace.arrival_s > 601.0
    assert set(trace.prompt_tokens[late]) == {1000}
    assert set(trace.output_tokens[late]) == {50}
    early = trace.arrival_s < 599.0
    assert set(trace.prompt_tokens[early]) == {100, 300}
    assert np.mean(trace.prompt_tokens[early] == 300) == pytest.approx(0.75, abs=0.03)
    assert np.count_nonzero(early) == pytest.approx(7 * 600, rel=0.1)
    assert np.count_nonzero(late) == pytest.approx(600, rel=0.15)
    assert np.all(np.diff(trace.arrival_s) >= 0.0)
    assert trace.arrival_s[0] == 0.0


def test_a_client_without_lengths_is_left_out_and_named(tmp_path: Path) -> None:
    trace = generate_servegen(simple(tmp_path), rng(), start_s=0.0, duration_s=1200.0)
    # rates 1, 3 and 9 a second on average: client 2 has 9 of 13
    assert any("1 of 3 clients" in note and "(2)" in note and "69%" in note for note in trace.notes)


def test_the_rate_scale_multiplies_the_number_of_requests(tmp_path: Path) -> None:
    trace = generate_servegen(
        simple(tmp_path), rng(), start_s=0.0, duration_s=600.0, rate_scale=10.0
    )
    assert len(trace) == pytest.approx(42_000, rel=0.05)


def test_chosen_clients_alone_are_used(tmp_path: Path) -> None:
    trace = generate_servegen(simple(tmp_path), rng(), start_s=0, duration_s=600, clients=[0])
    assert len(trace) == pytest.approx(1200, rel=0.12)


def test_the_same_seed_gives_the_same_trace(tmp_path: Path) -> None:
    one, two = (
        generate_servegen(simple(tmp_path), rng(7), start_s=0.0, duration_s=1200.0)
        for _ in range(2)
    )
    assert np.array_equal(one.arrival_s, two.arrival_s)
    assert np.array_equal(one.prompt_tokens, two.prompt_tokens)


def test_requests_without_output_or_law_are_counted(tmp_path: Path) -> None:
    rows = {0: "0,5,1,Gamma,1,0.2\n600,5,1,Gamma,1,0.2\n"}
    law = {"input_tokens": "{10: 1.0}", "output_tokens": "{0: 0.5, 3: 0.5}"}
    empty = {"input_tokens": "{}", "output_tokens": "{}"}
    folder = write_chunks(tmp_path, rows, {0: {"0": law, "600": empty}})
    trace = generate_servegen(folder, rng(), start_s=0.0, duration_s=1200.0)
    assert trace.skipped["output_tokens must be >= 1"] == pytest.approx(1500, rel=0.1)
    assert trace.skipped["the client has no length law in that window"] == pytest.approx(
        3000, rel=0.1
    )
    assert len(trace) == pytest.approx(1500, rel=0.1)


def test_archives_give_the_same_as_the_folder_they_hold(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    simple(folder)
    packed = tmp_path / "packed"
    packed.mkdir()
    for kind in ("trace.csv", "dataset.json"):
        with tarfile.open(packed / f"{kind}.tar.gz", "w:gz") as archive:
            for file in sorted(folder.glob(f"*{kind}")):
                archive.add(file, arcname=file.name)
    archives = sorted(packed.glob("*.tar.gz"))
    traces = [
        generate_servegen(source, rng(), start_s=0.0, duration_s=600.0)
        for source in (folder, packed, archives)
    ]
    assert len({len(trace) for trace in traces}) == 1
    assert np.array_equal(traces[0].output_tokens, traces[2].output_tokens)


def corrupt_archive(folder: Path) -> Path:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo("chunk-0-trace.csv"), io.BytesIO(b""))
    path = folder / "cut.tar.gz"
    path.write_bytes(content.getvalue()[:40])
    return path


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("0,1,1,Gamma,1\n", "line 1: 6 columns are needed .* found 5"),
        ("0,x,1,Gamma,1,1\n", "line 1, column 2: must be a number, found 'x'"),
        ("0,-1,1,Gamma,1,1\n", r"line 1, column 2 \(rate\): must be finite and >= 0, found '-1'"),
        ("0,nan,1,Gamma,1,1\n", r"column 2 \(rate\)"),
        ("0,1,1,Cauchy,1,1\n", r"column 4 \(process\): must be Gamma, Weibull or empty"),
        ("0,1,1,Gamma,0,1\n", r"column 5 \(shape\): must be finite and > 0, found '0'"),
        ("0,1,1,Gamma,1,1\n600,1,1,,0,0\n900,1,1,,0,0\n", "line 3, column 1 .* found '900'"),
        ("600,1,1,Gamma,1,1\n0,1,1,,0,0\n", "line 2, column 1"),
        ("", "empty"),
    ],
)
def test_a_bad_row_is_named_by_file_line_and_column(tmp_path: Path, row: str, message: str) -> None:
    write_chunks(tmp_path, {4: row}, {})
    with pytest.raises(TraceError, match=message) as caught:
        read_clients(tmp_path)
    assert "chunk-4-trace.csv" in str(caught.value)


@pytest.mark.parametrize(
    ("law", "message"),
    [
        ("__import__('os')", "must be {length: probability}"),
        ("[1, 2]", "must be {length: probability}"),
        ("{'a': 1.0}", "lengths must be whole"),
        ("{-3: 1.0}", "lengths must be >= 0, found -3"),
        ("{3: 0.5}", "must sum to 1, found 0.5"),
        ("{3: -0.5, 4: 1.5}", "finite and >= 0"),
    ],
)
def test_a_bad_length_law_is_named_by_its_window(tmp_path: Path, law: str, message: str) -> None:
    windows = {"0": {"input_tokens": law, "output_tokens": "{1: 1.0}"}}
    write_chunks(tmp_path, {0: "0,5,1,Gamma,1,1\n"}, {0: windows})
    with pytest.raises(TraceError, match=message) as caught:
        generate_servegen(tmp_path, rng(), start_s=0.0, duration_s=600.0)
    assert "chunk-0-dataset.json, window 0, input_tokens" in str(caught.value)


def test_unusable_sources_are_errors_in_one_line(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    good = tmp_path / "good"
    good.mkdir()
    simple(good)
    broken = tmp_path / "broken"
    broken.mkdir()
    write_chunks(broken, {0: "0,5,1,Gamma,1,1\n"}, {})
    (broken / "chunk-0-dataset.json").write_text('{"0": {')
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: read_clients(empty), "no ServeGen client files"),
        (lambda: read_clients(tmp_path / "absent"), "cannot be read"),
        (lambda: read_clients(text), "not a tar archive"),
        (lambda: read_clients(corrupt_archive(tmp_path)), "damaged"),
        (lambda: read_clients(broken), "chunk-0-dataset.json, line 1: not JSON"),
        (lambda: read_clients(good, clients=[0, 77]), "no chunk-N-trace.csv for client 77"),
        (
            lambda: generate_servegen(good, rng(), start_s=900.0, duration_s=600.0),
            "cover 0 s to 1200 s, asked for 900 s to 1500 s",
        ),
        (
            lambda: generate_servegen(good, rng(), start_s=0, duration_s=600, rate_scale=1e9),
            "take a shorter duration_s or a smaller rate_scale",
        ),
        (
            lambda: generate_servegen(good, rng(), start_s=600.0, duration_s=600, clients=[0]),
            "no requests between",
        ),
        (
            lambda: generate_servegen(good, rng(), start_s=0.0, duration_s=600.0, clients=[2]),
            "none of the 1 clients has a length file",
        ),
    ]
    for call, message in cases:
        with pytest.raises(TraceError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_a_span_without_length_is_a_bad_argument(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="duration_s must be finite and > 0"):
        generate_servegen(simple(tmp_path), rng(), start_s=0.0, duration_s=0.0)


def test_statistics_of_the_real_clients_are_the_published_ones(data_file) -> None:
    folder = data_file("servegen-m-small/m-small-trace.tar.gz").parent
    clients = read_clients(folder)
    rate = np.array([c.rate_per_s.mean() for c in clients])
    assert len(clients) == 43
    assert rate.sum() == pytest.approx(1174, abs=0.5)
    shares = np.sort(rate / rate.sum())[::-1]
    assert shares[0] == pytest.approx(0.299, abs=5e-4)
    assert shares[:5].sum() == pytest.approx(0.77, abs=5e-3)
    assert sum(c.dataset is None for c in clients) == 5


def test_a_real_client_keeps_its_rate_cv_and_lengths(data_file) -> None:
    folder = data_file("servegen-m-small/m-small-trace.tar.gz").parent
    start_s, duration_s = 2 * 86_400.0, 21_600.0
    (source,) = read_clients(folder, clients=[41])
    trace = generate_servegen(folder, rng(), start_s=start_s, duration_s=duration_s, clients=[41])
    first = int(start_s / WINDOW_S)
    windows = slice(first, first + int(duration_s / WINDOW_S))
    expected = float(source.rate_per_s[windows].sum()) * WINDOW_S
    assert len(trace) == pytest.approx(expected, rel=0.02)
    assert trace.arrival_s is not None
    gaps = np.diff(trace.arrival_s)
    by_rate = float(np.average(source.gap_cv[windows], weights=source.rate_per_s[windows]))
    assert gaps.std() / gaps.mean() == pytest.approx(by_rate, rel=0.1)
    laws = source.length_laws(start_s)
    assert laws is not None
    prompts, outputs = laws
    assert trace.prompt_tokens.mean() == pytest.approx(prompts.mean(), rel=0.03)
    assert trace.output_tokens.mean() == pytest.approx(outputs.mean(), rel=0.03)


def test_two_weeks_of_all_clients_have_their_mean_lengths(data_file) -> None:
    folder = data_file("servegen-m-small/m-small-trace.tar.gz").parent
    clients = [c for c in read_clients(folder) if c.dataset is not None]
    trace = generate_servegen(folder, rng(), start_s=0.0, duration_s=1_209_600.0, rate_scale=2e-4)
    rate = np.array([c.rate_per_s for c in clients])
    assert len(trace) == pytest.approx(rate.sum() * WINDOW_S * 2e-4, rel=0.02)
    means = np.full((len(clients), 56, 2), np.nan)
    for i, source in enumerate(clients):
        for w, window_start in enumerate(source.length_starts_s()):
            laws = source.length_laws(float(window_start))
            if laws is not None:
                means[i, w] = [law.mean() for law in laws]
    # the published means: the mean law of each client, weighted by the client's mean rate
    by_client = np.nanmean(means, axis=1)
    published = np.average(by_client, axis=0, weights=rate.mean(axis=1))
    assert published == pytest.approx([147.1, 19.52], rel=1e-3)
    # what is drawn: every window weighted by its own rate
    by_window = rate.reshape(len(clients), 56, 36).sum(axis=2)
    drawn = np.nansum(means * by_window[:, :, None], axis=(0, 1)) / by_window.sum()
    assert trace.prompt_tokens.mean() == pytest.approx(drawn[0], rel=0.02)
    assert trace.output_tokens.mean() == pytest.approx(drawn[1], rel=0.03)
