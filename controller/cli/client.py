"""The command line's calls to the running controller's API."""

from __future__ import annotations

from typing import Any

import requests

from trimtab.controller.presence import Presence, find
from trimtab.controller.settings import Settings
from trimtab.errors import ControllerError, TrimtabError

TIMEOUT_S = 30.0


class ApiClient:
    """Talks to the controller of ``settings.home``. Raises ``ControllerError`` when none runs."""

    def __init__(self, settings: Settings) -> None:
        self.presence: Presence = find(settings.home)

    def get(self, path: str) -> Any:
        return self._call("GET", path)

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._call("POST", path, body)

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Raises ``TrimtabError`` with the controller's own words when it refuses."""
        headers = {"Authorization": f"Bearer {self.presence.token}"}
        url = f"{self.presence.url}/api/v1{path}"
        try:
            response = requests.request(method, url, json=body, headers=headers, timeout=TIMEOUT_S)
        except requests.RequestException as error:
            raise ControllerError(f"the controller at {self.presence.url} does not answer: {error}") from error
        if response.ok:
            return response.json()
        try:
            told = response.json()["error"]
        except (requests.JSONDecodeError, KeyError):
            told = f"{method} {path} answered {response.status_code}"
        raise TrimtabError(told)
