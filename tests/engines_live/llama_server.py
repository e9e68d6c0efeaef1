"""llama.cpp's server, built from the source that llama-cpp-python's newest release carries, and started by an export.

The build takes minutes once a release and is kept beside the archive. What an export does not say comes from the
environment: port, one thread, /metrics, the log's level, and a float32 cache without flash attention, since answers are
compared with those of transformers.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from . import archives
from .serving import fetched, free_port, serving
from .started import ONE_THREAD, TOKENS

SOURCE = "vendor/llama.cpp"
OPTIONS = [
    *(f"-DLLAMA_{name}=OFF" for name in ("CURL", "OPENSSL", "BUILD_TESTS", "BUILD_EXAMPLES", "USE_PREBUILT_UI")),
    "-DCMAKE_BUILD_TYPE=Release",
    "-DCMAKE_CXX_FLAGS_RELEASE=-O0",  # half the time to compile, for answers that take three times as long
]
TOLD = {
    "LLAMA_ARG_THREADS": "1",
    "LLAMA_ARG_ENDPOINT_METRICS": "1",
    "LLAMA_ARG_LOG_VERBOSITY": "4",  # from which it has rates by position
    "LLAMA_ARG_FLASH_ATTN": "off",
    "LLAMA_ARG_CACHE_TYPE_K": "f32",
    "LLAMA_ARG_CACHE_TYPE_V": "f32",
}


@dataclass(frozen=True)
class Served:
    """What a server answered, and showed of it: /metrics before and after, and the log."""

    answers: list[dict[str, Any]]
    before: Path
    after: Path
    log: Path

    def counted(self, key: str) -> int:
        """The sum of a count in the answers' timings."""
        return sum(answer["timings"].get(key, 0) for answer in self.answers)


def built() -> Path:
    """llama-server of the newest release; skips where it cannot be built, and says how long it took."""
    missing = [name for name in ("cmake", "c++") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no {' and no '.join(missing)} to build llama.cpp with")
    try:
        version, archive = archives.newest_archive("llama-cpp-python")
    except archives.AWAY as error:
        pytest.skip(f"no source of llama.cpp can be had: {error}")
    folder = archives.folder() / f"llama-server-{version}"
    server = folder / "bin" / "llama-server"
    if not server.exists():
        began = time.monotonic()
        source = folder / "source"
        for old in folder.parent.glob("llama-server-*"):
            shutil.rmtree(old)
        try:
            with tarfile.open(archive) as packed:
                packed.extractall(source, [one for one in packed if f"/{SOURCE}/" in one.name], filter="data")
            (top,) = source.glob(f"*/{SOURCE}")
            subprocess.run(["cmake", "-S", top, "-B", folder, *OPTIONS], check=True)
            subprocess.run(["cmake", "--build", folder, "--target", "llama-server", "--parallel", "2"], check=True)
        finally:
            shutil.rmtree(source, ignore_errors=True)
        print(f"built in {time.monotonic() - began:.0f} s")
    print(f"llama.cpp of llama-cpp-python {version}: {said(server, '--version')[1]}")
    return server


def said(server: Path, *options: str) -> tuple[int, str]:
    """Exit code and text of the server with these options alone."""
    ended = subprocess.run([server, *options], capture_output=True, text=True, check=False)
    return ended.returncode, ended.stderr.strip() + ended.stdout.strip()


def answered(server: Path, folder: Path, prompts: Sequence[Sequence[int]], into: Path) -> Served:
    """The greedy answers of the server that the folder's commands.sh starts, one after another; files go ``into``."""
    found = Served([], into / "before.txt", into / "after.txt", into / "log.txt")
    port = free_port()
    path = f"{server.parent}{os.pathsep}{os.environ['PATH']}"
    variables = {**ONE_THREAD, **TOLD, "LLAMA_ARG_PORT": str(port), "PATH": path}
    print((folder / "commands.sh").read_text(encoding="utf-8").strip())
    with serving(["sh", "commands.sh"], folder, variables, found.log, port) as address:
        found.before.write_bytes(fetched(f"{address}/metrics"))
        for prompt in prompts:
            asked = {"prompt": prompt, "n_predict": TOKENS, "temperature": 0, "cache_prompt": False}
            answer = fetched(f"{address}/completion", {**asked, "return_tokens": True})
            found.answers.append(json.loads(answer))
        found.after.write_bytes(fetched(f"{address}/metrics"))
    return found
