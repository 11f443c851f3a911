"""The mix-in of a replica, without a cluster."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import REGISTRY

from adaptercache.integrations.ray import AdapterReplica
from adaptercache.metrics import PrometheusCollector


class Replica(AdapterReplica):
    def __init__(self, cache: Any) -> None:
        self.cache = cache


@pytest.fixture
def replica(tiny: Any) -> Iterator[Replica]:
    with tiny.cache(tiny.source("a")) as cache:
        yield Replica(cache)
        for collector in list(REGISTRY._collector_to_names):
            if isinstance(collector, PrometheusCollector):
                REGISTRY.unregister(collector)


def test_without_a_free_port_it_says_so_and_goes_on(
    replica: Replica, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert replica.serve_metrics([port], host="127.0.0.1") is None
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "no port for metrics" in record.getMessage()
    assert "in use" in record.getMessage()
