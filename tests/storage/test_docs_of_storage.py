"""docs/storage.md says what there is."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import save_file
from tiny import BASE_CONFIG, Tiny

PAGE = (Path(__file__).parents[2] / "docs" / "storage.md").read_text()


def test_every_option_is_in_the_docs() -> None:
    """Row 194: each with its default."""
    pytest.importorskip("boto3")
    from adaptercache.s3 import S3Options

    table = PAGE[PAGE.index("| option | default |") :]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", table, re.MULTILINE))
    assert set(rows) == {field.name for field in fields(S3Options)}
    for field in fields(S3Options):
        if isinstance(field.default, (int, float)) and not isinstance(field.default, bool):
            assert f"{field.default:g}" == rows[field.name]


def test_the_example_of_the_docs_makes_a_source() -> None:
    pytest.importorskip("boto3")
    block, _ = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    names: dict[str, object] = {}
    exec(compile(block, "storage.md", "exec"), names)
    assert "prod-adapters/lora" in repr(names["source"])


def test_the_example_of_folders_opens_one(tmp_path: Path) -> None:
    folder = tmp_path / "adapters/acme/sql-v3"
    folder.mkdir(parents=True)
    tensors, config = Tiny.tensors(1)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps(BASE_CONFIG))
    _, block = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    for written, here in {
        "s3://prod-adapters/lora": "adapters",
        "config.json": "config.json",
        "/var/cache/lora": "cache",
    }.items():
        assert written in block
        block = block.replace(written, str(tmp_path / here))
    loaded: list[Path] = []
    names: dict[str, Any] = {"engine": SimpleNamespace(load=loaded.append)}
    exec(compile(block, "storage.md", "exec"), names)
    assert loaded[0].parent == tmp_path / "cache/objects"
    assert names["newer"] is None
    names["files"].close()


@pytest.mark.parametrize("folder", ["objects", "index", "flights", "tmp", "lock", "used"])
def test_the_tree_of_the_docs_is_the_disk_tiers(folder: str, tmp_path: Path) -> None:
    from adaptercache.tiers.disk import DiskTier

    tier = DiskTier(tmp_path, 1 << 20)
    tier.set_aside(1, lambda digest: True)
    assert (tmp_path / folder).exists()
    assert re.search(rf"/{folder}\b", PAGE)
    tier.close()
