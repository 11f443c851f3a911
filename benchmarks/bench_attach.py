"""Decode with an adapter a row: `attach` and the example engine beside PEFT's own mixed batches.

The same random model generates for the same prompts by itself, with the adapters of a cache
attached, in the engine of `examples/serve.py` (on a GPU by CUDA graphs), and wrapped by PEFT with
``adapter_names``. On a GPU it has the shapes of Llama-3-8B in bfloat16; on a CPU it is a small one
in float32, on one core. Rates are of decode alone, from the end of the prefill on.

A rate is printed only once `attach`, engine and PEFT gave the same logits.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import record
from adaptercache import AdapterCache, LoraLayout
from adaptercache.integrations.transformers import attach
from attach_engine import Adapters, in_engine, nbytes_of
from serving_world import say

LLAMA_3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 896,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
}
MOST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 0.25}
"""RMS of a row's difference of logits, over the RMS of PEFT's. With random weights, bfloat16 makes
0.05 in 8 layers and 0.1 in 32, in PEFT's own against float32 as well; another adapter makes 1.4."""

Generate = Callable[..., Any]


def options() -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--layers", type=int, default=32 if on_gpu else 2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=128 if on_gpu else 32, help="tokens")
    parser.add_argument("--tokens", type=int, default=32 if on_gpu else 9, help="new ones")
    parser.add_argument("--rounds", type=int, default=5)
    # PEFT takes half a second a step of 32 layers on a GPU.
    parser.add_argument("--peft-tokens", type=int, default=6 if on_gpu else 9)
    parser.add_argument("--peft-rounds", type=int, default=2 if on_gpu else 5)
    return parser.parse_args()


def new_model(wanted: argparse.Namespace, dtype: torch.dtype) -> Any:
    import transformers

    shapes = LLAMA_3_8B if wanted.device == "cuda" else SMALL
    config = transformers.LlamaConfig(**shapes, num_hidden_layers=wanted.layers)
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(wanted.device):
            model = transformers.AutoModelForCausalLM.from_config(config)
    finally:
        torch.set_default_dtype(default)
    return model.to(dtype).requires_grad_(False).eval()


def filled_cache(
    layout: LoraLayout, adapters: Adapters, wanted: argparse.Namespace
) -> AdapterCache:
    """A cache with room for them all, and all of them on the GPU."""
    nbytes = nbytes_of(layout, wanted)
    cache = AdapterCache(
        layout,
        adapters,
        gpu_bytes=nbytes,
        gpu_slots=wanted.adapters,
        host_bytes=nbytes,
        device=wanted.device,
    )
    leases = [cache.acquire(name) for name in adapters.all]
    for lease in leases:
        lease.result().release()
    return cache


def wrapped_by_peft(model: Any, adapters: Mapping[str, Any]) -> Any:
    """The model with the same adapters; it is changed by that."""
    import peft

    wrapped: Any = None
    for name, (tensors, options) in adapters.items():
        fields = ("r", "lora_alpha", "target_modules", "task_type")
        config = peft.LoraConfig(**{field: options[field] for field in fields})
        with torch.device(model.device):
            if wrapped is None:
                wrapped = peft.PeftModel(model, config, name, autocast_adapter_dtype=False)
            else:
                wrapped.add_adapter(name, config)
        with torch.no_grad():
            loaded = peft.set_peft_model_state_dict(wrapped, dict(tensors), adapter_name=name)
        assert not loaded.unexpected_keys, loaded.unexpected_keys
    dtype = model.dtype
    for parameter_name, parameter in wrapped.named_parameters():
        if "lora_" in parameter_name:
            parameter.data = parameter.data.to(dtype)
    return wrapped.requires_grad_(False).eval()


def decode_rates(
    generate: Generate, wanted: argparse.Namespace, tokens: int, rounds: int
) -> list[float]:
    """Tokens a second, of each round."""

    def now() -> float:
        if wanted.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    rates = []
    for _ in range(rounds + 1):
        prefilled: list[float] = []

        def look(ids: Tensor, logits: Tensor, at: list[float] = prefilled) -> Tensor:
            if not at:
                at.append(now())
            return logits

        generate(logits_processor=[look], min_new_tokens=tokens, max_new_tokens=tokens)
        rates.append(wanted.batch * (tokens - 1) / (now() - prefilled[0]))
    return rates[1:]  # the first compiles kernels and fills caches


def figures(rates: Sequence[float]) -> dict[str, object]:
    return {
        "decode_tokens_per_s": round(statistics.median(rates), 1),
        "lowest": round(min(rates), 1),
        "highest": round(max(rates), 1),
    }


def relative_error(got: Tensor, want: Tensor) -> float:
    """Of the row that is worst."""
    difference = (got.float() - want.float()).pow(2).mean((1, 2))
    return float((difference / want.float().pow(2).mean((1, 2))).sqrt().max())


def measure(wanted: argparse.Namespace) -> dict[str, dict[str, Any]]:
    dtype = torch.bfloat16 if wanted.device == "cuda" else torch.float32
    compiling = None
    if wanted.device == "cuda":
        from kernel_compile import compile_ahead  # triton: only where it is used

        lengths = (1, 8, wanted.prompt)  # attach's arena has one row, the engine's one a layer
        rows = {1, 17, 512, 1024, *(wanted.batch * length for length in lengths)}
        compiling = compile_ahead(sorted(rows), (1, wanted.layers))
    model = new_model(wanted, dtype)
    layout = LoraLayout.from_model(model)
    say("the model is made")
    adapters = Adapters(layout, wanted)
    say("the adapters are made")
    if compiling is not None:
        compiling.join()
        say("kernels are compiled")
    of_rows = [f"adapter-{row % wanted.adapters}" for row in range(wanted.batch)]
    vocabulary = model.config.vocab_size
    ids = torch.randint(3, vocabulary, (wanted.batch, wanted.prompt), device=wanted.device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    greedy = {"do_sample": False, "pad_token_id": 0}

    def with_arguments(its: Any, **more: Any) -> Generate:
        return lambda **hooks: its.generate(**inputs, **greedy, **more, **hooks)

    rates: dict[str, list[float]] = {}
    logits: dict[str, Tensor] = {}
    often = (wanted.tokens, wanted.rounds)
    with torch.no_grad():
        rates["base model"] = decode_rates(with_arguments(model), wanted, *often)
        say("the base model has run")
        with filled_cache(layout, adapters, wanted) as cache, attach(model, cache):
            logits["attach"] = model(ids[:, :8], adapters=of_rows).logits
            rates["attach"] = decode_rates(with_arguments(model, adapters=of_rows), wanted, *often)
        say("attach has run")
        rates["engine"], logits["engine"] = in_engine(model, adapters, of_rows, ids, wanted)
        say("the engine has run")
        wrapped = wrapped_by_peft(model, adapters.all)
        say("PEFT has wrapped the model")
        expected = wrapped(ids[:, :8], adapter_names=of_rows).logits
        errors = {
            name: relative_error(got, expected[:, -got.shape[1] :])  # the engine's: of the last
            for name, got in logits.items()
        }
        for name, error in errors.items():
            if not error <= MOST_ERROR[dtype]:
                sys.exit(f"{name} and PEFT differ by {error:.2e} of the logits: no figures")
        rare = (wanted.peft_tokens, wanted.peft_rounds)
        names = {"adapter_names": of_rows}
        rates["peft"] = decode_rates(with_arguments(wrapped, **names), wanted, *rare)
        say("PEFT has run")
    cases: dict[str, dict[str, Any]] = {name: figures(each) for name, each in rates.items()}
    for name, error in errors.items():
        times = statistics.median(rates[name]) / statistics.median(rates["peft"])
        cases[name] |= {"times_peft": round(times, 2), "error": error}
    shape = {name: getattr(model.config, name) for name in SMALL}
    cases["model"] = {**shape, "dtype": layout.dtype, **vars(wanted)}
    cases["versions"] = {name: version(name) for name in ("transformers", "peft")}
    return cases


def main() -> None:
    wanted = options()
    try:
        import peft  # noqa: F401
        import transformers

        transformers.logging.set_verbosity_error()
    except ImportError as error:
        print(f"bench_attach needs transformers and peft: {error}; nothing was measured")
        return
    warnings.simplefilter("ignore")
    if wanted.device == "cpu":
        torch.set_num_threads(1)  # for products this small, more only add noise
    cases = measure(wanted)
    print(
        f"{wanted.layers} layers of {cases['model']['hidden_size']}, batch {wanted.batch} with "
        f"{wanted.adapters} adapters of rank {wanted.rank}, {wanted.device}"
    )
    for name in ("base model", "attach", "engine", "peft"):
        case = cases[name]
        print(
            f"{name:>12}: {case['decode_tokens_per_s']:>10} tokens/s "
            f"({case['lowest']} to {case['highest']})"
        )
    for name in ("attach", "engine"):
        print(f"{name} is {cases[name]['times_peft']} times as fast as PEFT's adapter_names")
    path = record.write("attach", cases, on_gpu=wanted.device == "cuda")
    print(f"written to {path.relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()
