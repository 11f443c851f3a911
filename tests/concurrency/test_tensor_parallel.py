"""Ranks as processes, over gloo: what they compute together is what one computes alone."""

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
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,  # fewer than four ranks
    "head_dim": 8,
    "vocab_size": 32,
    "torch_dtype": "float32",
}
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

PROGRAM = """
import json, sys
import torch
import torch.distributed as dist
from adaptercache import AdapterCache, LoraLayout
from adaptercache.checkpoint import read_checkpoint
from adaptercache.kernels import add_lora

folder, store, config, rank, size = sys.argv[1:4] + [int(text) for text in sys.argv[4:]]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
layout = LoraLayout.from_config(json.loads(config), max_rank=8, tp_rank=rank, tp_size=size)
base = layout.base
generator = torch.Generator().manual_seed(1)
x = {n: torch.randn(5, n, generator=generator) for n in (64, 96)}
with AdapterCache(layout, folder, gpu_bytes=4 << 20, host_bytes=4 << 20, device="cpu") as cache:
    lease = cache.acquire("a").result(60)
    digests = [None] * size
    dist.all_gather_object(digests, lease.digest.hex())
    assert len(set(digests)) == 1, digests
    checkpoint = read_checkpoint(f"{folder}/a", base)
    with cache.lora_batch([(lease, 5)]) as batch:
        for site in layout.sites:
            whole = base.modules[site.path].shape
            mine = x[whole[1]][:, slice(*(site.columns or (0, whole[1])))].contiguous()
            y = torch.zeros(5, site.out_features)
            add_lora(y, mine, batch, [site.module], site.layer)
            if site.columns:  # the engine's all-reduce
                dist.all_reduce(y)
                got = y
            else:  # every rank's rows, put where they belong
                parts = [None] * size
                dist.all_gather_object(parts, (site.rows, y))
                got = torch.zeros(5, whole[0])
                for rows, part in parts:
                    at = torch.cat([torch.arange(*run) for run in rows])
                    got[:, at] = part
            want = x[whole[1]] @ checkpoint.delta(site.path).t()
            error = (got - want).abs().max() / want.abs().max()
            assert error <= 1e-5, (site.path, float(error))
print("equal to the whole")
dist.destroy_process_group()
"""


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_together_equal_one_alone(size: int, tmp_path: Path) -> None:
    tensors, config = random_adapter(
        BaseModel.from_config(LLAMA), rank=4, targets=MODULES, dtype=torch.float32
    )
    folder = tmp_path / "adapters"
    (folder / "a").mkdir(parents=True)
    save_file(tensors, folder / "a" / "adapter_model.safetensors")
    (folder / "a" / "adapter_config.json").write_text(json.dumps(config))
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
            assert output.splitlines()[-1] == "equal to the whole"
