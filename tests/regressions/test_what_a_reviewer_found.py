"""Found by reading all of it: each a bug that no test had met."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from adaptercache import (
    AdapterFiles,
    AdapterNotFound,
    CacheClosed,
    Caps,
    LoadFailed,
    Tier,
    disk_room,
)
from adaptercache.catalog import Failures
from adaptercache.routing import AffinityRouter
from adaptercache.testing import FaultySource
from adaptercache.tiers import host
from adaptercache.tiers.remote import DirectorySource


def test_an_id_that_failed_thousands_of_times_fails_once_more() -> None:
    failures, error = Failures(), AdapterNotFound("not there")
    for now in range(3000):
        failures.add("a", error, float(now))
    assert failures.get("a", 2999.5) is error


def test_restore_waits_for_what_was_there_and_not_for_other_traffic(tiny: Any) -> None:
    source = FaultySource(tiny.source("a", "b", "c", "slow"))
    with tiny.cache(source, gpu_slots=2) as cache:
        tiny.load(cache, "a", "b")
        cache.drop_gpu()
        taken = cache.acquire("c")  # so that one of the two finds no room
        source.gate.clear()
        cache.refresh("slow")
        cache.prefetch(["slow"], to=Tier.HOST)
        assert tiny.wait_until(lambda: cache.stats().in_flight_loads > 0)
        assert tiny.ends(cache.restore)
        source.gate.set()
        assert tiny.wait_until(lambda: taken.ready)
        taken.release()


def test_restore_brings_back_what_an_interrupted_drop_has_forgotten(tiny: Any) -> None:
    def interrupt(tier: Tier, digest: bytes) -> None:
        if tier is Tier.GPU and not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt

    interrupted: list[bool] = []
    with tiny.cache(tiny.source("a"), on_evict=interrupt) as cache:
        tiny.load(cache, "a")
        with pytest.raises(KeyboardInterrupt):
            cache.drop_gpu()
        cache.restore()
        assert cache.resident(Tier.GPU) == {"a"}


def test_a_cache_that_could_not_be_made_leaves_no_thread(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, close = list[bool](), host.HostTier.close
    monkeypatch.setattr(host.HostTier, "close", lambda self: (closed.append(True), close(self)))
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        tiny.cache(tiny.source(), disk_dir=tmp_path / "file")
    assert closed == [True]


def test_a_relative_directory_stays_where_it_was(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with tiny.cache(tiny.source("a", "b"), disk_dir="disk") as cache:
        tiny.load(cache, "a")
        monkeypatch.chdir(tmp_path / "elsewhere")
        tiny.load(cache, "b")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert len(list((tmp_path / "disk" / "objects").iterdir())) == 2


def test_a_full_disk_is_waited_for_once(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_room, "ROOM_WAIT_S", 0.3)
    with tiny.cache(tiny.source("a"), disk_dir=tmp_path) as cache:
        monkeypatch.setattr(cache._parts.lifter._room, "_set_aside", lambda nbytes: False)
        started = time.monotonic()
        with pytest.raises(LoadFailed, match="full of adapters that are being read"):
            cache.acquire("a").result(10)
        assert time.monotonic() - started < 0.85


def test_files_close_their_own_sources_alone(tiny: Any, tmp_path: Path) -> None:
    source = tiny.source("a")
    source.close = pytest.fail
    AdapterFiles(source, tiny.layout.base, disk_dir=tmp_path, disk_bytes=None).close()


def test_a_closed_cache_removes_and_puts_nothing(tiny: Any) -> None:
    with tiny.cache(tiny.source("a")) as cache:
        pass
    with pytest.raises(CacheClosed):
        cache.remove("a")


def test_a_clock_that_makes_no_sense_leaves_no_lease(tiny: Any) -> None:
    now = [0.0]
    with tiny.cache(tiny.source("a"), clock=lambda: now[0]) as cache:
        tiny.load(cache, "a")
        now[0] = float("inf")
        with pytest.raises(ValueError, match="inf"):
            cache.acquire("a")
        now[0] = 1.0
        assert cache.stats().leases == 0


def test_a_folder_of_adapters_is_no_adapter_and_names_none(tmp_path: Path) -> None:
    for name in ("acme/one", "acme/two"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_config.json").write_text("{}")
    source = DirectorySource(tmp_path)
    with pytest.raises(AdapterNotFound) as caught:
        source.revision("acme")
    assert "one" not in str(caught.value)
    assert sorted(source.ids()) == ["acme/one", "acme/two"]


def test_orders_are_obeyed_once_by_however_many_threads(tiny: Any) -> None:
    from adaptercache.peers import Orders
    from adaptercache.ranks import Follower

    with tiny.cache(tiny.source()) as cache:
        follower, obeyed, refused = Follower(cache, 1), list[int](), list[int]()
        barrier = threading.Barrier(4)

        def obey(number: int) -> None:
            barrier.wait()
            try:
                follower.obey(Orders(number))
                obeyed.append(number)
            except ValueError:
                refused.append(number)

        for number in range(1, 30):
            threads = [threading.Thread(target=obey, args=(number,)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert obeyed == list(range(1, 30))
        assert len(refused) == 3 * 29


def test_what_was_set_aside_outlives_a_write_that_fails(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from adaptercache.tiers.disk import DiskTier

    tier = DiskTier(tmp_path, 10_000)
    assert tier.set_aside(1000, lambda digest: True).granted
    write = Path.write_text

    def full(path: Path, text: str) -> int:
        if "claims" in path.name:
            write(path, "")
            raise OSError(28, "No space left on device")
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        tier.set_aside(500, lambda digest: True)
    (claims,) = (tmp_path / "tmp").glob("*/claims")
    assert os.path.getsize(claims) > 0
    assert claims.read_text() == "1000"
    monkeypatch.undo()
    tier.close()


def test_two_caps_on_the_number_of_adapters_are_one_too_many(tiny: Any) -> None:
    with (
        tiny.cache(tiny.source()) as cache,
        pytest.raises(ValueError, match=r"max_adapters=16 and caps\.adapters=8"),
    ):
        cache.admit([], max_adapters=16, caps=Caps(adapters=8))


def test_a_failed_lease_raises_an_error_of_its_own_each_time(tiny: Any) -> None:
    """One that is raised again and again keeps every traceback."""
    with tiny.cache(tiny.source()) as cache:
        lease = cache.acquire("none")
        caught = []
        for _ in range(3):
            with pytest.raises(AdapterNotFound) as info:
                lease.result(5)
            caught.append(info.value)
        assert len({id(error) for error in caught}) == 3


def test_a_hot_adapter_that_has_cooled_down_has_one_home_again() -> None:
    router = AffinityRouter([f"i{n}" for n in range(8)], memory_s=10.0)
    for step in range(1000):
        router.finished(router.route("hot", step / 100))
    assert len(router.homes("hot")) > 2
    for step in range(1000, 9000):
        router.finished(router.route(f"other{step % 50}", step / 100))
        if step % 1000 == 0:
            router.finished(router.route("hot", step / 100))
    assert len(router.homes("hot")) == 1
