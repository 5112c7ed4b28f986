"""The page in a real browser, served by ``twin dashboard``."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CHROMEDRIVER = shutil.which("chromedriver")
TWIN = Path(sys.executable).with_name("twin")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=1280,1000",
)
SMALL = """\
[workload]
trace = "azure-2023-conversation"

[attention_ffn]
batch_per_worker = 16
r_max = 8

[run]
engine = "simpy"
replications = 2
num_cycles = 60
simulate_r = "chosen"
compare_routing = false
"""


def wait_for(what: Callable[[], Any], seconds: float, told: str) -> Any:
    """The first true value of ``what``, or a failure that says what was waited for."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = what()
        if value:
            return value
        time.sleep(0.1)
    pytest.fail(f"waited {seconds:g} s for {told}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Where a page of its own is served; its server ends with the test."""
    port = free_port()
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen(
            [str(TWIN), "dashboard", "--port", str(port)],
            cwd=tmp_path,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"

    def is_healthy() -> bool:
        if server.poll() is not None:
            pytest.fail(f"the server ended: {(tmp_path / 'server.log').read_text()[-2000:]}")
        try:
            with urllib.request.urlopen(f"{url}/_stcore/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    try:
        wait_for(is_healthy, 60, f"{url}/_stcore/health")
        yield url
    finally:
        server.terminate()
        try:
            server.wait(15)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait(15)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "the server outlived its command"


@pytest.fixture
def browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if CHROMIUM is None or CHROMEDRIVER is None:
        pytest.skip("needs chromium and chromedriver (Debian: chromium, chromium-driver)")
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    from selenium.webdriver.chrome.service import Service

    monkeypatch.setenv("SE_OFFLINE", "true")
    monkeypatch.setenv("SE_AVOID_STATS", "true")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=Service(CHROMEDRIVER, env=dict(os.environ)))
    try:
        yield driver
    finally:
        driver.quit()


def find(browser: Any, css: str, seconds: float = 60) -> Any:
    found = wait_for(lambda: browser.find_elements("css selector", css), seconds, css)
    return found[0]


def button(browser: Any, text: str, seconds: float = 60) -> Any:
    path = f"//button[.//p[normalize-space()='{text}']]"
    return wait_for(lambda: browser.find_elements("xpath", path), seconds, f"button {text}")[0]


def errors(browser: Any) -> list[str]:
    boxes = '[data-testid="stAlertContentError"], [data-testid="stException"]'
    return [box.text for box in browser.find_elements("css selector", boxes)]


def theory(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [str(TWIN), "theory", *arguments, "--json"], capture_output=True, text=True, check=True
    )
    return dict(json.loads(done.stdout))


def test_the_page_opens_with_a_ratio_and_simulates_on_request(
    browser: Any, address: str, tmp_path: Path
) -> None:
    browser.get(address)
    recommended = theory()["recommendation"]["r"]
    assert find(browser, '[data-testid="ratio"]').text == f"r = {recommended}"
    assert errors(browser) == []

    small = tmp_path / "small.toml"
    small.write_text(SMALL)
    tab = "//*[@role='tab'][normalize-space(.)='Scenario file']"
    wait_for(lambda: browser.find_elements("xpath", tab), 20, "tab")[0].click()
    find(browser, 'input[type="file"]', 20).send_keys(str(small))
    expected = theory(str(small))["recommendation"]["r"]
    wait_for(
        lambda: find(browser, '[data-testid="ratio"]').text == f"r = {expected}", 30, "its ratio"
    )

    button(browser, "Simulate").click()
    button(browser, "Simulated")
    wait_for(
        lambda: find(browser, '[data-name="throughput"] .twin').text.startswith("twin "),
        20,
        "a simulated number",
    )
    assert len(browser.find_elements("css selector", '[data-testid="stPlotlyChart"]')) == 4
    assert errors(browser) == []
