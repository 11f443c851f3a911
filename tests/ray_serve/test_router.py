"""The router class in Serve's own routing loop, with stand-ins for replicas: no cluster."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, RequestMetadata
from ray.serve.request_router import PendingRequest, ReplicaID

from adaptercache.integrations.ray import AffinityRequestRouter
from adaptercache.routing import AffinityRouter

DEPLOYMENT = DeploymentID("Engine", "app")


@dataclass
class StandIn:
    """What of a `RunningReplica` the routing loop touches."""

    name: str
    stats: dict[str, Any] = field(default_factory=dict)
    max_ongoing_requests: int = 100
    queue: int = 0

    def __post_init__(self) -> None:
        self.replica_id = ReplicaID(self.name, DEPLOYMENT)

    @property
    def routing_stats(self) -> dict[str, Any]:
        return self.stats

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.queue


def request(number: int, adapter_id: str = "") -> PendingRequest:
    metadata = RequestMetadata(
        request_id=f"r{number}",
        internal_request_id=f"i{number}",
        multiplexed_model_id=adapter_id,
    )
    return PendingRequest(args=[], kwargs={}, metadata=metadata)


def make(replicas: list[StandIn], **options: Any) -> AffinityRequestRouter:
    router = AffinityRequestRouter(
        deployment_id=DEPLOYMENT,
        handle_source=DeploymentHandleSource.REPLICA,
        use_replica_queue_len_cache=True,
        self_node_id="node",  # and what else Serve passes to routers of other kinds
        prefer_local_node_routing=True,
    )
    router.initialize_state(**options)
    router.update_replicas(replicas)
    return router


async def send(router: AffinityRequestRouter, pending: PendingRequest) -> str:
    """As Serve does: choose, then count it as sent."""
    replica = await router._choose_replica_for_request(pending)
    router.on_send_request(replica.replica_id)
    return str(replica.replica_id.unique_id)


async def settled(router: AffinityRequestRouter) -> AffinityRequestRouter:
    await asyncio.sleep(0.01)  # Serve asks new replicas for their queues
    return router


def test_a_request_goes_to_its_home_and_the_base_model_anywhere() -> None:
    async def run() -> None:
        router = await settled(make([StandIn(name) for name in "abc"]))
        homes = AffinityRouter("abc")
        for number in range(30):
            adapter_id = f"adapter-{number % 10}"
            assert await send(router, request(number, adapter_id)) == homes.homes(adapter_id)[0]
            router.decrement_queue_len_cache(ReplicaID(homes.homes(adapter_id)[0], DEPLOYMENT))
        assert {await send(router, request(100 + n)) for n in range(3)} == set("abc")

    asyncio.run(run())


def test_a_burst_is_routed_by_what_is_sent_of_it_already() -> None:
    """All at once, before anything is sent: no replica gets more than the bound lets it."""

    async def run() -> None:
        router = await settled(make([StandIn(name) for name in "abcd"], slack=4))
        sent = [send(router, request(number, "hot")) for number in range(80)]
        counts = Counter(await asyncio.gather(*sent))
        assert max(counts.values()) <= 1.2 * 80 / 4 + 4, counts

    asyncio.run(run())


def test_what_replicas_publish_decides() -> None:
    async def run() -> None:
        here = {"adaptercache": {"gpu": ["x"], "copying": [], "host": [], "disk": []}}
        for name in "ab":
            other = "b" if name == "a" else "a"
            router = make([StandIn(name, here), StandIn(other)], costs={"away": 0.0})
            assert await send(await settled(router), request(1, "x")) == name

    asyncio.run(run())


def test_a_replica_that_is_full_is_passed_over_and_waited_for() -> None:
    async def run() -> None:
        home = AffinityRouter("ab").homes("x")[0]
        replicas = [StandIn(name, queue=5, max_ongoing_requests=5) for name in "ab"]
        router = await settled(make(replicas, slack=100))
        waiting = asyncio.ensure_future(send(router, request(1, "x")))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        assert router.num_routing_tasks_in_backoff == 1, "it waits rather than spins"
        other = next(r for r in replicas if r.name != home)
        other.queue = 4
        assert await asyncio.wait_for(waiting, 5) == other.name

    asyncio.run(run())


def test_a_dead_replica_gets_nothing_more() -> None:
    async def run() -> None:
        router = await settled(make([StandIn(name) for name in "ab"]))
        home = await send(router, request(1, "x"))
        router.on_replica_actor_died(ReplicaID(home, DEPLOYMENT))
        assert [await send(router, request(n, "x")) for n in (2, 3)] == [*{"a", "b"} - {home}] * 2

    asyncio.run(run())


def test_a_subclass_may_take_the_adapter_from_the_arguments() -> None:
    class ByArgument(AffinityRequestRouter):
        def adapter_id(self, request: PendingRequest) -> str | None:
            return request.kwargs.get("adapter")

    async def run() -> None:
        for router, asked in ((ByArgument, {"adapter": "x"}), (ByArgument, {})):
            named = SimpleNamespace(kwargs=asked)
            assert router.adapter_id(None, named) == asked.get("adapter")
        assert AffinityRequestRouter.adapter_id(None, request(1, "y")) == "y"
        assert AffinityRequestRouter.adapter_id(None, request(1)) is None

    asyncio.run(run())
