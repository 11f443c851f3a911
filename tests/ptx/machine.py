"""Runs programs: all threads of one at each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from ptx.arithmetic import Lanes, operation, read
from ptx.memory import Fault, Memory, Shared
from ptx.program import Address, Instruction, Operand, Program, UnknownInstruction

MOST_STEPS = 200_000
NOBODYS = np.uint64(0xFFFFFFFF)
"""What a register holds of threads that have not written it: as float32 a NaN."""
LANE, GROUP, FOURTH = np.arange(32), np.arange(32) // 4, np.arange(32) % 4

MULTIPLY = {f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32" for kind in ("bf16", "f16")}

T = TypeVar("T")


class Machine:
    """Runs one kernel over ``memory`` with these arguments, and ``shared_bytes`` a program.

    ``is_early``: launched before the kernel ahead has ended, and so has to wait for it.
    """

    def __init__(
        self,
        program: Program,
        memory: Memory,
        arguments: Sequence[int],
        *,
        shared_bytes: int,
        is_early: bool,
    ) -> None:
        self._program = program
        self._memory = memory
        self._arguments = arguments
        self._shared_bytes = shared_bytes
        self._is_early = is_early
        self._thread = np.arange(program.threads)

    def launch(self, programs: int) -> None:
        """Run them one after the other.

        Raises:
            Fault: a program did what it must not do.
            UnknownInstruction: by its text.
        """
        with np.errstate(all="ignore"):  # memory that nobody wrote is NaN
            for index in range(programs):
                self._run(index, programs)

    def _run(self, index: int, programs: int) -> None:
        self._registers: dict[str | int, Lanes] = {}
        for name, number in (("%ctaid.x", index), ("%nctaid.x", programs), ("global_smem", 0)):
            self._registers[name] = self._all(number)
        self._registers["%tid.x"] = self._thread.astype(np.uint64)
        self._shared = Shared(self._shared_bytes)
        self._has_waited = not self._is_early
        at, instructions = 0, self._program.instructions
        for _ in range(MOST_STEPS):
            instruction = instructions[at]
            at += 1
            try:
                target = self._step(instruction)
            except Fault as fault:
                raise Fault(f"program {index} of {programs}: {instruction.text}: {fault}") from None
            if target == "":
                return
            if target is not None:
                at = self._program.labels[target]
        raise Fault(f"program {index} of {programs} doesn't end")

    def _step(self, its: Instruction) -> str | None:
        """Where it goes on, if elsewhere; "": nowhere."""
        active = np.ones(self._program.threads, bool)
        if its.guard is not None:
            active = self._value(its.guard).astype(bool) == its.runs_where
        kind = its.op.split(".")[0]
        if kind == "bra":
            if active.any() and not active.all():
                raise Fault("threads part")
            return _is(str, its.operands[0], its) if active.all() else None
        if kind == "ret":
            return ""
        if kind == "bar":
            self._shared.barrier()
        elif kind == "griddepcontrol":
            self._has_waited |= its.op == "griddepcontrol.wait"
        elif its.op.startswith("ld.param"):
            place = _is(Address, its.operands[1], its).base.rpartition("_")[2]
            # Triton adds pointers to scratch of its own, of which our kernels have none.
            known = dict(enumerate(self._arguments)).get(int(place), 0)
            self._put(its.operands[0], self._all(known), active)
        elif kind in ("ld", "st"):
            self._access(its, active)
        elif kind in ("ldmatrix", "stmatrix"):
            self._matrix(its)
        elif its.op in MULTIPLY:
            self._multiply(its, active)
        elif kind == "mov":
            self._move(its, active)
        elif its.op == "shfl.sync.idx.b32" and its.operands[3:] == (31, (1 << 64) - 1):
            self._shuffle(its, active)
        else:
            self._compute(its, active)
        return None

    # Registers.

    def _all(self, number: int) -> Lanes:
        return np.full(self._program.threads, number, np.uint64)

    def _value(self, operand: Operand) -> Lanes:
        if isinstance(operand, int):
            return self._all(operand)
        found = self._registers.get(operand) if isinstance(operand, str) else None
        if found is None:
            raise Fault(f"{operand} has not been written")
        return found

    def _put(self, target: Operand, value: Lanes, active: Lanes) -> None:
        assert isinstance(target, str), target
        if not active.all():
            old = self._registers.get(target, False if value.dtype == bool else NOBODYS)
            value = np.where(active, value, old)
        self._registers[target] = value

    # Instructions.

    def _compute(self, its: Instruction, active: Lanes) -> None:
        compute = operation(its.op)
        if compute is None:
            raise UnknownInstruction(its.text)
        target, *sources = its.operands
        self._put(target, compute(*map(self._value, sources)), active)

    def _move(self, its: Instruction, active: Lanes) -> None:
        """Also a register's parts into as many, or as many into one."""
        kind = its.op.split(".")[1]
        target, source = its.operands
        if kind == "pred":
            self._put(target, self._value(source).astype(bool), active)
        elif isinstance(target, tuple):
            width, value = int(kind[1:]) // len(target), self._value(source)
            for place, part in enumerate(target):
                its_bits = read(value >> np.uint64(place * width), f"u{width}")
                self._put(part, its_bits, active)
        elif isinstance(source, tuple):
            width, value = int(kind[1:]) // len(source), self._all(0)
            for place, part in enumerate(source):
                value |= self._value(part) << np.uint64(place * width)
            self._put(target, value, active)
        else:
            self._put(target, read(self._value(source), f"u{kind[1:]}"), active)

    def _shuffle(self, its: Instruction, active: Lanes) -> None:
        """From the lane of its own warp that each thread says."""
        target, source, lane, *_ = its.operands
        its_warps = self._thread // 32 * 32
        at = its_warps + self._value(lane).astype(np.int64) % 32
        self._put(target, self._value(source)[at], active)

    def _access(self, its: Instruction, active: Lanes) -> None:
        """ld, st: numbers side by side of a thread."""
        parts = its.op.split(".")
        is_load, kind = parts[0] == "ld", parts[-1]
        address, registers = its.operands[:: 1 if not is_load else -1]
        if parts[1] not in ("shared", "global") or kind not in ("b16", "b32", "b64"):
            raise UnknownInstruction(its.text)
        size, each = int(kind[1:]) // 8, registers if isinstance(registers, tuple) else (registers,)
        at = self._where(address, its)[active]
        if (at % (size * len(each))).any():
            raise Fault("is not aligned")
        lanes = self._thread[active]
        if is_load:
            read_bytes = self._load(parts[1], at, size * len(each), lanes)
            numbers = read_bytes.view(f"<u{size}").astype(np.uint64)
            for place, register in enumerate(each):
                value = self._all(int(NOBODYS))
                value[active] = numbers[:, place]
                self._put(register, value, active)
            return
        numbers = np.stack([self._value(register)[active] for register in each], axis=1)
        self._store(parts[1], at, numbers.astype(f"<u{size}").view(np.uint8), lanes)

    def _matrix(self, its: Instruction) -> None:
        """ldmatrix, stmatrix: rows of 16 bytes, each thread has 4 of them; eight rows a register,
        where eight of the threads say."""
        is_load = its.op.startswith("ldmatrix")
        if its.guard or "trans" in its.op or not its.op.endswith(".shared.b16"):
            raise UnknownInstruction(its.text)
        address, registers = its.operands[:: 1 if not is_load else -1]
        rows = self._where(address, its).reshape(-1, 32)
        if (rows % 16).any():
            raise Fault("is not aligned")
        for place, register in enumerate(_is(tuple, registers, its)):
            at = (rows[:, 8 * place + GROUP] + 4 * FOURTH).flatten()
            if is_load:
                numbers = self._load("shared", at, 4, self._thread).view("<u4").flatten()
                self._registers[register] = numbers.astype(np.uint64)
            else:
                numbers = self._value(register).astype("<u4")[:, None]
                self._store("shared", at, numbers.view(np.uint8), self._thread)

    def _where(self, address: Operand, its: Instruction) -> Lanes:
        its_address = _is(Address, address, its)
        return self._value(its_address.base).astype(np.int64) + its_address.offset

    def _load(self, space: str, at: Lanes, size: int, lanes: Lanes) -> Lanes:
        memory = self._checked(space, at, size, lanes, writes=False)
        return memory[at[:, None] + np.arange(size)]

    def _store(self, space: str, at: Lanes, new: Lanes, lanes: Lanes) -> None:
        memory = self._checked(space, at, new.shape[1], lanes, writes=True)
        memory[at[:, None] + np.arange(new.shape[1])] = new

    def _checked(self, space: str, at: Lanes, size: int, lanes: Lanes, *, writes: bool) -> Lanes:
        if space == "shared":
            self._shared.check(at, size, lanes // 32, writes=writes)
            return self._shared.bytes
        self._memory.check(at, size, writes=writes, has_waited=self._has_waited)
        return self._memory.bytes

    def _multiply(self, its: Instruction, active: Lanes) -> None:
        """``D = A B + C`` of each warp: rounded once, so that no order shows but the program's."""
        target, *sources = [_is(tuple, each, its) for each in its.operands]
        kind = its.op.split(".")[-2]
        a, b, c = ([self._value(each).reshape(-1, 32) for each in source] for source in sources)
        warps = self._program.threads // 32
        left, right = np.zeros((warps, 16, 16)), np.zeros((warps, 16, 8))
        sums = np.zeros((warps, 16, 8))
        for place, bits in enumerate(a):
            row, k = GROUP + 8 * (place % 2), 2 * FOURTH + 8 * (place // 2)
            left[:, row, k], left[:, row, k + 1] = _two(bits, kind)
        for place, bits in enumerate(b):
            k = 2 * FOURTH + 8 * place
            right[:, k, GROUP], right[:, k + 1, GROUP] = _two(bits, kind)
        for place, bits in enumerate(c):
            row, column = GROUP + 8 * (place // 2), 2 * FOURTH + place % 2
            sums[:, row, column] = read(bits, "f32")
        sums = (sums + left @ right).astype(np.float32)
        for place, register in enumerate(target):
            row, column = GROUP + 8 * (place // 2), 2 * FOURTH + place % 2
            value = np.ascontiguousarray(sums[:, row, column]).reshape(-1)
            self._put(register, value.view(np.uint32).astype(np.uint64), active)


def _two(bits: Lanes, kind: str) -> tuple[Lanes, Lanes]:
    return read(bits & np.uint64(0xFFFF), kind), read(bits >> np.uint64(16), kind)


def _is(kind: type[T], operand: Operand, its: Instruction) -> T:
    if not isinstance(operand, kind):
        raise UnknownInstruction(its.text)
    return operand
