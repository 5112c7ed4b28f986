"""``twin memory`` as a person uses it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from models.llm_catalog import PAGEDWEIGHT_MODELS
from twin import cli

TINY_MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
}


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    """Exit code, standard output and error of ``twin memory ARGUMENTS``."""
    monkeypatch.setattr(sys, "argv", ["twin", "memory", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    return lambda *arguments: run(monkeypatch, capsys, *arguments)


def test_the_papers_three_models_and_its_claim_are_the_default(memory: Any) -> None:
    code, out, _ = memory()
    assert code == 0
    for name in PAGEDWEIGHT_MODELS:
        assert name in out
    for shown in ("70.3 %", "72.1 %", "73.0 %", "4 bits: 72.1 %", "3 bits: 73.0 %", "2.70", "4.02"):
        assert shown in out
    assert max(map(len, out.splitlines())) <= 100


def test_json_holds_what_the_tables_show(memory: Any) -> None:
    code, out, _ = memory("mixtral-8x7b", "--bits", "3.5,4", "--budget", "40", "--json")
    assert code == 0
    (model,) = json.loads(out)
    assert [width["bits"] for width in model["widths"]] == [3.5, 4.0]
    at_4 = model["widths"][1]
    assert round(at_4["saving"], 3) == 0.721
    assert at_4["budget"]["kv_tokens"] == at_4["budget"]["free_bytes"] // 131_072 // 16 * 16
    assert 6.0 < model["budget"]["bits"] < 8.0
    assert model["parameters"]["total"] == 46_702_792_704


def test_storage_options_change_the_bytes(memory: Any) -> None:
    sizes = {}
    for tables in ("active", "all"):
        for entry in ("fp16", "int8"):
            _, out, _ = memory(
                "olmoe-1b-7b", "--tables", tables, "--entry", entry, "--bits", "4", "--json"
            )
            sizes[tables, entry] = json.loads(out)[0]["widths"][0]["table_bytes"]
    rows = 16 * 64 * (2048 + 2048)
    assert sizes == {
        ("active", "fp16"): rows * 32,
        ("active", "int8"): rows * 20,
        ("all", "fp16"): rows * (8 + 16 + 32),
        ("all", "int8"): rows * (4 + 8 + 16 + 3 * 4),
    }


@pytest.mark.parametrize(
    ("sequences", "each"),
    [(1, 7_472), (2, 3_728), (100, 64), (467, 16), (468, 0), (1000, 0)],
)
def test_467_blocks_are_shared_whole_and_equally(memory: Any, sequences: int, each: int) -> None:
    arguments = "qwen1.5-moe-a2.7b", "--budget", "10", "--bits", "3", "--sequences", str(sequences)
    code, out, _ = memory(*arguments, "--json")
    use = json.loads(out)[0]["widths"][0]["budget"]
    assert code == 0
    assert (use["kv_tokens"], use["kv_tokens_per_sequence"]) == (each * sequences, each)
    _, out, _ = memory(*arguments)
    says_so = f"not even a block of 16 fits for each of {sequences:,} sequences" in out
    assert says_so == (each == 0)


def test_a_million_sequences_do_not_fit_beside_windows(memory: Any) -> None:
    code, out, _ = memory(
        "gemma-4-26b-a4b", "--budget", "40", "--bits", "3", "--sequences", "1000000"
    )
    assert code == 0
    assert "0 tokens: not even a block of 16 fits for each of 1,000,000 sequences" in out


def test_one_sequence_without_room_for_a_block_is_told_so(memory: Any) -> None:
    _, out, _ = memory("qwen1.5-moe-a2.7b", "--budget", "8.531", "--bits", "3")
    assert "0 tokens: not even a block of 16 fits for one sequence" in out


def test_a_saving_and_a_budget_that_every_width_reaches_are_called_so(memory: Any) -> None:
    _, out, _ = memory("mixtral-8x7b", "--saving", "1", "--budget", "80")
    assert out.count("every width") == 3  # average, in pages, and the weights alone
    assert "8.00" not in out.split("A budget of")[1]
    _, out, _ = memory("mixtral-8x7b", "--saving", "99")
    assert out.count("not reached") == 2


def test_small_models_are_shown_in_units_that_show_them(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_MIXTRAL))
    code, out, _ = memory(str(tmp_path), "--page-bytes", "1024", "--budget", "0.0004")
    assert code == 0
    assert "experts 0.295 MB, all else 67.200 kB" in out  # 2 x 4 x 3 x 64 x 96 weights of 2 B
    assert "A budget of 0.400 MB" in out
    assert "0.18 M, 0.11 M active" in out
    assert " 0.000 " not in out
    figures = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda figure, *_, **__: figures.append(figure)
    )
    memory(str(tmp_path), "--plot", str(tmp_path / "memory.png"))
    (axes,) = figures[0].axes
    assert axes.get_ylabel() == "MB"
    assert axes.get_ylim()[1] == pytest.approx(1.06 * 0.362112)


def test_a_configuration_file_is_read(memory: Any, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(TINY_MIXTRAL))
    code, out, _ = memory(str(tmp_path), "--page-bytes", "1024")
    assert code == 0
    assert tmp_path.name in out
    file.write_text('{"model_type": "bert"}')
    code, _, err = memory(str(file))
    assert code == 2
    assert err == f"error: {err.removeprefix('error: ').strip()}\n"
    assert f"{file}: model_type: must be one of" in err


def test_a_dense_model_is_told_to_have_no_experts(memory: Any) -> None:
    code, out, _ = memory("mistral-7b", "--budget", "16")
    assert code == 0
    assert "none: nothing to hold at fewer bits" in out
    assert "no limit" in out  # every layer has a window, and the windows fit
    assert "is saved" not in out


@pytest.mark.parametrize(
    "arguments",
    [(), ("mistral-7b",), ("qwen1.5-moe-a2.7b", "llama-3.1-8b", "--budget", "10")],
)
def test_the_picture_is_a_whole_png(memory: Any, tmp_path: Path, arguments: Any) -> None:
    picture = tmp_path / "memory.png"
    code, _, err = memory(*arguments, "--plot", str(picture))
    assert (code, err) == (0, f"written: {picture}\n")
    pixels = matplotlib.image.imread(picture)
    assert pixels.shape[0] > 300 and pixels.shape[1] > 500
    assert pixels.std() > 0.05
    assert [path.name for path in tmp_path.iterdir()] == ["memory.png"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mixtral",), "mixtral: is no model of the catalog and no file; known: DeepSeek-V3"),
        (("--bits", "1"), "bits: must be numbers within 2..8, separated by commas, found '1'"),
        (("--bits", "a,b"), "found 'a'"),
        (("--page-bytes", "1000"), "page_bytes: must be a power of two >= 1,024, found 1,000"),
        (("--budget", "0"), "--budget: must be within 0..1e9 GB, found 0"),
        (("--budget", "nan"), "--budget: must be within 0..1e9 GB, found nan"),
        (("--saving", "100"), "saving: must be more than 0 and less than 100 %, found 100 %"),
        (("--budget", "10", "--sequences", "0"), "num_sequences: must be >= 1, found 0"),
        (("--sequences", "1"), "--sequences: share what --budget leaves, and it is not given"),
        (("--kv-bytes", "0"), "kv_value_bytes: must be >= 1, found 0"),
        (("--plot", "nowhere/memory.png"), "--plot: there is no folder nowhere"),
        (("--plot", "memory.pdf"), "--plot: must end in .png, found memory.pdf"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(memory: Any, arguments: Any, message: str) -> None:
    code, out, err = memory(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    assert message in err


def test_it_answers_without_torch_transformers_and_matplotlib() -> None:
    program = (
        "import sys; sys.argv = ['twin', 'memory', '--json']\n"
        "from twin import cli\n"
        "try:\n    cli.main()\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'scipy', 'pyarrow'} & set(sys.modules)\n"
        "sys.stderr.write(','.join(sorted(heavy)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert len(json.loads(done.stdout)) == 3
