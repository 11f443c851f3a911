"""Ray Serve: requests go to the replica that has their adapter.

    @serve.deployment(
        num_replicas=4,
        request_router_config=RequestRouterConfig(
            request_router_class=AffinityRequestRouter, request_routing_stats_period_s=2
        ),
    )
    class Engine(AdapterReplica):
        def __init__(self):
            self.cache = AdapterCache(...)

    engine.options(multiplexed_model_id="acme/sql-v3").generate.remote(prompt)

A request names its adapter as Serve's multiplexing does: by ``multiplexed_model_id`` on a handle,
or the HTTP header ``serve_multiplexed_model_id``; without it it is for the base model. Nothing has
to be wrapped in ``serve.multiplexed``: the cache loads and evicts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import Any

from prometheus_client import REGISTRY, start_http_server
from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from adaptercache.cache import AdapterCache
from adaptercache.integrations.replicas import Replicas, published
from adaptercache.metrics import PrometheusCollector
from adaptercache.stats import Tier

__all__ = ["AdapterReplica", "AffinityRequestRouter"]

log = logging.getLogger(__name__)

SLACK = 8


class AffinityRequestRouter(RequestRouter):  # type: ignore[misc]  # Ray may not be installed
    """Routes by `adaptercache.routing.AffinityRouter`: for ``RequestRouterConfig``.

    ``request_router_kwargs`` are the router's: ``bound``, ``hot_share``, ``calm``, ``memory_s``,
    ``slack`` (here 8: set it to the requests that a replica runs in one batch), and ``costs``, a
    dict. Replicas are named by their ids, loads are Serve's own count of requests, and what is
    where the replicas publish (`AdapterReplica`). Serve asks each replica in turn whether it takes
    the request, by its ``max_ongoing_requests``.

    Each handle and each HTTP proxy has a router. They agree on homes without talking.
    """

    def initialize_state(self, *, slack: int = SLACK, **options: Any) -> None:
        """Called by Serve, before all else."""
        self._fleet = Replicas(slack=slack, **options)
        self._named: dict[str, RunningReplica] = {}

    def adapter_id(self, request: PendingRequest) -> str | None:
        """The adapter of a request, None for the base model. To be overridden where requests name
        it in another way, by ``request.args`` and ``request.kwargs``."""
        return request.metadata.multiplexed_model_id or None

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve when replicas come, go, or publish other stats."""
        self._named = {r.replica_id.unique_id: r for r in replicas}
        self._fleet.update({name: r.routing_stats for name, r in self._named.items()})
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Called by Serve where a request met a dead replica, before the controller knows."""
        self._named.pop(replica_id.unique_id, None)
        self._fleet.left(replica_id.unique_id)
        super().on_replica_actor_died(replica_id)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Called by Serve: groups of replicas, to be tried in this order."""
        # Those for whom a replica was found in this turn of the event loop are sent now, and are in
        # its count. Without that a burst is routed as one, by the loads that were before it.
        await asyncio.sleep(0)
        if pending_request is None or not self._named:
            return [candidate_replicas]
        again = pending_request.routing_context.should_backoff
        pending_request.routing_context.should_backoff = True  # where all are full: wait, not spin
        queues = self.replica_queue_len_cache
        # Not known: idle for a while, and Serve asks before it sends anything there.
        loads = [(name, queues.get(r.replica_id) or 0) for name, r in self._named.items()]
        order = self._fleet.order(
            self.adapter_id(pending_request), loads, time.monotonic(), again=again
        )
        offered = {id(replica): replica for replica in candidate_replicas}
        best = [offered.pop(key) for name in order if (key := id(self._named[name])) in offered]
        groups = [[replica] for replica in best]
        return [*groups, list(offered.values())] if offered else groups


class AdapterReplica:
    """Mix-in for a deployment that embeds an `AdapterCache`, as ``self.cache``."""

    cache: AdapterCache

    def record_routing_stats(self) -> dict[str, Any]:
        """Called by Serve every ``request_routing_stats_period_s``; one of yours may add to it."""
        return published(self.cache)

    def prefetch(self, adapter_ids: Iterable[str], to: str = "gpu") -> None:
        """A hint that these are wanted soon: see `AdapterCache.prefetch`. Call it on a handle with
        ``multiplexed_model_id`` set to the adapter, then it goes where its requests will.

        Args:
            to: ``"gpu"``, ``"host"`` or ``"disk"``.
        """
        self.cache.prefetch(list(adapter_ids), to=Tier(to))

    def serve_metrics(self, ports: Iterable[int], host: str = "0.0.0.0") -> int | None:
        """Answer Prometheus on the first of ``ports`` that is free, with this process' registry and
        the metrics of ``self.cache`` in it, as long as the process lives. Call it once.

        Replicas of one machine are given the same ports: which one gets which is nobody's business.
        0 stands for any that is free.

        Returns:
            The port; None where none can be had, which is logged: requests are served all the same,
            and it may be called again.

        Raises:
            ValueError: what is no port, or a second cache in one registry. Nothing was opened.
        """
        ports = list(ports)
        for port in ports:
            if port not in range(1 << 16):
                raise ValueError(f"port {port!r}: a whole number from 0 to 65535")
        collector = PrometheusCollector(self.cache)
        REGISTRY.register(collector)
        reason: OSError | str = "none was given"
        for port in ports:
            try:
                server, _ = start_http_server(port, host)
            except OSError as error:
                reason = error
            else:
                log.info("metrics are on port %d", server.server_port)
                return server.server_port
        REGISTRY.unregister(collector)  # it would keep the cache
        log.warning("no port for metrics: %s", reason)
        return None
