"""Envoy's configuration as data: the bootstrap, the clusters and the weighted route. Pure functions.

Field meanings: Envoy's v3 API reference (bootstrap, cds, rds, http_connection_manager). Clusters and routes live in
files of their own that Envoy watches; a file is replaced by a rename, which is what Envoy watches for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trimtab.controller.traffic.interface import Route

ROUTES_NAME = "trimtab"
_TYPE = "type.googleapis.com/envoy"
_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


def bootstrap(port: int, folder: Path, admin_socket: Path) -> dict[str, Any]:
    """The static part: one listener on loopback, routes and clusters from ``folder``, the admin on a Unix socket."""
    return {
        "node": {"id": "trimtab", "cluster": "trimtab"},
        "admin": {"address": {"pipe": {"path": str(admin_socket), "mode": 0o600}}},
        "dynamic_resources": {"cds_config": _watched(folder / "clusters.json", folder)},
        "static_resources": {"listeners": [_listener(port, folder)]},
    }


def _watched(path: Path, folder: Path) -> dict[str, Any]:
    source = {"path": str(path), "watched_directory": {"path": str(folder)}}
    return {"path_config_source": source, "resource_api_version": "V3"}


def _listener(port: int, folder: Path) -> dict[str, Any]:
    manager = {
        "@type": f"{_TYPE}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "users",
        "codec_type": "AUTO",
        "rds": {"route_config_name": ROUTES_NAME, "config_source": _watched(folder / "routes.json", folder)},
        "http_filters": [
            {"name": "router", "typed_config": {"@type": f"{_TYPE}.extensions.filters.http.router.v3.Router"}}
        ],
        "stream_idle_timeout": "3600s",
        "request_timeout": "0s",
        "drain_timeout": "5s",
    }
    return {
        "name": "users",
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }


def clusters(routes: Sequence[Route]) -> dict[str, Any]:
    """One cluster a replica."""
    return _versioned([_cluster(r) for r in routes])


def _cluster(route: Route) -> dict[str, Any]:
    address = {"socket_address": {"address": route.host, "port_value": route.port}}
    return {
        "@type": f"{_TYPE}.config.cluster.v3.Cluster",
        "name": route.name,
        "type": "STATIC",
        "connect_timeout": "5s",
        "load_assignment": {
            "cluster_name": route.name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}],
        },
        "typed_extension_protocol_options": {
            _HTTP_OPTIONS: {
                "@type": f"type.googleapis.com/{_HTTP_OPTIONS}",
                "explicit_http_config": {"http_protocol_options": {}},
                # Shorter than the engine's keep-alive, so that it is never the engine that closes first: a request
                # sent into a closing connection would be lost.
                "common_http_protocol_options": {"idle_timeout": "30s"},
            }
        },
        # One engine queues for itself; Envoy's default circuit breaker of 1,024 must not refuse before it does.
        "circuit_breakers": {
            "thresholds": [{"max_connections": 65536, "max_pending_requests": 65536, "max_requests": 65536}]
        },
    }


def weighted_routes(routes: Sequence[Route]) -> dict[str, Any]:
    """One virtual host whose single route splits by weight."""
    weighted = [{"name": r.name, "weight": r.weight} for r in routes if r.weight > 0]
    action = {
        "weighted_clusters": {"clusters": weighted},
        "timeout": "0s",
        # Only what never reached an engine is tried again.
        "retry_policy": {"retry_on": "connect-failure,refused-stream", "num_retries": 2},
    }
    configuration = {
        "@type": f"{_TYPE}.config.route.v3.RouteConfiguration",
        "name": ROUTES_NAME,
        "validate_clusters": False,
        "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": action}]}],
    }
    return _versioned([configuration])


def _versioned(resources: list[dict[str, Any]]) -> dict[str, Any]:
    """The version is the content's hash: Envoy skips an equal update, whose version it then has already."""
    digest = hashlib.sha256(json.dumps(resources, sort_keys=True).encode()).hexdigest()
    return {"version_info": digest[:16], "resources": resources}
