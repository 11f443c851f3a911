"""The bytes of the disk tier, counted by all processes together.

    root/lock               held around every change of the count, and of what is counted
    root/used               the count: bytes of all content, and of what downloads have set aside
    root/tmp/<cache>/claims what one running cache has set aside

The count is never below the truth of what is published: it is raised before bytes appear, and
lowered after they have gone. A process that dies in between leaves it too high, until somebody for
whom there is no room counts again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from adaptercache.disk.locks import exclusive

__all__ = ["Budget"]

CLAIMS = "claims"


class Budget:
    """See the module's docstring. All but `locked` is called inside of ``with budget.locked():``.

    Args:
        root: of the disk tier.
        own: the folder of this cache below ``root/tmp``.
    """

    def __init__(self, root: Path, own: Path) -> None:
        self._root, self._own = root, own
        self._used = root / "used"
        self._claimed = 0

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep all others, threads and processes, from changing what is on the disk."""
        with exclusive(self._root / "lock"):
            yield

    def used(self) -> int | None:
        """The count; None where there is none, or a torn one: count again."""
        try:
            text = self._used.read_text()
            return int(text) if text.endswith("\n") else None
        except (FileNotFoundError, ValueError):
            return None

    def add(self, nbytes: int) -> None:
        """More is there, or (negative) less; what can't be written down then is counted again."""
        used = self.used()
        if used is None:
            return
        try:
            self.set(max(0, used + nbytes))
        except OSError:
            if nbytes > 0:
                raise

    def set(self, used: int) -> None:
        """What was counted."""
        handle = os.open(self._used, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            os.pwrite(handle, b"%20d\n" % used, 0)  # one page: no reader sees half of it
        finally:
            os.close(handle)

    def claim(self, nbytes: int) -> None:
        """Set bytes aside for what is about to be written, or (negative) no longer."""
        if nbytes == 0:
            return
        if nbytes > 0:
            self.add(nbytes)
        mine, total = self._own / CLAIMS, self._claimed + nbytes
        if total:
            fresh = mine.with_suffix(".new")
            fresh.write_text(str(total))
            os.replace(fresh, mine)  # a full device leaves what was written before
        else:
            mine.unlink(missing_ok=True)
        self._claimed = total
        if nbytes < 0:
            self.add(nbytes)

    def claims(self) -> int:
        """What all running caches have set aside. The dead ones' folders must be gone."""
        total = 0
        for folder in (self._root / "tmp").iterdir():
            with suppress(FileNotFoundError, NotADirectoryError, ValueError):
                total += int((folder / CLAIMS).read_text())
        return total
