"""Adapters from a bucket, through the disk tier, into a vLLM that runs."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from s3_proxy import Fault, Proxy
from tiny import Tiny
from vllm_adapters import KINDS, MAX_RANK, Trainer, changed_config, make_kind
from vllm_server import Vllm

PROMPTS = [[309, 307, 300, 303, 42, 77], [12, 400, 7], [500, 3, 3, 250, 99, 100, 101, 8, 9]]
LONG = [(37 * at + 11) % 500 + 3 for at in range(70)]  # two blocks of KV, and more


def bytes_on(disk: Path) -> int:
    """Of what is published there; files that go meanwhile don't count."""
    total = 0
    for file in Tiny.files(disk / "objects"):
        try:
            total += file.stat().st_size
        except FileNotFoundError:
            continue
    return total


@contextmanager
def kept(budget: int, disk: Path) -> Iterator[None]:
    """The disk never holds more."""
    most, is_over = [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.05):
            most[0] = max(most[0], bytes_on(disk))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    assert 0 < most[0] <= budget


def is_alive(vllm: Vllm) -> bool:
    return vllm.complete("base", PROMPTS[0]).status == 200


def leases_settle(vllm: Vllm) -> bool:
    """Whether every folder that is held is one of an adapter that is loaded."""
    return Tiny.wait_until(
        lambda: (
            vllm.metric("adaptercache_leases")
            == vllm.metric("adaptercache_vllm_loaded_adapters")
            == len(vllm.models()) - 1
        ),
        timeout_s=20,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_generates_what_peft_does(
    kind: str, vllm: Vllm, bucket: Any, trainer: Trainer, folder: Path
) -> None:
    made = make_kind(trainer, folder / "adapters" / f"kind-{kind}", kind, 7)
    bucket.publish(f"kinds/{kind}", made)
    for prompt in PROMPTS:
        tokens = vllm.complete(f"kinds/{kind}", prompt).tokens
        assert tokens == trainer.truth(made, prompt)
        assert tokens != trainer.truth(None, prompt)


@pytest.mark.parametrize(
    "name", ["acme/sql v3", "日本語/アダプタ", "a+b%2Fc", "dots...in.it", "émile", "a" * 200]
)
def test_names_are_what_they_are(
    name: str, vllm: Vllm, bucket: Any, trainer: Trainer, folder: Path
) -> None:
    made = make_kind(trainer, folder / "adapters" / "named", "rank-1", 5)
    bucket.publish(name, made)
    assert vllm.complete(name, PROMPTS[0]).tokens == trainer.truth(made, PROMPTS[0])


@pytest.mark.parametrize(
    "name",
    [
        *("nobody", "..", "../lora/kinds", "kinds/../kinds/all-r8", "/etc", "a//b", "a/", "."),
        *("kinds", "nul\0nul", "x" * 3000, "%2e%2e/x", "C:\\x"),
    ],
)
def test_what_is_no_adapter_is_not_found(name: str, vllm: Vllm) -> None:
    answer = vllm.complete(name, PROMPTS[0])
    assert answer.status == 404, answer
    assert is_alive(vllm)


def test_a_name_that_cannot_be_said_hurts_nobody(vllm: Vllm) -> None:
    assert vllm.complete("\ud800", PROMPTS[0]).status in (400, 404)  # vLLM can't write its answer
    assert is_alive(vllm)


Publish = Callable[[Any, Trainer, Path], None]


def broken(change: Callable[[Path], None], **kind: Any) -> Publish:
    """Publishes ``refused`` with something wrong."""

    def publish(bucket: Any, trainer: Trainer, folder: Path) -> None:
        options = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]} | kind
        made = trainer.make(folder / "refused", 3, **options)
        change(made)
        bucket.publish("refused", made)

    return publish


def renamed(old: str, new: str) -> Callable[[Path], None]:
    def change(made: Path) -> None:
        from safetensors.torch import load_file, save_file

        file = made / "adapter_model.safetensors"
        tensors = {name.replace(old, new): tensor for name, tensor in load_file(file).items()}
        save_file(tensors, file)

    return change


def cut(made: Path) -> None:
    file = made / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def as_page(made: Path) -> None:
    (made / "adapter_config.json").write_text("<html>please sign in</html>")


def nothing(made: Path) -> None:
    pass


REFUSED: dict[str, tuple[Publish, str]] = {
    "dora": (broken(nothing, use_dora=True), "DoRA"),
    "bias": (broken(lambda made: changed_config(made, lora_bias=True)), "LoRA biases"),
    "rank": (broken(nothing, r=2 * MAX_RANK), f"--max-lora-rank {2 * MAX_RANK}"),
    "trained-head": (broken(nothing, modules_to_save=["lm_head"]), "modules_to_save"),
    "pissa": (
        broken(lambda made: changed_config(made, init_lora_weights="pissa")),
        "init_lora_weights",
    ),
    "cut": (broken(cut), "adapter_model.safetensors"),
    "page": (broken(as_page), "adapter_config.json"),
    "other-base": (broken(renamed("layers.1", "layers.7")), "layers.7"),
    "wrapped": (broken(renamed("model.model.", "model.module.model.")), "the module by"),
    "no-prefix": (broken(renamed("base_model.model.model.", "model.model.")), "the module by"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_served_is_refused_with_the_reason(
    what: str, vllm: Vllm, bucket: Any, trainer: Trainer, tmp_path: Path, folder: Path
) -> None:
    publish, reason = REFUSED[what]

    class Named:
        @staticmethod
        def publish(_: str, made: Path) -> None:
            bucket.publish(f"refused/{what}", made)

    publish(Named, trainer, tmp_path)
    answer = vllm.complete(f"refused/{what}", PROMPTS[0])
    assert answer.status == 422, answer
    assert reason in answer.body["error"]["message"]
    assert f"refused/{what}" in vllm.log.read_text()
    assert str(folder) not in json.dumps(answer.body), "our paths are nobody's business"
    assert f"refused/{what}" not in vllm.models()
    assert is_alive(vllm)


def test_one_that_was_repaired_is_served(
    vllm: Vllm, bucket: Any, trainer: Trainer, folder: Path
) -> None:
    made = make_kind(trainer, folder / "adapters" / "repaired", "rank-1", 9)
    bucket.put("repaired", adapter_config=b"{}", adapter_model=b"nothing")
    assert vllm.complete("repaired", PROMPTS[0]).status == 422
    bucket.publish("repaired", made)
    assert vllm.complete("repaired", PROMPTS[0]).tokens == trainer.truth(made, PROMPTS[0])


def test_many_adapters_through_a_small_disk(
    vllm: Vllm, bucket: Any, trainer: Trainer, many: list[str], budget: int, disk: Path
) -> None:
    draw = random.Random(4)
    asked = [(draw.choice(many), draw.choice(PROMPTS[:2])) for _ in range(500)]
    truths = [trainer.truth(bucket.folders[name], prompt) for name, prompt in asked]
    began = time.monotonic()
    with kept(budget, disk), ThreadPoolExecutor(16) as clients:
        answers = list(clients.map(lambda pair: vllm.complete(*pair), asked))
    print(f"500 requests in {time.monotonic() - began:.1f} s")
    assert {answer.status for answer in answers} == {200}
    assert [answer.tokens for answer in answers] == truths
    assert is_alive(vllm)
    assert len(vllm.models()) - 1 <= 10
    assert leases_settle(vllm)
    assert vllm.metric("adaptercache_vllm_unloaded_total", reason="room") >= 40
    assert vllm.metric("adaptercache_evictions_total", tier="disk", reason="room") >= 40
    assert vllm.metric("adaptercache_requests_total", result="miss") >= 50
    assert 0 < vllm.metric("adaptercache_resident_bytes", tier="disk") <= budget


def test_an_adapter_that_is_unloaded_while_it_runs_and_waits(
    vllm: Vllm, bucket: Any, trainer: Trainer, many: list[str], budget: int, disk: Path
) -> None:
    name, length = many[3], 100
    truth = trainer.truth(bucket.folders[name], PROMPTS[0], length)
    with kept(budget, disk), ThreadPoolExecutor(40) as clients:
        # More than can run at once: some wait in the engine when the name goes, and again.
        slow = [clients.submit(vllm.complete, name, PROMPTS[0], length) for _ in range(16)]
        assert Tiny.wait_until(lambda: name in vllm.models(), timeout_s=60)
        others = []
        for round_ in range(3):
            body = {"lora_name": name}
            assert vllm.call("/v1/unload_lora_adapter", body).status in (200, 404)
            others += [
                clients.submit(vllm.complete, other, PROMPTS[1])
                for other in many[10 * round_ + 10 : 10 * round_ + 18]
            ]
            slow.append(clients.submit(vllm.complete, name, PROMPTS[0], length))
        assert {answer.result().status for answer in others} == {200}
        assert all(answer.result().tokens == truth for answer in slow)
    assert is_alive(vllm)
    assert leases_settle(vllm)


def test_clients_who_hang_up_leave_nothing(
    vllm: Vllm, many: list[str], budget: int, disk: Path
) -> None:
    draw = random.Random(5)
    asked = [(draw.choice(many), draw.uniform(0, 0.3)) for _ in range(120)]
    with kept(budget, disk), ThreadPoolExecutor(12) as clients:
        list(clients.map(lambda pair: vllm.hang_up(pair[0], PROMPTS[0], 100, pair[1]), asked))
        answers = list(clients.map(lambda name: vllm.complete(name, PROMPTS[1]), many[:12]))
    assert {answer.status for answer in answers} == {200}
    assert is_alive(vllm)
    assert leases_settle(vllm)


def test_a_republished_adapter_never_meets_the_old_ones_kv(
    vllm: Vllm, bucket: Any, trainer: Trainer, folder: Path
) -> None:
    old = make_kind(trainer, folder / "adapters" / "news-old", "all-r8", 21)
    new = make_kind(trainer, folder / "adapters" / "news-new", "all-r8", 22)
    truths = [trainer.truth(made, LONG) for made in (old, new)]
    assert truths[0] != truths[1]
    bucket.publish("news", old)
    assert [vllm.complete("news", LONG).tokens for _ in range(2)] == [truths[0]] * 2
    assert vllm.complete("news", LONG).cached >= 64, "the prefix cache works"
    path = root_of(vllm, "news")

    bucket.publish("news", new)
    time.sleep(0.6)  # the time to live of what the source said
    answers: list[Any] = []

    def is_new() -> bool:
        answers.append(vllm.complete("news", LONG))
        assert answers[-1].tokens in truths
        return answers[-1].tokens == truths[1]

    assert Tiny.wait_until(is_new, timeout_s=20)
    assert answers[-1].cached == 0, "nothing of the old one's"
    assert root_of(vllm, "news") != path
    again = vllm.complete("news", LONG)
    assert (again.tokens, again.cached >= 64) == (truths[1], True)
    assert vllm.metric("adaptercache_vllm_unloaded_total", reason="republished") >= 1

    bucket.publish("news", old)  # the same content as at first has its own KV back
    time.sleep(0.6)
    assert Tiny.wait_until(lambda: vllm.complete("news", LONG).tokens == truths[0], timeout_s=20)
    assert root_of(vllm, "news") == path
    assert leases_settle(vllm)


def test_a_bad_publication_leaves_the_old_one_serving(
    vllm: Vllm, bucket: Any, trainer: Trainer, folder: Path
) -> None:
    made = make_kind(trainer, folder / "adapters" / "steady", "all-r8", 23)
    bucket.publish("steady", made)
    truth = trainer.truth(made, PROMPTS[0])
    assert vllm.complete("steady", PROMPTS[0]).tokens == truth
    bucket.put("steady", adapter_model=b"half of it")
    time.sleep(0.6)
    for _ in range(3):
        assert vllm.complete("steady", PROMPTS[0]).tokens == truth
        time.sleep(0.3)
    assert "goes on serving: adapter 'steady'" in vllm.log.read_text()


def test_one_that_was_unloaded_meanwhile_is_not_said_to_go_on_serving(
    vllm: Vllm, bucket: Any, trainer: Trainer, folder: Path, proxy: Proxy
) -> None:
    bucket.publish("gone", make_kind(trainer, folder / "adapters" / "steady", "all-r8", 23))
    assert vllm.complete("gone", PROMPTS[0]).status == 200
    bucket.put("gone", adapter_model=b"half of it")
    time.sleep(0.6)
    unload = lambda: vllm.call("/v1/unload_lora_adapter", {"lora_name": "gone"})  # noqa: E731
    proxy.inject(Fault("call", where="gone/adapter_model", act=unload))
    assert vllm.complete("gone", PROMPTS[0]).status == 200
    assert Tiny.wait_until(lambda: "'gone' is not loaded any more" in vllm.log.read_text())
    assert "gone" not in vllm.models()
    assert "goes on serving: adapter 'gone'" not in vllm.log.read_text()


def root_of(vllm: Vllm, name: str) -> str:
    """The folder that vLLM reads an adapter from."""
    roots = [model["root"] for model in vllm.call("/v1/models").body["data"] if model["id"] == name]
    return str(roots[0])


def test_while_the_store_is_down_what_is_here_goes_on(
    vllm: Vllm, bucket: Any, trainer: Trainer, many: list[str], proxy: Proxy
) -> None:
    def is_right(name: str) -> bool:
        truth = trainer.truth(bucket.folders[name], PROMPTS[1])
        return vllm.complete(name, PROMPTS[1]).tokens == truth

    here, absent = many[:4], many[20:22]
    # So many others that what is absent really is, and then those that stay.
    assert all(map(is_right, [*many[25:36], *here]))
    loaded = vllm.models()
    assert not loaded & set(absent)
    assert loaded >= set(here)
    vllm.call("/v1/unload_lora_adapter", {"lora_name": here[0]})  # on the disk, and not in vLLM
    down = [
        Fault("error", method=method, where="", times=1 << 30, status=503, code="SlowDown")
        for method in ("GET", "HEAD")
    ]
    proxy.inject(*down)
    try:
        assert all(map(is_right, here))
        for name in absent:
            answer = vllm.complete(name, PROMPTS[1])
            assert answer.status == 503, answer
            assert "s3" not in answer.body["error"]["message"].lower()
        assert all(map(is_right, here))
        assert vllm.complete("nobody-else", PROMPTS[1]).status == 503
    finally:
        for fault in down:
            fault.times = 0
    time.sleep(2.1)
    assert all(map(is_right, absent))
    assert is_alive(vllm)
