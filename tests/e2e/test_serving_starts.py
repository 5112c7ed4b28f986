"""Starts of `runtime serve` that cannot be: exit code 2 and one line that says why."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest

from runtime.demo_model_tiny import make_tiny_checkpoint
from tests.e2e.server_process import run

ENGINE = pytest.mark.long  # an engine's process looks and tells
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("starts") / "tiny")


def test_a_port_in_use_is_one_line_and_an_exit_code(checkpoint):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run("serve", str(checkpoint), "--port", str(port))
    assert ended.returncode == 2
    lines = ended.stderr.splitlines()
    assert str(port) in lines[-1] and "in use" in lines[-1]
    assert [line for line in lines if not line.startswith("listening on ")] == lines[-1:]


def broken(folder: Path, checkpoint: Path, name: str, content: str | None) -> Path:
    """The checkpoint with one file changed, or left out."""
    shutil.copytree(checkpoint, folder)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    return folder


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("config.json", None, "it has no config.json"),
        pytest.param("config.json", "{", "config.json", marks=ENGINE),
        pytest.param("config.json", '{"model_type": "gpt_neox"}', "gpt_neox", marks=ENGINE),
        pytest.param("model.safetensors", None, "safetensors", marks=ENGINE),
        ("tokenizer.json", "{}", "tokenizer.json"),
        ("chat_template.jinja", "{% if %}", "chat_template.jinja"),
    ],
)
def test_a_checkpoint_that_cannot_be_served_is_exit_code_2_and_one_line(
    checkpoint, tmp_path, name, content, told
):
    folder = broken(tmp_path / "broken", checkpoint, name, content)
    ended = run("serve", str(folder), "--port", "0")
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("listening on ")]
    assert ended.returncode == 2 and len(lines) == 1, ended.stderr
    assert lines[0].startswith("error: ") and told in lines[0]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["no/such/folder"], "no/such/folder"),
        (["{}", "--no-such-option"], "--no-such-option"),
        (["{}", "--memory", "lots"], "--memory"),
        (["{}", "--precision", "best"], "--precision"),
        (["{}", "--request-timeout", "-1"], "request_timeout_s"),
        (["{}", "--host", "no.such.host.invalid"], "no.such.host.invalid"),
        (["{}", "--decisions", "/no/such/folder/log.jsonl.gz"], "/no/such/folder"),
        pytest.param(
            ["{}", "--prefix-store", "/tmp/no-such-store.sock"],
            "/tmp/no-such-store.sock",
            marks=ENGINE,
        ),
        (["{}", "--tls-cert", "/no/such/cert.pem"], "--tls"),
        (["{}", "--chat-template", "/no/such/template"], "/no/such/template"),
    ],
)
def test_an_option_that_cannot_be_is_told_in_one_line(checkpoint, options, told):
    ended = run("serve", "--port", "0", *(each.format(checkpoint) for each in options))
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("listening on ")]
    assert ended.returncode == 2 and len(lines) == 1, ended.stderr
    assert lines[0].startswith("error: ") and told in lines[0]
