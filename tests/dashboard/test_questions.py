import pytest

from dashboard.questions import AUTO, LISTED, Question
from models.scenario_file import default_scenario, parse_scenario
from models.strict_tables import ScenarioError

AZURE = {"trace": "azure-2023-conversation"}


def test_the_untouched_form_asks_what_the_command_line_asks_without_arguments() -> None:
    question = Question(workload=AZURE, batch_per_worker=256)
    assert parse_scenario(question.tables()) == default_scenario()


def test_milliseconds_of_the_screen_are_seconds_of_the_scenario() -> None:
    question = Question(workload=AZURE, batch_per_worker=64, max_tpot_ms=35.0)
    assert parse_scenario(question.tables()).attention_ffn.max_tpot_s == 0.035


def test_one_way_latency_in_milliseconds_belongs_to_ping_pong() -> None:
    question = Question(
        workload=AZURE, batch_per_worker=64, semantics="pingpong", one_way_ms=0.25, microbatches=3
    )
    settings = parse_scenario(question.tables()).attention_ffn
    assert (settings.one_way_s, settings.num_microbatches) == (0.00025, 3)


def test_an_empty_batch_asks_for_the_best_one_and_so_for_a_limit() -> None:
    with pytest.raises(ScenarioError, match="batch_per_worker: 'auto' needs max_tpot_s"):
        parse_scenario(Question(workload=AZURE).tables())
    settings = parse_scenario(Question(workload=AZURE, kv_capacity_tokens=10**6).tables())
    assert settings.attention_ffn.batch_per_worker == AUTO


def test_the_six_coefficients_keep_their_unit_and_layers() -> None:
    stages = {
        "coefficients": {
            "alpha_attention": 0.002,
            "beta_attention": 40.0,
            "alpha_ffn": 0.1,
            "beta_ffn": 90.0,
            "unit": "us",
        },
        "num_layers": 61,
    }
    settings = parse_scenario(
        Question(workload=AZURE, batch_per_worker=1, stages=stages).tables()
    ).attention_ffn
    assert settings.coefficients is not None
    assert settings.coefficients.in_seconds().alpha_attention == pytest.approx(2e-9)
    assert settings.num_layers == 61


def test_listed_ratios_may_be_separated_by_commas_or_blanks() -> None:
    question = Question(workload=AZURE, batch_per_worker=8, simulate_r=LISTED, listed_r="1, 4 8,16")
    assert parse_scenario(question.tables()).run.simulate_r == (1, 4, 8, 16)


def test_listed_ratios_that_are_no_integers_are_named() -> None:
    question = Question(workload=AZURE, batch_per_worker=8, simulate_r=LISTED, listed_r="1, two")
    with pytest.raises(ScenarioError, match=r"\[run\] simulate_r: .* found '1, two'"):
        question.tables()


def test_a_form_that_lacks_its_file_is_not_complete() -> None:
    assert Question(workload=AZURE).is_complete
    assert Question(workload={"lengths": {"kind": "fixed"}}).is_complete
    assert not Question(workload={"trace": ""}).is_complete
    assert not Question(workload=AZURE, stages={"calibration": ""}).is_complete
