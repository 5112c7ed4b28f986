"""Calibrations: fits against numpy's least squares, strict files, readable errors."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import optimize

from models.bundle import LatencyCoefficients
from models.calibration import (
    NAMED,
    CalibrationError,
    fit_attention_ffn,
    load_calibration,
    outside_range,
    save_calibration,
)
from models.stage_fit import curvature_t, fit_stage
from models.streams import stream


def write(path: Path, rows: list[str], header: str = "stage,tokens,batch,us") -> Path:
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return path


def straight_rows(noise: float = 0.0) -> list[str]:
    """The paper's lines in microseconds, 12 loads a stage."""
    rng = stream(8, "measurements")
    rows = []
    for tokens in np.rint(np.linspace(10_000, 300_000, 12)):
        time = (50 + 0.00165 * tokens) * (1 + noise * rng.standard_normal())
        rows.append(f"attention,{tokens:.0f},,{time}")
    for batch in np.rint(np.linspace(100, 8_000, 12)):
        rows.append(
            f"ffn,,{batch:.0f},{(100 + 0.083 * batch) * (1 + noise * rng.standard_normal())}"
        )
        rows.append(f"communication,,{batch:.0f},{20 + 0.022 * batch}")
    return rows


def test_named_entry_has_the_papers_values_per_layer_in_seconds() -> None:
    found = load_calibration("deepseek-v3-ascend-910c")
    c = found.coefficients
    values = [c.alpha_attention, c.beta_attention, c.alpha_ffn, c.beta_ffn]
    values += [c.alpha_communication, c.beta_communication]
    printed = [0.00165, 50, 0.083, 100, 0.022, 20]
    assert [v * 1e6 for v in values] == pytest.approx(printed, rel=1e-12)
    assert c.communication == "worker"
    assert found.num_layers == 61
    assert "arXiv 2601.21351" in found.source
    assert NAMED == ("deepseek-v3-ascend-910c",)


def test_named_entry_knows_no_calibrated_range() -> None:
    found = load_calibration("deepseek-v3-ascend-910c")
    for stage in ("attention", "ffn", "communication"):
        assert outside_range(found, stage, [1.0, 1e9]) is None


def test_exact_lines_are_recovered_in_seconds(tmp_path: Path) -> None:
    found = fit_attention_ffn(write(tmp_path / "card.csv", straight_rows()), num_layers=61)
    expected = load_calibration("deepseek-v3-ascend-910c").coefficients
    for name in ("alpha_attention", "beta_attention", "alpha_ffn", "beta_ffn"):
        assert getattr(found.coefficients, name) == pytest.approx(getattr(expected, name), rel=1e-6)
    assert found.coefficients.alpha_communication == pytest.approx(22e-9, rel=1e-6)
    assert found.name == "card"
    assert found.num_layers == 61
    for fit in found.fits.values():
        assert fit.points == 12
        assert fit.r2 == pytest.approx(1.0)
        assert fit.warning is None
        assert fit.max_relative_error < 1e-5


def test_fit_equals_numpys_least_squares_with_its_standard_errors() -> None:
    rng = stream(8, "line")
    load = rng.uniform(10, 900, 40)
    seconds = 3.0 + 0.02 * load + 0.1 * rng.standard_normal(40)
    fit = fit_stage(load, seconds, "tokens")
    (slope, intercept), covariance = np.polyfit(load, seconds, 1, cov=True)
    assert (fit.slope_s, fit.intercept_s) == pytest.approx((slope, intercept))
    assert (fit.slope_se_s, fit.intercept_se_s) == pytest.approx(np.sqrt(np.diag(covariance)))
    residual = seconds - slope * load - intercept
    assert fit.residual_std_s == pytest.approx(np.sqrt(residual @ residual / 38))
    assert fit.r2 == pytest.approx(np.corrcoef(load, seconds)[0, 1] ** 2)
    assert fit.max_relative_error == pytest.approx(np.abs(residual / seconds).max())


@pytest.mark.parametrize(("slope", "intercept"), [(0.02, -1.0), (-0.01, 30.0), (0.02, 4.0)])
def test_held_coefficients_equal_non_negative_least_squares(slope: float, intercept: float) -> None:
    rng = stream(8, "held")
    load = rng.uniform(100, 900, 30)
    seconds = intercept + slope * load + 0.05 * rng.standard_normal(30)
    fit = fit_stage(load, seconds, "batch")
    expected, _ = optimize.nnls(np.column_stack([load, np.ones(30)]), seconds)
    assert (fit.slope_s, fit.intercept_s) == pytest.approx(tuple(expected), abs=1e-9)
    held = slope < 0 or intercept < 0
    assert (fit.warning is not None and "held at 0" in fit.warning) == held
    assert (fit.slope_se_s is None, fit.intercept_se_s is None) == (slope < 0, intercept < 0)


def test_a_curve_is_not_taken_for_a_line() -> None:
    load = np.linspace(100, 8000, 12)
    bent = fit_stage(load, 1e-4 + 1e-10 * load**2, "batch")
    assert bent.warning is not None
    assert "a line does not fit: measured time bends upwards with batch" in bent.warning
    flat = fit_stage(load, 1e-5 * np.sqrt(load), "batch")
    assert flat.warning is not None
    assert "flattens with batch" in flat.warning


def test_scatter_is_told_from_a_curve() -> None:
    rng = stream(8, "scatter")
    load = np.tile(np.linspace(100, 8000, 12), 3)
    fit = fit_stage(load, (1.0 + 1e-3 * load) * (1 + 0.25 * rng.standard_normal(36)), "batch")
    assert fit.warning is not None
    assert fit.warning.startswith("measurements scatter around the line")


def test_noise_alone_rarely_looks_like_a_curve() -> None:
    rng = stream(8, "noise")
    load = np.linspace(1, 100, 30)
    t = [curvature_t(load, 5 + load + rng.standard_normal(30)) for _ in range(400)]
    assert np.mean(np.abs(np.asarray(t, dtype=float)) > 3.0) < 0.02
    assert curvature_t(load[:3], load[:3]) is None


def test_ranges_come_from_the_rows(tmp_path: Path) -> None:
    rows = [f"attention,{t},,{t}" for t in (10, 20, 40)] + [f"ffn,,{b},{b}" for b in (1, 2, 3)]
    found = fit_attention_ffn(write(tmp_path / "m.csv", rows))
    assert outside_range(found, "attention", [9, 10, 25, 40, 41]) == pytest.approx(0.4)
    assert outside_range(found, "ffn", [3.0]) == 0.0
    assert outside_range(found, "attention", []) == 0.0
    assert outside_range(found, "communication", [3.0]) is None
    assert "transfers take no time" in found.notes[0]
    with pytest.raises(ValueError, match="stage must be one of attention, ffn, communication"):
        outside_range(found, "attn", [1])


def test_a_saved_calibration_reads_back_equal(tmp_path: Path) -> None:
    source = write(tmp_path / "m.csv", [*straight_rows(0.02), "ffn,,50,900"])
    found = fit_attention_ffn(
        source, name="lab", device="card", model="net", communication="bundle"
    )
    assert found.fits["ffn"].warning is not None
    path = tmp_path / "lab.json"
    save_calibration(found, path)
    assert load_calibration(path) == found
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lab.json", "m.csv"]


def test_a_calibration_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    found = load_calibration(NAMED[0])
    for target in (tmp_path / "taken", tmp_path / "absent" / "c.json"):
        with pytest.raises(CalibrationError, match=target.name):
            save_calibration(found, target)
    assert [p.name for p in tmp_path.rglob("*")] == ["taken"]


def test_a_saved_calibration_never_replaces_a_file(tmp_path: Path) -> None:
    source = write(tmp_path / "m.csv", straight_rows())
    before = source.read_bytes()
    found = fit_attention_ffn(source)
    with pytest.raises(CalibrationError, match=r"m\.csv: exists already; choose another name"):
        save_calibration(found, source)
    assert source.read_bytes() == before
    assert list(tmp_path.iterdir()) == [source]


def test_a_place_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    found = load_calibration(NAMED[0])
    for target in (tmp_path / "file" / "c.json", tmp_path / ("x" * 300)):
        with pytest.raises(CalibrationError, match=r"Not a directory|File name too long"):
            save_calibration(found, target)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


HEADER = "stage,tokens,batch,s"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty file"),
        ("\n\n", "empty file"),
        (f"{HEADER}\n", "no measurement below the header"),
        ("tokens,batch,s\n1,2,3\n", r":1: no column 'stage'"),
        ("stage,tokens\nattention,1\n", r":1: exactly one time column is needed, found none"),
        ("stage,tokens,s,ms\n", r":1: exactly one time column is needed, found s, ms"),
        ("stage,tokens,tokens,s\n", r":1: column 'tokens' appears twice"),
        (f"{HEADER}\nattention,1,,0.1\nattn,2,,0.1\n", r":3: stage is 'attn', allowed: attention"),
        (f"{HEADER}\nattention,1,0.1\n", r":2: 3 field\(s\), expected 4"),
        (f"{HEADER}\nattention,,5,0.1\n", r":2: tokens must be a number >= 0, found ''"),
        (f"{HEADER}\nffn,5,,0.1\n", r":2: batch must be a number >= 0, found ''"),
        (f"{HEADER}\nffn,,-5,0.1\n", r":2: batch must be a number >= 0, found '-5'"),
        (f"{HEADER}\nffn,,5,nan\n", r":2: s must be a number >= 0, found 'nan'"),
        (f"{HEADER}\nffn,,5,inf\n", r":2: s must be a number >= 0, found 'inf'"),
        (f"{HEADER}\nffn,,5,0\n", r":2: s must be > 0, found 0"),
        ("stage,tokens,s\nffn,5,0.1\n", r":2: ffn rows need a column 'batch'"),
        (f'{HEADER}\nffn,"5,,0.1\n', r":2: not CSV"),
        (f"{HEADER}\nattention,1,,1\nattention,2,,2\nattention,3,,3\n", "no ffn rows"),
        (
            f"{HEADER}\nattention,1,,1\nattention,1,,2\nattention,2,,3\nffn,,1,1\n",
            r"stage attention: 2 distinct tokens value\(s\), at least 3",
        ),
    ],
)
def test_bad_measurements_name_file_line_and_rule(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CalibrationError, match=message) as caught:
        fit_attention_ffn(path)
    assert "bad.csv" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unreadable_measurements_are_errors(tmp_path: Path) -> None:
    (tmp_path / "binary.csv").write_bytes(b"stage,\xff\xfe\x00")
    for name, message in (("binary.csv", "not a text file"), ("none.csv", "No such file")):
        with pytest.raises(CalibrationError, match=message):
            fit_attention_ffn(tmp_path / name)
    with pytest.raises(CalibrationError, match="Is a directory"):
        fit_attention_ffn(tmp_path)


def test_headers_in_any_case_and_order_with_a_byte_order_mark(tmp_path: Path) -> None:
    rows = ["0.01,8,ATTENTION,", "0.02,16,attention,", "0.03,24,Attention,"]
    rows += [f"{0.5 * b},, ffn ,{b}" for b in (1, 2, 4)]
    path = tmp_path / "m.csv"
    text = "\ufeffMS,Tokens, Stage ,BATCH\r\n" + "\r\n".join(rows)
    path.write_text(text, encoding="utf-8", newline="")
    found = fit_attention_ffn(path)
    assert found.coefficients.alpha_attention == pytest.approx(1e-5 / 8)
    assert found.coefficients.alpha_ffn == pytest.approx(5e-4)


def valid_content() -> dict[str, Any]:
    return {
        "format": "serving-twin calibration",
        "version": 1,
        "name": "x",
        "device": "",
        "model": "",
        "num_layers": 2,
        "unit": "s",
        "coefficients": {
            "alpha_attention": 1e-9,
            "beta_attention": 1e-5,
            "alpha_ffn": 1e-8,
            "beta_ffn": 1e-4,
        },
        "fits": {
            "ffn": {
                "points": 3,
                "residual_std_s": 0.0,
                "max_relative_error": 0.0,
                "r2": 1.0,
                "slope_s": 1e-8,
                "intercept_s": 1e-4,
                "range": {"quantity": "batch", "min": 1, "max": 9},
                "warning": None,
            }
        },
        "source": "",
        "notes": [],
    }


def test_a_minimal_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps(valid_content()), encoding="utf-8")
    found = load_calibration(path)
    assert found.coefficients == LatencyCoefficients(
        alpha_attention=1e-9, beta_attention=1e-5, alpha_ffn=1e-8, beta_ffn=1e-4
    )
    assert outside_range(found, "ffn", [0, 5, 20]) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(format="other"), "format: must be one of"),
        (lambda c: c.update(version=2), "version: must be one of 1, found 2"),
        (lambda c: c.pop("num_layers"), "num_layers: missing"),
        (lambda c: c.update(num_layers=0), "num_layers must be >= 1, found 0"),
        (lambda c: c.update(num_layers=1.5), "num_layers: must be an integer, found 1.5"),
        (lambda c: c.update(num_layers=True), "num_layers: must be an integer"),
        (lambda c: c.update(unit="us"), "unit: must be one of 's', found 'us'"),
        (lambda c: c.update(extra=1), "extra: unknown key"),
        (lambda c: c.update(name=3), "name: must be"),
        (lambda c: c["coefficients"].pop("beta_ffn"), r"coefficients\] beta_ffn: missing"),
        (lambda c: c["coefficients"].update(alpha_ffn=-1), "alpha_ffn must be finite and >= 0"),
        (lambda c: c["coefficients"].update(alpha_ffn="1"), r"coefficients\] alpha_ffn: must be"),
        (lambda c: c["coefficients"].update(communication="both"), "communication: must be one"),
        (lambda c: c["fits"].update(attn=c["fits"]["ffn"]), "fits: unknown stage 'attn'"),
        (lambda c: c["fits"]["ffn"].pop("range"), r"fits.ffn.*range.*missing"),
        (lambda c: c["fits"]["ffn"]["range"].update(min=10), "range must satisfy"),
        (lambda c: c.update(notes="text"), "notes: must be"),
    ],
)
def test_a_bad_file_names_file_and_field(tmp_path: Path, change: Any, message: str) -> None:
    content = valid_content()
    change(content)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(CalibrationError, match=message) as caught:
        load_calibration(path)
    assert "bad.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ":1: not JSON"),
        ('{\n"name": }', ":2: not JSON"),
        ("[]", "must be a table"),
        ('{"num_layers": NaN}', "numbers must be finite, found NaN"),
        ('{"name": "a", "name": "b"}', "key 'name' appears twice"),
    ],
)
def test_a_file_that_is_not_such_json_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CalibrationError, match=message):
        load_calibration(path)


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"No such file .* deepseek-v3-ascend-910c"):
        load_calibration("deepseek")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CalibrationError, match="not a text file"):
        load_calibration(tmp_path / "binary.json")


def test_nesting_beyond_any_calibration_is_one_message(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text(100_000 * "[")
    with pytest.raises(CalibrationError, match=r"deep\.json: lists or objects are nested too deep"):
        load_calibration(path)


def test_coefficients_beyond_any_device_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    save_calibration(load_calibration(NAMED[0]), path)
    content = json.loads(path.read_text())
    content["coefficients"]["alpha_ffn"] = 1e300
    path.write_text(json.dumps(content))
    with pytest.raises(CalibrationError, match=r"c\.json: alpha_ffn must be 0 or within"):
        load_calibration(path)


@pytest.mark.timeout(20)
def test_pipes_are_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for read in (load_calibration, fit_attention_ffn):
        with pytest.raises(CalibrationError, match="pipe: is not a regular file"):
            read(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ("attention,1e308,,5", "tokens must be <= 1e.12, found '1e308'"),
        ("attention,10,,1e308", "us must be within"),
        ("ffn,,10,1e-300", "us must be within"),
    ],
)
def test_implausible_measurements_are_refused_by_line(tmp_path: Path, row: str, rule: str) -> None:
    path = write(tmp_path / "m.csv", [*straight_rows(), row])
    with pytest.raises(CalibrationError, match=rf"m\.csv:38: {rule}"):
        fit_attention_ffn(path)


def test_loads_too_uneven_for_a_bend_still_give_a_line() -> None:
    load = np.array([1.0, 1.0 + 1e-7, 1e12, 1e12])
    fit = fit_stage(load, np.array([1.0, 2.0, 3.0, 9.0]), "tokens")
    assert fit.warning is not None
