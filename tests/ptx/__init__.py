"""A machine for PTX, in numpy: what Triton compiles runs, and is watched, where there is no GPU.

One program at a time, all its threads in lockstep, so every branch must be uniform, as it is where
none depends on a thread's number. It knows what the kernels of `fragments` use, and refuses the
rest by name. It refuses as well, as a `Fault`, what a GPU lets pass or only sometimes shows: bytes
outside of the buffers, of those that are not to be written, of those that the kernel ahead may
still write or read before ``griddepcontrol.wait``; registers and shared memory that nobody wrote;
and shared memory that two warps use without a barrier between them.
"""

from ptx.machine import Machine
from ptx.memory import Fault, Memory
from ptx.program import Program, UnknownInstruction

__all__ = ["Fault", "Machine", "Memory", "Program", "UnknownInstruction"]
