import hashlib
import http.server
import json
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from twin.fetch import cache_dir, fetch
from twin.fetch_catalog import CatalogEntry, FetchError, find_entry, load_catalog

CONTENT = bytes(range(256)) * 1024  # four blocks of the downloader
ENTRY = CatalogEntry(
    name="small-trace",
    title="a trace of this test",
    url="https://example.invalid/owner/repo/abc/data/small.csv.gz",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size_bytes=len(CONTENT),
    licence="MIT",
    attribution="nobody",
    citation="none",
)


@dataclass
class Server:
    """A loopback server whose manners a test chooses."""

    content: bytes = CONTENT
    knows_ranges: bool = True
    says_length: bool = True
    status: int = 200
    cut_after_bytes: int | None = None
    wrong_range_start: bool = False
    url: str = ""
    ranges: list[str | None] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    manners = Server()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers.get("Range")
            manners.ranges.append(asked)
            manners.paths.append(self.path)
            if manners.status != 200:
                self.send_error(manners.status)
                return
            start = 0
            if asked and manners.knows_ranges:
                start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1])  # type: ignore[index]
                if start >= len(manners.content):
                    self.send_error(416)
                    return
                if manners.wrong_range_start:
                    start = 0
                self.send_response(206)
                last = len(manners.content) - 1
                self.send_header("Content-Range", f"bytes {start}-{last}/{last + 1}")
            else:
                self.send_response(200)
            body = manners.content[start:]
            if manners.says_length:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body if manners.cut_after_bytes is None else
                             body[: manners.cut_after_bytes])  # fmt: skip

        def log_message(self, *args: object) -> None:
            pass

    listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listener.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    manners.url = f"http://127.0.0.1:{listener.server_address[1]}"
    yield manners
    listener.shutdown()
    listener.server_close()
    thread.join()


def partial_of(cache: Path) -> Path:
    return cache / "small-trace.csv.gz.partial"


def test_a_download_arrives_whole_under_its_final_name(server: Server, tmp_path: Path) -> None:
    cache = tmp_path / "not" / "yet" / "there"
    seen: list[tuple[int, int]] = []
    found = fetch(
        ENTRY, cache=cache, base_url=server.url, on_progress=lambda *step: seen.append(step)
    )
    assert found.path == cache / "small-trace.csv.gz"
    assert found.path.read_bytes() == CONTENT
    assert not found.was_cached
    assert not partial_of(cache).exists()
    assert server.paths == ["/owner/repo/abc/data/small.csv.gz"]
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(seen) == 4


def test_a_file_in_the_cache_is_checked_and_not_downloaded_again(
    server: Server, tmp_path: Path
) -> None:
    fetch(ENTRY, cache=tmp_path, base_url=server.url)
    again = fetch(ENTRY, cache=tmp_path, base_url=server.url)
    assert again.was_cached
    assert len(server.paths) == 1


def test_a_file_put_into_the_cache_by_hand_needs_no_network(tmp_path: Path) -> None:
    (tmp_path / "small-trace.csv.gz").write_bytes(CONTENT)
    assert fetch(ENTRY, cache=tmp_path).was_cached


def test_a_damaged_file_in_the_cache_is_replaced(server: Server, tmp_path: Path) -> None:
    (tmp_path / "small-trace.csv.gz").write_bytes(CONTENT[:-1] + b"x")
    found = fetch(ENTRY, cache=tmp_path, base_url=server.url)
    assert found.replaced_damaged
    assert found.path.read_bytes() == CONTENT


def test_a_damaged_file_stays_when_its_replacement_cannot_be_had(
    server: Server, tmp_path: Path
) -> None:
    server.status = 503
    damaged = tmp_path / "small-trace.csv.gz"
    damaged.write_bytes(b"damaged")
    with pytest.raises(FetchError, match="answered 503"):
        fetch(ENTRY, cache=tmp_path, base_url=server.url)
    assert damaged.read_bytes() == b"damaged"


@pytest.mark.parametrize("says_length", [True, False])
def test_a_broken_transfer_is_kept_and_goes_on_from_where_it_stopped(
    server: Server, tmp_path: Path, says_length: bool
) -> None:
    server.cut_after_bytes = 100_000
    server.says_length = says_length
    with pytest.raises(FetchError, match=r"ended after 100,000 of 262,144 bytes; they are kept"):
        fetch(ENTRY, cache=tmp_path, base_url=server.url)
    assert partial_of(tmp_path).stat().st_size == 100_000
    assert not (tmp_path / "small-trace.csv.gz").exists()
    server.cut_after_bytes = None
    found = fetch(ENTRY, cache=tmp_path, base_url=server.url)
    assert found.resumed_from_bytes == 100_000
    assert found.path.read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=100000-"]


def test_a_server_that_ignores_ranges_sends_everything_again(
    server: Server, tmp_path: Path
) -> None:
    server.knows_ranges = False
    partial_of(tmp_path).write_bytes(CONTENT[:5_000])
    found = fetch(ENTRY, cache=tmp_path, base_url=server.url)
    assert found.path.read_bytes() == CONTENT


def test_a_range_that_begins_elsewhere_is_not_appended(server: Server, tmp_path: Path) -> None:
    server.wrong_range_start = True
    partial_of(tmp_path).write_bytes(CONTENT[:5_000])
    found = fetch(ENTRY, cache=tmp_path, base_url=server.url)
    assert found.path.read_bytes() == CONTENT
    assert server.ranges == ["bytes=5000-", None]


def test_a_partial_file_of_other_content_is_fetched_anew(server: Server, tmp_path: Path) -> None:
    partial_of(tmp_path).write_bytes(b"x" * 5_000)
    found = fetch(ENTRY, cache=tmp_path, base_url=server.url)
    assert found.resumed_from_bytes == 0
    assert found.path.read_bytes() == CONTENT


@pytest.mark.parametrize("length", [len(CONTENT), len(CONTENT) + 7])
def test_a_partial_file_that_is_long_enough_but_wrong_is_fetched_anew(
    server: Server, tmp_path: Path, length: int
) -> None:
    partial_of(tmp_path).write_bytes(b"x" * length)
    assert fetch(ENTRY, cache=tmp_path, base_url=server.url).path.read_bytes() == CONTENT


def test_a_complete_partial_file_is_only_renamed(tmp_path: Path) -> None:
    partial_of(tmp_path).write_bytes(CONTENT)
    found = fetch(ENTRY, cache=tmp_path, base_url="http://127.0.0.1:9")
    assert found.path.read_bytes() == CONTENT
    assert not partial_of(tmp_path).exists()


def test_a_wrong_checksum_is_named_and_nothing_stays(server: Server, tmp_path: Path) -> None:
    server.content = CONTENT[::-1]
    with pytest.raises(FetchError, match="not the file of the catalog: sha256") as caught:
        fetch(ENTRY, cache=tmp_path, base_url=server.url)
    assert ENTRY.sha256 in str(caught.value)
    assert hashlib.sha256(CONTENT[::-1]).hexdigest() in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("says_length", [True, False])
@pytest.mark.parametrize("length", [10, len(CONTENT) + 1])
def test_a_file_of_another_size_never_gets_the_final_name(
    server: Server, tmp_path: Path, says_length: bool, length: int
) -> None:
    server.content = (CONTENT * 2)[:length]
    server.says_length = says_length
    with pytest.raises(FetchError, match=r"not the file of the catalog|ended after 10 of"):
        fetch(ENTRY, cache=tmp_path, base_url=server.url)
    assert not (tmp_path / "small-trace.csv.gz").exists()


def test_an_absent_file_is_said_with_address_and_the_manual_way(
    server: Server, tmp_path: Path
) -> None:
    server.status = 404
    with pytest.raises(FetchError, match="the server answered 404 Not Found") as caught:
        fetch(ENTRY, cache=tmp_path, base_url=server.url)
    message = str(caught.value)
    assert server.url in message
    assert ENTRY.url in message
    assert str(tmp_path / "small-trace.csv.gz") in message
    assert ENTRY.sha256 in message
    assert "\n" not in message


def test_without_a_network_the_message_names_the_manual_way(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(
        FetchError, match=r"perhaps this machine is offline \(Connection refused\)"
    ) as caught:
        fetch(ENTRY, cache=tmp_path, base_url=f"http://127.0.0.1:{port}")
    assert ENTRY.url in str(caught.value)
    assert f"sha256 is {ENTRY.sha256}" in str(caught.value)


def test_a_silent_server_is_given_up_after_the_timeout(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(FetchError, match=r"cannot be reached.*timed out"):
            fetch(ENTRY, cache=tmp_path, base_url=url, timeout_s=0.2)


def test_a_cache_that_cannot_be_written_is_named(server: Server, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(FetchError, match=r"file/small-trace.csv.gz: cannot be written"):
        fetch(ENTRY, cache=blocked, base_url=server.url)


def test_the_cache_follows_the_xdg_rule(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "serving-twin" / "traces"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/path")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_dir() == tmp_path / "home" / ".cache" / "serving-twin" / "traces"


def test_every_entry_of_the_catalog_points_to_a_fixed_commit() -> None:
    catalog = load_catalog()
    assert "azure-2023-conversation" in catalog
    for entry in catalog.values():
        assert re.match(r"https://raw\.githubusercontent\.com/[^/]+/[^/]+/[0-9a-f]{40}/", entry.url)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("azure-2023-conversation", "azure-llm-2023-conv/AzureLLMInferenceTrace_conv.csv.gz"),
        ("mooncake-arxiv-1000", "mooncake-arxiv-1000/mooncake_trace_1000.jsonl"),
        (
            "vidur-arxiv-summarization",
            "lengths-arxiv-summarization/"
            "arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv.gz",
        ),
        ("dynamo-agent-qwen3-14b", "dynamo-agent-qwen3-14b/pi_request_trace.jsonl.gz"),
        ("vllm-rtxpro6000-llama-3.1-8b", "vllm-bench-rtxpro6000-llama-3.1-8b/requests.jsonl"),
    ],
)
def test_checksums_of_the_catalog_are_those_of_the_real_files(data_file, name, file) -> None:
    import gzip

    entry = load_catalog()[name]
    content = data_file(file).read_bytes()
    if file.endswith(".gz") and not entry.url.endswith(".gz"):
        content = gzip.decompress(content)
    assert hashlib.sha256(content).hexdigest() == entry.sha256
    assert len(content) == entry.size_bytes


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(FetchError, match=r"no trace 'gpt' in the catalog; there are azure"):
        find_entry(load_catalog(), "gpt")


def catalog_text(**changes: object) -> str:
    fields = {name: getattr(ENTRY, name) for name in ENTRY.__dataclass_fields__}
    return json.dumps({"version": 1, "traces": [{**fields, **changes}]})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "must be an object with version 1"),
        ('{"version": 2, "traces": []}', "must be an object with version 1"),
        ('{"version": 1, "traces": {}}', "traces must be a list"),
        ('{"version": 1, "traces": [{}]}', "trace 0 must have exactly name, title"),
        (catalog_text(size_bytes="10"), "trace 0: size_bytes has a wrong type"),
        (catalog_text(size_bytes=0), "size_bytes must be >= 1, found 0"),
        (catalog_text(sha256="abc"), "sha256 must be 64 hex digits, found 'abc'"),
        (catalog_text(url="file:///etc/passwd"), "url must be http or https"),
        (catalog_text(name="../evil"), "catalog name must be of a-z"),
    ],
)
def test_a_bad_catalog_is_an_error_that_names_it(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "catalog.json"
    path.write_text(text)
    with pytest.raises(FetchError, match=message) as caught:
        load_catalog(path)
    assert "\n" not in str(caught.value)


def test_an_absent_catalog_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="cannot be read"):
        load_catalog(tmp_path / "absent.json")


def test_the_cached_name_keeps_the_endings_that_tell_the_format() -> None:
    assert ENTRY.file_name == "small-trace.csv.gz"
    assert replace(ENTRY, url="https://h/a/b/c.jsonl").file_name == "small-trace.jsonl"
