"""What vLLM's build for CPUs needs beside it, for pip: its own list, but for what doesn't fit.

torchvision, torchaudio and torchcodec on PyPI are built for torch with CUDA, fail to import beside
torch for CPUs, and are for images and sounds. And torch's own version is taken without its local
part, which only PyTorch's index and local copies have.

Usage: vllm_requirements.py REPORT, which `pip install --dry-run --report` has written.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}


def main() -> None:
    report = json.loads(Path(sys.argv[1]).read_text())
    for line in report["install"][0]["metadata"]["requires_dist"]:
        name = re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0].lower()
        if name not in LEFT_OUT and "extra ==" not in line:
            print(re.sub(r"(torch==[0-9.]+)\+cpu", r"\1", line))


if __name__ == "__main__":
    main()
