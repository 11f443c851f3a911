"""Two caches on one folder that published the same content at once: one of them failed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from adaptercache.tiers import disk
from adaptercache.tiers.disk import DiskTier


def test_content_that_another_cache_publishes_at_the_same_time_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, digest = DiskTier(tmp_path), bytes(32)
    folder = tier.new_folder()
    (folder / "packed").write_text("same")
    rename = os.rename

    def rename_too_late(source: Path, target: Path) -> None:
        if target == tier.folder(digest):
            target.mkdir()
            (target / "packed").write_text("same")
        rename(source, target)

    monkeypatch.setattr(disk.os, "rename", rename_too_late)
    try:
        with tier.changing:
            tier.publish(folder, digest)
        assert (tier.folder(digest) / "packed").read_text() == "same"
    finally:
        tier.close()
