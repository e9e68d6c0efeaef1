"""Releases that nobody made: a source that has every fact of vLLM, and an index that serves archives of it."""

from __future__ import annotations

import hashlib
import http.server
import io
import json
import re
import tarfile
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.engines_live.archives import Release
from tests.engines_live.readings import words_read
from tests.engines_live.written import words_of_engine

LOG = """
log_fn(
    "SpecDecoding metrics: "
    "Mean acceptance length: %.2f, "
    "Accepted throughput: %.2f tokens/s, "
    "Accepted: %d tokens, "
    "Drafted: %d tokens, "
    "Per-position acceptance rate: %s, "
    "Avg Draft acceptance rate: %.1f%%",
)
counters = ["vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens",
            "vllm:spec_decode_num_accepted_tokens_per_pos", labels + ["position"]]
"""


def vllm() -> dict[str, str]:
    """The texts of a vLLM that has all that is written for it and read of it, and no more."""
    words = {*words_of_engine("vllm"), *words_read("vllm")}
    flags = sorted({word.text for word in words if word.kind == "flag"})
    keys = sorted({word.text for word in words if word.kind == "key"})
    values = sorted({word.text for word in words if word.kind == "value" and word.of == "method"})
    read = sorted({word.text for word in words if word.kind == "read key"})
    return {
        "pyproject.toml": '[project.scripts]\nvllm = "vllm.entrypoints.cli.main:main"\n',
        "vllm/entrypoints/cli/serve.py": 'name = "serve"\n',
        "vllm/engine/arg_utils.py": "".join(f'parser.add_argument("{flag}", type=int)\n' for flag in flags),
        "vllm/config/speculative.py": f"Inner = Literal[{values[1:]!r}]\nSpeculativeMethod = Literal[{values[0]!r}, Inner]\n"
        "DraftSampleMethod = Literal['probabilistic']\nclass SpeculativeConfig:\n"
        + "".join(f"    {key}: int = 0\n" for key in keys),
        "vllm/v1/spec_decode/metrics.py": LOG,
        "vllm/benchmarks/serve.py": f"result = {dict.fromkeys(read, 0)!r}\n",
    }


def renamed(release: Release, where: str, word: str) -> Release:
    """The release with a word renamed in the files of some patterns and in their paths, however it is spelled there."""
    inner = "[-_./]".join(map(re.escape, re.split("[-_.]", word.strip("-"))))
    pattern = re.compile(rf"(?<![A-Za-z0-9]){inner}" + r"(?![A-Za-z0-9])" * word[-1].isalnum())
    files = release.matching(where)
    changed = {pattern.sub("gone", path): pattern.sub("gone", text) for path, text in files.items()}
    return Release(release.version, {p: text for p, text in release.texts.items() if p not in files} | changed)


def sdist(texts: Mapping[str, str]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for path, text in texts.items():
            entry = tarfile.TarInfo(f"top-1.0/{path}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return stream.getvalue()


def wheel(texts: Mapping[str, str]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for path, text in texts.items():
            archive.writestr(path, text)
    return stream.getvalue()


@contextmanager
def index(folder: Path, files: Mapping[str, bytes], *, lies: bool = False, **others: object) -> Iterator[str]:
    """The address of an index that has one package, ``engine``; ``others`` go to every file's entry."""
    simple = folder / "simple" / "engine"
    simple.mkdir(parents=True, exist_ok=True)
    entries = []
    for name, content in files.items():
        (folder / name).write_bytes(content)
        digest = hashlib.sha256(content + b"!" * lies).hexdigest()
        entries.append(
            {"filename": name, "url": f"../../{name}", "hashes": {"sha256": digest}, "size": len(content), **others}
        )
    (simple / "index.html").write_text(json.dumps({"files": entries}))

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(folder))  # type: ignore[arg-type]

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/simple"
        server.shutdown()
