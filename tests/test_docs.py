"""The code in README and docs: it parses, and what can be run is run."""

from __future__ import annotations

import asyncio
import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from safetensors.torch import save_file

from adaptercache import AdapterCache, BaseModel, Lease, Request
from adaptercache.kernels import LoraBatch, add_lora
from adaptercache.testing import random_adapter

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CONFIG = ROOT / "tests/conformance/configs/tiny-llama.tf5.24.json"


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of adapters, a config.json, and the working directory that docs speak of."""
    (tmp_path / "config.json").write_text(CONFIG.read_text())
    base = BaseModel.from_config(tmp_path)
    for index in range(6):
        folder = tmp_path / "adapters" / f"acme/sql-v{index}"
        folder.mkdir(parents=True)
        tensors, config = random_adapter(base, rank=4, seed=index)
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_python_parses(page: Path) -> None:
    for block in blocks(page):
        compile(f"async def block():\n{textwrap.indent(block, '    ')}", str(page), "exec")


class StandInModel:
    """Runs each request for two steps, and applies LoRA in one group of one layer."""

    def __init__(self) -> None:
        self.ages: dict[str, int] = {}
        self.served: set[str | None] = set()

    def step(
        self, running: list[tuple[Request, Lease]], lora: LoraBatch
    ) -> list[tuple[Request, Lease]]:
        x = torch.randn(lora.num_rows, 32, dtype=torch.bfloat16)
        y = torch.zeros(lora.num_rows, 64, dtype=torch.bfloat16)
        add_lora(y, x, lora, ("q_proj", "k_proj", "v_proj"), layer=1)
        for row, (request, _) in enumerate(running):
            assert bool(y[row].any()) == (request.adapter_id is not None)
            self.served.add(request.adapter_id)
            self.ages[request.request_id] = self.ages.get(request.request_id, 0) + 1
        if len(self.served) == 7:
            raise StopIteration
        return [pair for pair in running if self.ages[pair[0].request_id] >= 2]


def test_the_lines_of_the_readme_serve_requests(library: Path) -> None:
    loop, coroutine = blocks(ROOT / "README.md")[:2]
    loop = loop.replace("/srv/adapters", str(library / "adapters"))
    loop = loop.replace("/var/cache/lora", str(library / "cache"))
    loop = loop.replace("gpu_bytes=8 << 30", 'device="cpu", gpu_bytes=4 << 20')
    loop = loop.replace("host_bytes=64 << 30", "host_bytes=64 << 20")
    ids = [None, *(f"acme/sql-v{index}" for index in range(6))]
    model, registry, rejected = StandInModel(), CollectorRegistry(), list[Any]()
    waiting = [Request(f"r{i}", ids[i % 7]) for i in range(40)]
    waiting.append(Request("bad", "acme/nobody"))
    names: dict[str, Any] = {
        "REGISTRY": registry,
        "upcoming": waiting[:5],
        "waiting": waiting,
        "running": [],
        "reject": rejected.extend,
        "model": model,
    }
    with pytest.raises(StopIteration):
        exec(compile(loop, "README.md", "exec"), names)
    assert model.served == set(ids)
    assert [request.request_id for request, _ in rejected] == ["bad"]
    assert b"adaptercache_requests_total" in generate_latest(registry)
    for _, lease in names["running"]:
        lease.release()

    cache: AdapterCache = names["cache"]
    source = f"async def serve():\n{textwrap.indent(coroutine, '    ')}    return keys\n"
    names["token_ids"] = list(range(40))
    exec(compile(source, "README.md", "exec"), names)
    keys = asyncio.run(names["serve"]())
    assert len(keys) == 2
    cache.close()


def test_the_lines_about_testing_run(library: Path) -> None:
    (block,) = blocks(ROOT / "docs/testing-your-code.md")
    exec(compile(block, "testing-your-code.md", "exec"), {})


def test_the_lines_about_formats_run(library: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reading, settings = blocks(ROOT / "docs/formats.md")
    names: dict[str, Any] = {}
    exec(compile(reading, "formats.md", "exec"), names)
    assert len(capsys.readouterr().out.splitlines()) == len(names["checkpoint"].modules) > 0
    assert names["delta"].shape == (32, 32)
    (library / "adapters/acme/sql-v3/adapter_model.safetensors").unlink()
    exec(compile(reading, "formats.md", "exec"), names)
    assert "the adapter has no weights file" in capsys.readouterr().out
    exec(compile(settings, "formats.md", "exec"), names)
    assert names["options"].ignored_config_keys == {"use_foo"}


def save_base(folder: Path) -> None:
    """A Llama of random weights with a tokenizer of a few words."""
    transformers = pytest.importorskip("transformers", minversion="5")
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**json.loads(CONFIG.read_text()))).to(
        torch.bfloat16
    ).save_pretrained(folder)
    words = ["<pad>", "list", "the", "users", "orders", "say", "hello"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>"
    ).save_pretrained(folder)


def test_the_ten_minutes_with_transformers_run(library: Path) -> None:
    save_base(library / "base")
    (block,) = blocks(ROOT / "docs/transformers.md")
    block = block.replace("4 << 30", "4 << 20").replace("16 << 30", "16 << 20")
    names: dict[str, Any] = {}
    exec(compile(block, "transformers.md", "exec"), names)
    assert len(names["tokens"]) == 3
    base = names["model"](**names["inputs"]).logits
    assert names["logits"].shape == base.shape
    assert not torch.equal(names["logits"], base)


def test_the_lines_about_converting_run(library: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = library / "trained/sql-v3"
    source.mkdir(parents=True)
    module = "model.layers.0.self_attn.v_proj"
    tensors = {f"{module}.lora_a": torch.ones(32, 4), f"{module}.lora_b": torch.ones(4, 16)}
    save_file(tensors, source / "adapters.safetensors")
    config = {"fine_tune_type": "lora", "lora_parameters": {"rank": 4, "scale": 2.0}}
    (source / "adapter_config.json").write_text(json.dumps(config))
    (block,) = blocks(ROOT / "docs/convert.md")
    exec(compile(block, "convert.md", "exec"), {})
    assert capsys.readouterr().out == "mlx-lm\n"
    assert (library / "adapters/acme/sql-v3-mlx" / "adapter_model.safetensors").is_file()
