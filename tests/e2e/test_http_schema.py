"""Schemathesis reads /openapi.json and holds a running server to it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import Served

ROUTES = {
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/models",
    "/v1/models/{model}",
    "/tokenize",
    "/detokenize",
    "/health",
    "/ping",
    "/ready",
    "/version",
    "/metrics",
    "/openapi.json",
}
# The server knows rules that a schema cannot tell, such as which ids are in the vocabulary or how
# many tokens a text has, so it may refuse what fits the schema; all other checks are on.
LEFT_OUT = "positive_data_acceptance"
LEAST_CASES = 400

pytestmark = pytest.mark.timeout(600)  # the first start on a machine builds kernels


def test_the_document_describes_each_route_that_is_served(served: Served):
    document = httpx.get(
        f"{served.url}/openapi.json", headers={"Authorization": f"Bearer {served.key}"}
    ).json()
    assert set(document["paths"]) == ROUTES
    assert document["security"] == [{"key": []}]


def test_generated_requests_find_no_answer_that_the_document_does_not_allow(
    served: Served, tmp_path: Path
):
    found = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{served.url}/openapi.json"),
            *("--header", f"Authorization: Bearer {served.key}"),
            *("--phases", "coverage,fuzzing", "--max-examples", "3", "--seed", "1"),
            *("--exclude-checks", LEFT_OUT, "--request-timeout", "100", "--no-color"),
        ],
        cwd=tmp_path,
        env=os.environ | {"SCHEMATHESIS_HOOKS": ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
    assert (cases := re.search(r"(\d+) generated", found.stdout)), found.stdout
    assert int(cases[1]) >= LEAST_CASES
    assert (tested := re.search(r"Tested: (\d+)", found.stdout)), found.stdout
    assert int(tested[1]) >= len(ROUTES) - 1, "the document's own route is not among them"
    assert served.metric("serving_twin_engine_failed_steps_total") == 0
    assert httpx.get(f"{served.url}/health").status_code == 200
