"""A small continuous-batching engine around adaptercache: the embedding, to be copied from.

    python examples/serve.py                              # a tiny model, made-up adapters
    python examples/serve.py --model DIR --adapters DIR   # yours: Hugging Face's, and PEFT's

    curl localhost:8000/v1/completions -d '{"model": "adapter-03", "prompt": "Once"}'

Adapters are named by ``model``; ``base`` is the model without one. To be read in this order, as
docs/embedding.md does:

    serve.py         `build`: layout, cache, model, engine
    serve_engine.py  a step: admit, schedule, launch; then what the step before has chosen
    serve_kv.py      KV blocks out of the arena that adapters share; the prefix cache
    serve_model.py   paged KV, and `add_lora`, in a layer; serve_attention.py, and on a GPU
                     serve_paged.py and serve_fused.py, are parts of it
    serve_runner.py  a step's launch; CUDA graphs; serve_shape.py and serve_rows.py: its tensors
    serve_metrics.py what Prometheus and gateways read
    serve_http.py    statuses, streams, and clients that go away

What it leaves out, to be read in an hour: several GPUs, speculative decoding, chat templates, and
all of OpenAI's parameters but those in serve_request.py.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from adaptercache import (
    AdapterCache,
    AdapterCacheError,
    BaseModel,
    DirectorySource,
    LoraLayout,
    Source,
)
from serve_engine import Engine
from serve_http import Server, Service
from serve_job import Settings
from serve_metrics import registry_of
from serve_model import PagedLlama, kv_layout
from serve_runner import Runner
from serve_tiny import ByteTokenizer, make_adapters, tiny_model

GROUPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))


@contextmanager
def build(
    model: Any,
    source: Source,
    settings: Settings,
    *,
    gpu_bytes: int,
    host_bytes: int,
    gpu_slots: int = 128,
    max_rank: int = 64,
    **options: Any,
) -> Iterator[Engine]:
    """An engine that runs while the block does. ``options`` are the cache's."""
    # 1. What adapters may touch, and how the KV cache is cut: both from the model.
    dtype = str(model.dtype).removeprefix("torch.")
    layout = LoraLayout.from_model(model, max_rank=max_rank)
    kv = kv_layout(model.config, dtype)
    # Adapters never take so many pages that no context fits beside them.
    kv = replace(kv, floor_pages=-(-settings.max_context // kv.block_size))

    # 2. The cache. Its arena is all the GPU memory that adapters and KV will have.
    engine: Engine

    def republished(*revision: Any) -> None:  # the cache is there before the engine
        engine.republished(*revision)

    with AdapterCache(
        layout,
        source,
        gpu_bytes=gpu_bytes,
        host_bytes=host_bytes,
        gpu_slots=gpu_slots,
        kv=kv,
        device=model.device,
        on_revision=republished,
        **options,
    ) as cache:
        # 3. Compile the kernels for every batch that can come. No step does it then.
        cache.warmup(GROUPS, num_rows=settings.max_step_tokens)

        # 4. The model over the arena's KV views, and the engine. From here on the engine's thread
        # has model and KV to itself.
        with torch.inference_mode():
            llama = PagedLlama(model, cache, settings.max_context)
            runner = Runner(llama, cache, settings)
            runner.capture()
        engine = Engine(cache, runner, settings)
        engine.start()
        try:
            yield engine
        finally:
            engine.close()  # before the cache: leases and KV pages are given back


def service_of(engine: Engine, source: Source, tokenizer: Any, base_name: str) -> Service:
    registry = registry_of(engine, base_name)
    return Service(engine, source, tokenizer, base_name, registry)


@contextmanager
def serving(service: Service, host: str, port: int) -> Iterator[Server]:
    """Serve while the block runs; port 0 takes a free one."""
    server = Server((host, port), service)
    thread = threading.Thread(target=server.serve_forever, name="serve-http")
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        service.engine.close()  # whoever still waits is told
        server.server_close()


def open_model(folder: Path | None, device: torch.device) -> tuple[Any, Any]:
    """The model and its tokenizer."""
    if folder is None:
        return tiny_model().to(device), ByteTokenizer()
    from transformers import AutoModelForCausalLM, AutoTokenizer, __version__

    options = {"torch_dtype" if __version__.startswith("4.") else "dtype": "auto"}
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **options)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True)


def end_tokens(model: Any) -> frozenset[int]:
    found = model.generation_config.eos_token_id
    return frozenset([found] if isinstance(found, int) else found or ())


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    text, _, _ = (__doc__ or "").partition("\n\nAdapters are")
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, help="directory of a Llama-family model (default: a tiny one)")
    add("--adapters", type=Path, help="directory with a folder an adapter (default: made up)")
    add("--count", type=int, default=32, help="adapters to make up")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000, help="0 takes a free one")
    add("--name", default="base", help="what the model without adapter is called")
    add("--device", help="default: cuda where there is one")
    add(
        "--gpu-mib",
        type=int,
        help="of the arena (default: 8 for the tiny model, else 8192)",
    )
    add("--host-mib", type=int, help="of CPU memory for adapters (default: 64, or 16384)")
    add("--gpu-slots", type=int, default=128, help="adapters on the GPU at most")
    add("--max-rank", type=int, default=64)
    add("--max-adapters", type=int, default=8, help="in one step")
    add("--max-running", type=int, default=64, help="requests in one step")
    add("--max-context", type=int, default=512, help="tokens of a prompt and its completion")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    is_tiny = args.model is None
    with ExitStack() as stack:
        try:
            model, tokenizer = open_model(args.model, device)
            root = args.adapters
            if root is None:
                root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="serve-")))
                make_adapters(root, BaseModel.from_model(model), args.count)
            source = DirectorySource(root)
            settings = Settings(
                max_step_tokens=max(512, args.max_running),
                max_adapters=args.max_adapters,
                max_running=args.max_running,
                max_context=args.max_context,
                end_tokens=end_tokens(model),
            )
            engine = stack.enter_context(
                build(
                    model,
                    source,
                    settings,
                    gpu_bytes=(args.gpu_mib or (8 if is_tiny else 8192)) << 20,
                    host_bytes=(args.host_mib or (64 if is_tiny else 16384)) << 20,
                    gpu_slots=args.gpu_slots,
                    max_rank=args.max_rank,
                )
            )
            service = service_of(engine, source, tokenizer, args.name)
            server = stack.enter_context(serving(service, args.host, args.port))
        except (AdapterCacheError, OSError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        host, port = server.server_address[:2]
        print(f"serving on http://{host!s}:{port}, {device}", flush=True)
        wait_for_signal()
    return 0


def wait_for_signal() -> None:
    """Until the process is told to end."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    stop.wait()


if __name__ == "__main__":
    sys.exit(main())
