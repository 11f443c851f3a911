"""A real Prometheus server on loopback, and its checker promtool: from Debian's or Ubuntu's
package, unpacked into a folder without root, or any that are on the PATH.

    python tests/prometheus_server.py .venv/prometheus     # what `make test` does first
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["NO_PROMETHEUS", "Prometheus", "find_program", "running_prometheus"]

FOLDER = Path(__file__).parents[1] / ".venv" / "prometheus"
NO_PROMETHEUS = "needs Prometheus: apt-get install prometheus, or a network for `make test`"
START_S = 30
DATA_S = 10
FETCH_S = 120  # for one command of apt's


def find_program(name: str) -> str | None:
    """``prometheus`` or ``promtool``."""
    unpacked = FOLDER / "usr" / "bin" / name
    return str(unpacked) if unpacked.exists() else shutil.which(name)


@dataclass(frozen=True)
class Prometheus:
    """A server that runs."""

    url: str

    def get(self, path: str, **parameters: str) -> Any:
        """The ``data`` of an answer of its API; raises ValueError with what it says is wrong."""
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise ValueError(f"{parameters}: {json.load(error)['error']}") from None

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """The series of an instant vector, each with its labels."""
        found = self.get("query", query=expression)["result"]
        return [(series["metric"], float(series["value"][1])) for series in found]

    def data(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """The series of a query that has finite values, if need be after some scrapes."""
        deadline = time.monotonic() + DATA_S
        while True:
            found = [each for each in self.query(expression) if math.isfinite(each[1])]
            if found or time.monotonic() > deadline:
                return found
            time.sleep(0.2)

    def firing(self) -> set[tuple[str, str]]:
        """The alerts that fire, each with its instance."""
        alerts = self.get("alerts")["alerts"]
        return {
            (alert["labels"]["alertname"], alert["labels"]["instance"])
            for alert in alerts
            if alert["state"] == "firing"
        }


@contextmanager
def running_prometheus(folder: Path, config: str, files: Mapping[str, str]) -> Iterator[Prometheus]:
    """A server with its data in ``folder``, with this configuration, and rule files by name."""
    program = find_program("prometheus")
    assert program is not None, NO_PROMETHEUS
    for name, text in {"prometheus.yml": config, **files}.items():
        (folder / name).write_text(text)
    # Targets are looked up every 5 s, unless a server new enough is told otherwise.
    for options in (["--scrape.discovery-reload-interval=250ms"], []):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        command = [
            *(program, *options, f"--config.file={folder / 'prometheus.yml'}"),
            *(f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"),
        ]
        with open(folder / "log", "wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_die_with_parent,
            )
        try:
            url = f"http://127.0.0.1:{port}"
            if _is_ready(url, process):
                yield Prometheus(url)
                return
        finally:
            process.kill()
            process.wait()
    raise RuntimeError(f"Prometheus didn't start: {(folder / 'log').read_text()[-2000:]}")


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _is_ready(url: str, process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/-/ready", timeout=2):
                return True
        except OSError:
            time.sleep(0.05)
    return False


# Getting it. Nothing of the system is changed: apt downloads with lists of its own, if the
# system's don't have the package, and dpkg unpacks.


def unpack_into(folder: Path) -> str | None:
    """Put the programs into ``folder``; says what hindered it, or None."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        return "there is no apt here"
    work = folder.with_name(folder.name + ".new")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        return _download(work) or _unpack(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(work: Path) -> str | None:
    own = work / "apt"
    for part in ("lists/partial", "cache/archives/partial"):
        (own / part).mkdir(parents=True)
    sandbox = ["-o", "APT::Sandbox::User=root"] if os.geteuid() == 0 else []
    own_lists = [
        *("-o", f"Dir::State::Lists={own / 'lists'}", "-o", f"Dir::Cache={own / 'cache'}"),
        *("-o", "Acquire::Languages=none", "-o", "Acquire::Retries=1"),
        *("-o", "Acquire::http::Timeout=15", *sandbox),
    ]
    ended = _run(["apt-get", "-q", *sandbox, "download", "prometheus"], work)
    if ended is not None:
        ended = _run(["apt-get", "-q", *own_lists, "update"], work)
        ended = ended or _run(["apt-get", "-q", *own_lists, "download", "prometheus"], work)
    return ended


def _unpack(work: Path, folder: Path) -> str | None:
    (package,) = work.glob("prometheus_*.deb")
    ended = _run(["dpkg-deb", "-x", str(package), str(work / "root")], work)
    if ended is None:
        ended = _run([str(work / "root/usr/bin/promtool"), "--version"], work)
    if ended is None:
        shutil.rmtree(folder, ignore_errors=True)
        (work / "root").rename(folder)
        os.utime(folder)  # it has the package's time, and make compares it
    return ended


def _run(command: Sequence[str], folder: Path) -> str | None:
    try:
        ended = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=FETCH_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = ended.stderr.strip().splitlines()
    return (said[-1] if said else f"{command[0]} failed") if ended.returncode else None


if __name__ == "__main__":
    hindered = unpack_into(Path(sys.argv[1]).absolute())
    if hindered is not None:  # never a reason to fail: tests that need it are skipped
        found = find_program("prometheus")
        instead = f"using {found}" if found else "its tests will be skipped"
        print(f"Prometheus could not be fetched ({hindered}): {instead}")
