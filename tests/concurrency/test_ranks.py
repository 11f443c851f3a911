"""Ranks as processes over gloo, one slow and one failing a load: rank 0 decides, the others obey,
and every rank computes each request with the same adapter's bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from adaptercache import BaseModel
from adaptercache.testing import random_adapter

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 32,
    "torch_dtype": "float32",
}
IDS = [f"a{n}" for n in range(6)]

PROGRAM = """
import json, shutil, sys, time
import torch
import torch.distributed as dist
from adaptercache import AdapterCache, DirectorySource, LoraLayout, Request
from adaptercache.checkpoint import read_checkpoint
from adaptercache.kernels import add_lora
from adaptercache.ranks import Follower, Leader
from adaptercache.testing import FaultySource, check_consistent

folder, store, config, rank, size = sys.argv[1:4] + [int(text) for text in sys.argv[4:]]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
layout = LoraLayout.from_config(json.loads(config), max_rank=8, tp_rank=rank, tp_size=size)
site = next(site for site in layout.sites if site.module == "q_proj")
rows = torch.cat([torch.arange(*run) for run in site.rows])
content = {}
for name in ["a0-new", *(f"a{n}" for n in range(6))]:
    checkpoint = read_checkpoint(f"{folder}/{name}", layout.base)
    content[checkpoint.digest] = checkpoint.delta(site.path)[rows]
    fresh = checkpoint.digest if name == "a0-new" else fresh
source = FaultySource(DirectorySource(folder))
if rank == 1:
    source.delay_s = 0.03
if rank == size - 1:
    source.failing.add("bad")
generator = torch.Generator().manual_seed(1)
x = torch.randn(32, 64, generator=generator)
ids = [None, "a0", "a1", "a2", "bad", "a3", "a4", "a5"]
waiting = [Request(f"r{n}", ids[n % 8]) for n in range(48)]
late = [Request(f"late{n}", "a0") for n in range(3)]
running, served, failed, steps = [], {}, {}, 0
cache = AdapterCache(
    layout, source, gpu_bytes=4 << 20, gpu_slots=3, host_bytes=4 << 20, host_block_bytes=4096,
    device="cpu",
)
part = Leader(cache, range(1, size)) if rank == 0 else Follower(cache, rank)
if rank > 0:
    for verb, argument in ((cache.acquire, "a1"), (cache.admit, []), (cache.pages.allocate, 0)):
        try:
            verb(argument)
        except RuntimeError as error:
            assert "rank 0" in str(error)
        else:
            raise AssertionError("a follower decided")
republished = None
while True:
    steps += 1
    assert steps < 4000
    message = [None, True]
    if rank == 0:
        pairs = [(request, lease) for request, lease, _ in running]
        admission, orders = part.admit(waiting, running=pairs, max_adapters=3)
        waiting, admitted = admission.deferred, admission.admitted
        failed |= {request.request_id: str(error) for request, error in admission.failed}
        message = [orders, bool(waiting or running or admitted or late)]
        if not admitted and not running:
            time.sleep(0.002)
    dist.broadcast_object_list(message)
    orders, goes_on = message
    if rank > 0:
        admitted = part.obey(orders)
    running += [(request, lease, steps) for request, lease in admitted]
    mine = [(request.request_id, lease.slot, lease.digest) for request, lease, _ in running]
    everybody = [None] * size
    dist.all_gather_object(everybody, mine)
    assert all(theirs == mine for theirs in everybody), everybody
    with cache.lora_batch([(lease, 1) for _, lease, _ in running]) as batch:
        y = torch.zeros(len(running), site.out_features)
        if running:
            add_lora(y, x[: len(running)].contiguous(), batch, [site.module], site.layer)
    for row, (request, lease, _) in enumerate(running):
        delta = content[lease.digest] if request.adapter_id else torch.zeros_like(content[fresh])
        assert torch.allclose(y[row], x[row] @ delta.T, atol=1e-4), request
        served[request.request_id] = lease.digest
    for _, lease, since in running:
        if steps - since >= 1:
            lease.release()
    running = [run for run in running if steps - run[2] < 1]
    reports = [None] * size
    dist.gather_object(None if rank == 0 else part.report(), reports if rank == 0 else None)
    if rank == 0:
        for report in reports[1:]:
            part.hear(report)
        if len(served) == 42 and republished is None and not waiting:
            shutil.copytree(f"{folder}/a0-new", f"{folder}/a0", dirs_exist_ok=True)
            republished = cache.refresh("a0")
        if republished is not None and republished.done() and late:
            assert republished.result().adapter_id == "a0"
            waiting, late = waiting + late, []
    if not goes_on:
        break
if rank == 0:
    assert set(failed) == {f"r{n}" for n in range(4, 48, 8)}, failed
    assert all(f"rank {size - 1} can't load it" in text for text in failed.values()), failed
assert len(served) == 45, served
assert {served[f"late{n}"] for n in range(3)} == {fresh}
check_consistent(cache)
cache.close()
print("served", len(served))
dist.destroy_process_group()
"""


def save(folder: Path, seed: int) -> None:
    tensors, config = random_adapter(
        BaseModel.from_config(LLAMA), rank=4, targets=("q_proj",), dtype=torch.float32, seed=seed
    )
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("size", [2, 4])
def test_rank_0_decides_and_no_rank_fails_inside_a_step(size: int, tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    for seed, adapter_id in enumerate([*IDS, "a0-new", "bad"]):
        save(folder / adapter_id, seed)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    args = [str(folder), str(tmp_path / "store"), json.dumps(LLAMA)]
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", PROGRAM, *args, str(rank), str(size)],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in range(size)
        ]
        for process in ranks:
            stack.callback(process.kill)  # before its own end is waited for
        for process in ranks:
            output, error = process.communicate(timeout=100)
            assert process.returncode == 0, error
            assert output.splitlines()[-1] == "served 45"
