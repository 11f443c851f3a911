"""What `docs/results.md` says of each benchmark: tables and pictures of its committed figures."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from charts import bars, number

__all__ = ["page"]

Cases = Mapping[str, Mapping[str, Any]]
Table = tuple[Sequence[str], Sequence[Sequence[object]]]
"""The heads of columns, and rows."""
Groups = Mapping[str, Mapping[str, float]]

HEAD = """\
# Results

All figures that are committed, by `make results` from the JSON in `benchmarks/results/`: a test
holds this page to them. Each is of the commit that wrote its JSON, and may be older than the code.
What a benchmark measures, and how, is in the docstring of its file. Targets stand beside what they
are for; what misses them is in the tables like all else.
"""


@dataclass(frozen=True)
class Section:
    """One benchmark's part of the page.

    Args:
        bench: the name of its JSON.
        says: what it is, in a sentence or two.
        table: of its cases.
        picture: title, unit and bars, where there is one.
    """

    bench: str
    title: str
    says: str
    table: Callable[[Cases], Table]
    picture: Callable[[Cases], tuple[str, str, Groups]] | None = None


def columns(wanted: Mapping[str, str], part: str = "") -> Callable[[Cases], Table]:
    """A row a case whose name has ``part`` in it; of each the values under these names."""

    def table(cases: Cases) -> Table:
        rows = [
            [name, *(case.get(key, "") for key in wanted)]
            for name, case in cases.items()
            if part in name and not case.keys().isdisjoint(wanted)
        ]
        used = [n for n in range(1 + len(wanted)) if any(row[n] != "" for row in rows)]
        heads = ["case", *wanted.values()]
        return [heads[n] for n in used], [[row[n] for n in used] for row in rows]

    return table


def bars_of(
    title: str, unit: str, wanted: Mapping[str, str], part: str = ""
) -> Callable[[Cases], tuple[str, str, Groups]]:
    def picture(cases: Cases) -> tuple[str, str, Groups]:
        groups = {
            name: {label: float(case[key]) for key, label in wanted.items() if key in case}
            for name, case in cases.items()
            if part in name
        }
        return title, unit, {name: values for name, values in groups.items() if values}

    return picture


def kernels(cases: Cases) -> Table:
    """By phase, shape and rank: all cases together."""
    by_kind: dict[str, list[Mapping[str, Any]]] = {}
    for name, case in cases.items():
        if "target_us" in case:
            phase, shape, rank, *_ = name.split("/")
            for kind in (f"{phase}, all", f"{phase}, {shape}, {rank}"):
                by_kind.setdefault(kind, []).append(case)
    rows: list[Sequence[object]] = []
    for kind, its in sorted(by_kind.items(), key=lambda item: (", all" not in item[0], item[0])):
        over = [case["us"] / case["target_us"] for case in its]
        peers = [case["best_peer_us"] / case["us"] for case in its if case.get("best_peer_us")]
        mean_of_peers = statistics.geometric_mean(peers) if peers else ""
        held = sum(ratio <= 1 for ratio in over)
        least = min(peers) if peers else ""
        mean_over = statistics.geometric_mean(over)
        rows.append([kind, len(its), held, mean_over, mean_of_peers, least])
    heads = ("cases", "number", "within the target", "time ÷ target", "best peer ÷ ours")
    return [*heads, "the least of these"], rows


def kernel_bars(cases: Cases) -> tuple[str, str, Groups]:
    groups = {}
    for shape in ("qkv", "o_proj", "gate_up", "down"):
        for rank in ("r16", "r64"):
            name = f"decode/{shape}/{rank}/t64/distinct"
            if name in cases:
                keys = {"us": "ours", "best_peer_us": "best peer", "target_us": "target"}
                keys["floor_us"] = "byte floor"
                case = cases[name]
                groups[f"{shape}, {rank.replace('r', 'rank ')}"] = {
                    label: float(case[key]) for key, label in keys.items() if case.get(key)
                }
    return "Decode, 64 tokens of 64 adapters, Llama-3-8B", "µs", groups


def footprint(cases: Cases) -> Table:
    its = {name: case for name, case in cases.items() if name.startswith("8 GiB")}
    return columns(
        {
            "ours_beside_kv": "ours, beside KV",
            "ours_alone": "ours, alone",
            "slots_of_this_mix_s_maximum_rank": "slots of the mix's maximum rank",
            "slots_of_rank_64": "slots of rank 64",
        }
    )(its)


def workload(cases: Cases) -> Table:
    return columns(
        {
            "requests_per_s": "requests/s",
            "offered_per_s": "offered/s",
            "of_fewest": "÷ with the fewest adapters",
            "full_tokens_per_s": "tokens/s while full",
            "adapters_per_step": "adapters a step",
            "ttft_p50_ms": "first token p50, ms",
            "ttft_p99_ms": "p99, ms",
            "found_in": "found in",
            "of_predicted_from_fewest": "÷ by bytes from the fewest",
            "of_predicted": "÷ by bytes and bandwidth",
            "of_predicted_with_kv": "the same with KV's",
            "of_predicted_in_decode_steps": "of those, steps without prompts",
            "decode_step_ms": "step without prompts, ms",
            "prompt_step_ms": "with, ms",
        }
    )(cases)


SPREAD = {"us": "µs", "p25": "p25", "p75": "p75"}
SECTIONS = (
    Section(
        "kernels",
        "Kernels",
        "`add_lora` against its targets, which follow from the bytes it must read, and against the "
        "faster of vLLM's and SGLang's kernels. [More](kernels.md).",
        kernels,
        kernel_bars,
    ),
    Section(
        "beside",
        "LoRA beside the base product",
        "µs of a layer's four groups of modules in decode, by rank, tokens and distinct adapters: "
        "the base product alone, LoRA behind it as in the library, and the shrink on a second "
        "stream in several ways; last what would be left if the shrink took no time. "
        "[More](kernels.md).",
        columns(
            {"base_us": "base", "after_us": "LoRA behind it", "beside_us": "shrink beside it"}
            | {"first_us": "beside, urgent", "narrow_us": "beside, few programs"}
            | {"early_us": "beside, early expand", "free_us": "without the shrink"},
            "all four",
        ),
    ),
    Section(
        "attach",
        "Mixed adapters in transformers",
        "Decode with an adapter for each request: PEFT's own `adapter_names`, `attach`, and the "
        "example engine, of one random model. [More](transformers.md).",
        columns(
            {"decode_tokens_per_s": "tokens/s", "lowest": "lowest", "highest": "highest"}
            | {"times_peft": "× PEFT", "error": "error of the logits"}
        ),
        bars_of("Decode", "tokens/s", {"decode_tokens_per_s": "tokens a second"}),
    ),
    Section(
        "serving_decode",
        "Decode steps of the example engine",
        "A whole step of 64 requests by the number of distinct adapters in it; the host's part of "
        "it; and what is added to a step without adapters, beside what the kernels' targets allow.",
        columns(
            {**SPREAD, "host_us": "host's", "added_us": "added"}
            | {"kernel_limit_us": "kernels' targets", "lora_kernels_a_step": "LoRA kernels"}
        ),
        bars_of("A step of 64 requests", "µs", {"us": "step", "host_us": "host's part"}),
    ),
    Section(
        "serving_workload",
        "S-LoRA's workload on the example engine",
        "All adapters in CPU memory; a small skew makes few of them popular. Saturated: all "
        "requests at once. Offered: 70 % of what the fewest adapters saturate at.",
        workload,
        bars_of(
            "Requests served, at 70 % of saturation",
            "a second",
            {"requests_per_s": "served", "offered_per_s": "offered"},
            "offered",
        ),
    ),
    Section(
        "load_copies",
        "Copies from CPU memory to the GPU",
        "Into scattered pages, beside a plain copy of as many bytes. [More](memory.md).",
        columns({**SPREAD, "GBps": "GB/s", "reference_GBps": "plain copy", "share": "share"}),
        bars_of("Copies", "GB/s", {"GBps": "ours", "reference_GBps": "plain copy"}),
    ),
    Section(
        "load_flow",
        "From the disk to the GPU",
        "From asking for an adapter that only the disk has, in the page cache, until it is ready: "
        "what has been read is copied while the rest is read. Beside it each hop by itself, and "
        "their sum; were they to overlap wholly, it would take as long as the longer one. Of a "
        "file that is read for the first time the checksum is verified. [More](memory.md).",
        columns(
            {"flow_ms": "overlapping, ms", "flow_p90_ms": "p90"}
            | {"host_ms": "to CPU memory alone", "host_p90_ms": "p90"}
            | {"copy_ms": "copy alone", "copy_p90_ms": "p90"}
            | {"sum_ms": "one after the other", "sum_p90_ms": "p90"}
            | {"of_larger": "÷ the longer hop", "of_sum": "÷ one after the other"}
        ),
        bars_of(
            "From the disk to the GPU",
            "ms",
            {"flow_ms": "overlapping", "sum_ms": "one after the other"}
            | {"host_ms": "to CPU memory alone", "copy_ms": "copy alone"},
        ),
    ),
    Section(
        "load_decode",
        "Decode beside loads",
        "A decode-shaped step alone, and while adapters are loaded at full rate.",
        columns({"alone_us": "alone, µs", "us": "beside loads", "slower": "slower by"}),
    ),
    Section(
        "load_first",
        "The first step of an adapter",
        "From admission to the end of the step.",
        columns(
            {
                **SPREAD,
                "over_a_hit_us": "over a hit",
                "launched_us": "launched after",
                "over_a_hit_behind_a_step_us": "over a hit, behind a step that runs",
            }
        ),
    ),
    Section(
        "load_growth",
        "Page-locking CPU memory",
        "While launches go on beside it.",
        columns(
            {"seconds_a_GiB": "seconds a GiB", "alone_p99_us": "launch p99 alone, µs"}
            | {"beside_p99_us": "beside", "beside_longest_us": "longest"}
        ),
    ),
    Section(
        "load_footprint",
        "Adapters in 8 GiB",
        "How many fit, beside slots of a fixed rank.",
        footprint,
    ),
    Section(
        "host_path",
        "Python on the hot path",
        "With as many known ids as the name says.",
        columns({**SPREAD, "limit_us": "bound"}),
    ),
    Section(
        "storage",
        "Object store, disk and CPU memory",
        "Beside the best of plain ways to do the same. [More](storage.md).",
        columns(
            {"us": "µs", "GBps": "GB/s", "reference_GBps": "reference", "ratio": "ratio"}
            | {"target": "target"}
        ),
    ),
    Section(
        "unified",
        "One arena for KV and adapters",
        "Requests served in a minute of simulated time, beside fixed splits of the same bytes "
        "([picture](unified.svg)).",
        columns(
            {"served": "served", "loads": "loads", "loaded_GB": "loaded, GB"}
            | {"of_best_split": "÷ best split", "over_worst_split": "÷ worst"}
        ),
    ),
    Section(
        "routing",
        "Routing over a simulated fleet",
        "100,000 adapters, Zipf 1.0. [More](routing.md).",
        columns(
            {"loads_per_request": "loads a request", "copies_per_request": "copies a request"}
            | {"copies_bound": "copies at the least", "p99_queue": "p99 queue"}
            | {"largest_load_over_mean": "largest load ÷ mean"}
            | {"loads_over_least_loaded": "loads ÷ least-loaded's"}
            | {"copies_over_least_loaded": "copies ÷ least-loaded's"}
            | {"copies_bound_over_least_loaded": "of which at the least"}
        ),
        bars_of(
            "Loads and copies",
            "a request",
            {"loads_per_request": "loads", "copies_per_request": "copies"},
        ),
    ),
    Section(
        "counters",
        "What the kernels' hardware counters say",
        "By Nsight Compute, each kernel alone, from cold caches. Cycles are an instruction's.",
        columns(
            {"us": "µs", "dram_read_MB": "MB from DRAM", "l2_MB": "MB of the L2"}
            | {"dram_pct": "DRAM, %", "l2_pct": "L2, %", "tensor_pct": "tensor cores, %"}
            | {"issue_pct": "issue slots, %", "warps_pct": "warps, %"}
            | {"cycles_an_instruction": "cycles", "cycles_for_memory": "for memory"}
            | {"cycles_at_barriers": "at barriers"}
            | {"programs": "programs", "registers": "registers"}
        ),
    ),
    Section("prefix", "Prefix keys", "MB/s of token ids.", columns({"MBps": "MB/s"})),
    Section(
        "pages",
        "The page allocator",
        "By one thread.",
        columns({"pairs_per_second": "pairs a second"}),
    ),
)


def page(results: Path) -> tuple[str, dict[str, str]]:
    """The text, and pictures by name."""
    parts, pictures = [HEAD], dict[str, str]()
    for section in SECTIONS:
        its = sorted(results.glob(f"*/{section.bench}.json"), key=lambda p: p.parent.name == "cpu")
        if its:
            parts.append(f"## {section.title}\n\n{section.says}\n")
        for path in its:
            content = json.loads(path.read_text())
            parts.append(_machine(content))
            parts.append(_lines(section.table(content["cases"])))
            if section.picture is not None:
                name = f"results-{path.parent.name}-{section.bench.replace('_', '-')}.svg"
                pictures[name] = bars(*section.picture(content["cases"]))
                parts.append(f"![{section.title}]({name})\n")
    return "\n".join(parts), pictures


def _machine(content: Mapping[str, Any]) -> str:
    machine, versions = content["machine"], content["versions"]
    cores = f"{machine['cores']} cores of {machine['cpu']}"
    on = f"{machine['gpu']}, {cores}" if "gpu" in machine else cores
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"**{on}**; {told}; `{content['command']}`\n"


def _lines(table: Table) -> str:
    heads, rows = table
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    lines += [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    return "\n".join([*lines, ""])


def _cell(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: ""}[value]
    if isinstance(value, float):
        return number(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {number(share)}" for name, share in value.items())
    return str(value).replace("|", "\\|")
