"""The mix-in of a replica, without a cluster."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any
from urllib.request import urlopen

import pytest
from prometheus_client import REGISTRY, start_http_server

from adaptercache.integrations import ray
from adaptercache.integrations.ray import AdapterReplica
from adaptercache.metrics import PrometheusCollector


class Replica(AdapterReplica):
    def __init__(self, cache: Any) -> None:
        self.cache = cache


@pytest.fixture
def replica(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Replica]:
    """What it opens for as long as the process lives ends with the test."""
    servers = []

    def start(*args: Any) -> Any:
        server, thread = start_http_server(*args)
        servers.append(server)
        return server, thread

    monkeypatch.setattr(ray, "start_http_server", start)
    with tiny.cache(tiny.source("a")) as cache:
        yield Replica(cache)
        for collector in ours():
            REGISTRY.unregister(collector)
        for server in servers:
            server.shutdown()
            server.server_close()


def ours() -> list[Any]:
    return [each for each in REGISTRY._collector_to_names if isinstance(each, PrometheusCollector)]


def test_without_a_free_port_it_says_so_and_goes_on(
    replica: Replica, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert replica.serve_metrics([port], host="127.0.0.1") is None
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "no port for metrics" in record.getMessage()
    assert "in use" in record.getMessage()
    assert not ours()


def test_no_port_is_no_end_of_it(replica: Replica) -> None:
    assert replica.serve_metrics([]) is None
    port = replica.serve_metrics([0], host="127.0.0.1")
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert b"adaptercache_leases 0.0" in answer.read()


@pytest.mark.parametrize("port", [-1, 65536, "9090", None, 9090.5])
def test_what_is_no_port_is_named_before_anything_is_opened(replica: Replica, port: Any) -> None:
    with pytest.raises(ValueError, match=f"port {port!r}"):
        replica.serve_metrics([0, port], host="127.0.0.1")
    assert not ours()


def test_a_second_cache_of_one_process_takes_no_port(replica: Replica, tiny: Any) -> None:
    first = replica.serve_metrics([0], host="127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for again in (replica, Replica(replica.cache)):
        with pytest.raises(ValueError, match="adaptercache_leases"):
            again.serve_metrics([port], host="127.0.0.1")
    assert first
    assert len(ours()) == 1
    with socket.create_server(("127.0.0.1", port)):
        pass
