"""The kernels' figures as lines, as JSON, and summed up."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kernel_cases import Case
from kernel_world import Figure


@dataclass(frozen=True, slots=True)
class Row:
    """One case and what was measured."""

    case: Case
    figure: Figure

    @property
    def over_limit(self) -> float:
        """Its time over its target's: up to 1 is kept."""
        return self.figure.us / self.case.limit_us

    @property
    def over_peer(self) -> float | None:
        """How many times faster than the best peer."""
        peer = self.case.best_peer_us
        return None if peer is None else peer / self.figure.us

    @property
    def falls_short(self) -> bool:
        slow = self.over_peer is not None and self.over_peer < self.case.worst_ratio
        return self.over_limit > 1 or slow

    def line(self) -> str:
        peer = "" if self.over_peer is None else f"  peer/{self.over_peer:.2f}"
        return (
            f"{self.case.name:46} {self.figure.us:8.2f} us  floor {self.case.floor_us:7.2f}  "
            f"target {self.case.limit_us:7.2f} {'MISS' if self.falls_short else 'ok  '}{peer}  "
            f"rms x{self.figure.rms_ratio:.2f}"
        )

    def figures(self) -> dict[str, object]:
        found: dict[str, object] = {
            "us": round(self.figure.us, 3),
            "p25": round(self.figure.p25, 3),
            "p75": round(self.figure.p75, 3),
            "floor_us": round(self.case.floor_us, 3),
            "target_us": round(self.case.limit_us, 3),
            "error": round(self.figure.error, 5),
            "rms_over_one_rounding": round(self.figure.rms_ratio, 3),
            "layers": self.figure.layers,
        }
        if self.case.best_peer_us is not None:
            found["best_peer_us"] = self.case.best_peer_us
        return found


def summary(rows: Sequence[Row]) -> list[str]:
    """Geometric means, the worst ten of each phase, and all that falls short."""
    lines = []
    for phase in ("decode", "prefill"):
        of_phase = [row for row in rows if row.case.phase == phase]
        if not of_phase:
            continue
        known = [row for row in of_phase if row.case.peer_had_these_bytes]
        short = [row for row in of_phase if row.falls_short]
        lines.append(f"== {phase}: {len(of_phase)} cases")
        if known:
            ratios = [row.over_peer or 0 for row in known]
            lines.append(
                f"best peer / ours, {len(known)} cases: geometric mean "
                f"{statistics.geometric_mean(ratios):.2f}, least {min(ratios):.2f}"
            )
        over = _geometric(of_phase, lambda row: row.over_limit)
        lines.append(f"ours / target: geometric mean {over:.3f}; over it: {len(short)} cases")
        lines.append("the worst ten:")
        worst = sorted(of_phase, key=lambda row: -row.over_limit)[:10]
        lines += [f"  {row.over_limit:.3f}  {row.line()}" for row in worst]
        lines.append("all that falls short:" if short else "nothing falls short")
        lines += [f"  {row.case.name} {row.over_limit:.3f}" for row in short]
    return [*lines, *_slots(rows)]


def _geometric(rows: Sequence[Row], of: Callable[[Row], float]) -> float:
    return statistics.geometric_mean([of(row) for row in rows])


def _slots(rows: Sequence[Row]) -> list[str]:
    """8 adapters among 8 slots and among 1,024."""
    lines = []
    by_name = {row.case.name: row.figure.us for row in rows}
    for name, few in by_name.items():
        if name.endswith("/slots8"):
            many = by_name.get(name.removesuffix("8") + "1024")
            if many is not None:
                lines.append(f"{name}: 1,024 slots cost {many / few - 1:+.1%}")
    return lines
