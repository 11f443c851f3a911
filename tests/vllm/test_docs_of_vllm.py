"""The ten minutes of docs/vllm.md, and the ways to start wrongly."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm_adapters import Trainer, make_kind
from vllm_server import LOGS, Vllm, clean_environment, free_port, wait_until_up

pytestmark = pytest.mark.filterwarnings("ignore")  # what vLLM's import warns of is vLLM's

PAGE = Path(__file__).parent.parent.parent / "docs/vllm.md"


def blocks() -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def test_the_ten_minutes(base: Path, trainer: Trainer, folder: Path) -> None:
    start, ask = blocks()
    make_kind(trainer, folder / "srv/adapters/acme/sql-v3", "all-r8", 31)
    port = free_port()
    for written, here in {
        "s3://prod-adapters/lora": str(folder / "srv/adapters"),
        "/var/cache/lora": str(folder / "var"),
        "/srv/base": str(base),
        "python ": f"{sys.executable} ",
        "8000": str(port),
    }.items():
        assert written in start + ask
        start, ask = start.replace(written, here), ask.replace(written, here)
    start = start.replace(f"{sys.executable} -m", f"exec {sys.executable} -m")
    LOGS.mkdir(parents=True, exist_ok=True)
    path = LOGS / "ten-minutes.log"
    environment = clean_environment({"VLLM_CPU_KVCACHE_SPACE": "1"})
    with open(path, "wb") as log:
        process = subprocess.Popen(
            ["bash", "-euc", start], stdout=log, stderr=log, env=environment, start_new_session=True
        )
    try:
        wait_until_up(Vllm(port, process, path))
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", ask], capture_output=True, text=True
        )
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert done.returncode == 0, done
    assert '"model":"acme/sql-v3"' in done.stdout
    assert "adaptercache_vllm_loaded_adapters 1.0" in done.stdout
    assert f"adapters come from {folder / 'srv/adapters'} through" in path.read_text()


LEAST = {
    "ADAPTERCACHE_SOURCE": "/srv/adapters",
    "ADAPTERCACHE_DISK_DIR": "/var/cache/lora",
    "ADAPTERCACHE_DISK_BYTES": "1GiB",
}


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"VLLM_PLUGINS": "adaptercache"} | LEAST | {"ADAPTERCACHE_DISK_BYTES": ""}, "DISK_BYTES"),
        (LEAST, "VLLM_PLUGINS=adaptercache"),
    ],
)
def test_a_wrong_environment_stops_it_at_the_start(
    environment: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from adaptercache.integrations.vllm import install

    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises((RuntimeError, ValueError), match=said):
        install()


OFFLINE = """
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM({base!r}, dtype="float32", max_model_len=256, block_size=32, enforce_eager=True)
    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    answer, = llm.generate({{"prompt_token_ids": [5, 6, 7]}}, sampling)
    print("generated", len(answer.outputs[0].token_ids))
"""


def test_offline_use_goes_on_and_hears_at_once_of_a_source_that_is_none(
    base: Path, folder: Path
) -> None:
    program = folder / "offline.py"
    program.write_text(OFFLINE.format(base=str(base)))
    environment = {"VLLM_PLUGINS": "adaptercache", "VLLM_CPU_KVCACHE_SPACE": "1"} | LEAST
    path = LOGS / "offline.log"
    LOGS.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as log:
        done = subprocess.run(
            [sys.executable, str(program)],
            stdout=log,
            stderr=log,
            env=clean_environment(environment | {"ADAPTERCACHE_SOURCE": str(folder / "nowhere")}),
            timeout=240,
        )
    said = path.read_text()
    assert done.returncode == 0, said[-4000:]
    assert "generated 3" in said
    assert said.count("no adapter can be served: ADAPTERCACHE_SOURCE: ") == 1
    assert said.index("no adapter can be served") < said.index("Loading weights")


def test_without_a_source_vllm_runs_without_us(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.lora.resolver import LoRAResolverRegistry

    from adaptercache.integrations.vllm import install

    monkeypatch.delenv("ADAPTERCACHE_SOURCE", raising=False)
    install()
    assert "adaptercache" not in LoRAResolverRegistry.get_supported_resolvers()


def fitness(**lora: Any) -> Any:
    from types import SimpleNamespace

    from transformers import LlamaConfig
    from vllm.config.lora import LoRAConfig

    from adaptercache.integrations.vllm.fitness import Fitness

    model = SimpleNamespace(hf_config=LlamaConfig(max_position_embeddings=512))
    return Fitness(LoRAConfig(max_lora_rank=16, **lora), model)


def test_modules_that_vllm_leaves_out_are_refused(
    base: Path, trainer: Trainer, folder: Path
) -> None:
    from adaptercache import AdapterUnsupported, BaseModel
    from adaptercache.checkpoint import read_checkpoint

    made = make_kind(trainer, folder / "adapters/left-out", "attention-r3", 2)
    checkpoint = read_checkpoint(made, BaseModel.from_config(base))
    fitness()(checkpoint, made)
    fitness(target_modules=["q_proj", "v_proj"])(checkpoint, made)
    fitness(target_modules=["qkv_proj"])(checkpoint, made)
    for targets in (["q_proj"], ["o_proj", "down_proj"]):
        with pytest.raises(AdapterUnsupported, match="leave out"):
            fitness(target_modules=targets)(checkpoint, made)
