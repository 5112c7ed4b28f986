"""PTStore's claims: simulation against the closed form, which is checked against the paper."""

import dataclasses
import io

import pytest
from rich.console import Console

from models.prefix_settings import PREFIX_MODES
from models.prefix_ttft import CLAIMS, ratios, satisfies_claims
from twin.store.validation import (
    PARAMETERS,
    ClaimRow,
    claim_rows,
    closed_form_s,
    product_rows,
    simulate,
)
from twin.store.validation_report import print_claims


@pytest.mark.parametrize("p", PARAMETERS, ids=lambda p: f"{p.gpus} GPUs")
def test_on_paper_one_set_of_parameters_gives_all_four_claims(p):
    assert satisfies_claims(ratios(p), CLAIMS)
    assert p.replicas_kept == 1.0  # nothing is assumed of replicas that the simulation lacks


def test_simulated_means_are_those_of_the_closed_form():
    p = PARAMETERS[0]
    measured = simulate(p, replications=2, prompt_tokens=(1024, 8192))
    for mode in PREFIX_MODES:
        for tokens in (1024, 8192):
            seconds = measured.seconds[(mode, tokens)]
            found = sum(seconds) / len(seconds)
            assert found == pytest.approx(closed_form_s(p, mode, tokens), rel=0.05)
    assert all(row.is_reproduced for row in claim_rows(p, measured))


def test_rows_say_no_where_a_figure_lies_outside():
    """A slow network: EvoStore falls behind by more than what was published."""
    p = dataclasses.replace(PARAMETERS[0], network_bytes_per_s=3e9)
    modes = ("vanilla", "local_prefix", "evostore", "ptstore")
    measured = simulate(p, replications=2, prompt_tokens=(1024, 8192), modes=modes)
    rows = {row.claim: row for row in claim_rows(p, measured)}
    evostore = rows["8k: EvoStore / PTStore"]
    assert not evostore.is_reproduced
    assert evostore.simulated > evostore.high


def test_this_store_beats_gpu_caches_at_every_length_and_a_pool_without_replicas():
    p = PARAMETERS[0]
    modes = ("local_prefix", "evostore", "product")
    measured = simulate(p, replications=2, modes=modes)
    assert all(row.is_reproduced for row in product_rows(p, measured))
    assert measured.most_slower_s <= 0.0005 + 1e-9


def test_the_table_shows_parameters_figures_and_verdicts():
    row = ClaimRow(
        gpus=8,
        claim="8k: EvoStore / PTStore",
        published="1.2",
        low=1.15,
        high=1.3,
        closed_form=1.214,
        simulated=1.327,
        half_width=0.011,
        is_reproduced=False,
        why="read as 1.15 to 1.3",
    )
    text = io.StringIO()
    print_claims([dataclasses.asdict(row)], PARAMETERS, Console(file=text, width=120))
    for part in ("14 GB/s", "20 ms", "1.21", "1.33 ± 0.01", "no|", "read as 1.15 to 1.3"):
        assert part in text.getvalue()
