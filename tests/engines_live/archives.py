"""The newest release of an engine, as the Python package index has it, and the texts in it. Nothing is built or run.

index    pip's own: PIP_INDEX_URL or index-url of its configuration, else pypi.org
archive  the source distribution, else the smallest wheel for Linux; kept, so that a second look downloads nothing
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

from filelock import FileLock
from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename

SECONDS = 20  # that the index may stay silent
TEXTS = re.compile(r"(\.(py|pyi|cpp|h|toml)|CMakeLists\.txt|entry_points\.txt|libopenvino_genai\.so[.\d]*)$")
MOST_BYTES = 20 * 2**20  # of one text


class NotThereError(Exception):
    """The index has no such package, or no release that can be read; the message says which."""


@dataclass(frozen=True)
class Release:
    """A release and its texts, by path from the top of the source or of site-packages."""

    version: str
    texts: Mapping[str, str]

    def matching(self, patterns: str) -> dict[str, str]:
        """The texts whose paths match one of the patterns, which spaces part; ``*`` matches folders too."""
        wanted = patterns.split()
        return {path: text for path, text in self.texts.items() if any(fnmatch.fnmatchcase(path, p) for p in wanted)}


def release_of(package: str, version: str | None = None) -> Release:
    """A release as `newest_archive` finds it."""
    version, archive = newest_archive(package, version)
    return Release(version, dict(texts_of(archive)))


def newest_archive(package: str, version: str | None = None) -> tuple[str, Path]:
    """The newest final release, or the one asked for, and its archive.

    Raises NotThereError, and OSError where the index is not reached.
    """
    files = [
        f for f in index_page(package) if version == str(f["version"]) or not (version or f["version"].is_prerelease)
    ]
    if not files:
        raise NotThereError(f"the index has no {version or 'final release'}")
    found = max(file["version"] for file in files)
    file = chosen([file for file in files if file["version"] == found])
    return str(found), fetched(file, folder() / package / (version or ""))


def index_page(package: str) -> list[dict[str, Any]]:
    """The files of a package that can be read here and were not yanked, with their versions (PEP 691)."""
    address = f"{index()}/{package}/"
    request = urllib.request.Request(address, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            page = json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
        raise NotThereError("not on the index") from None
    except json.JSONDecodeError:
        raise NotThereError(f"{address} does not answer with JSON (PEP 691)") from None
    found = []
    for file in page["files"]:
        try:
            if file["filename"].endswith(".whl"):
                _, version, _, tags = parse_wheel_filename(file["filename"])
                if not any(tag.platform == "any" or re.search("linux.*x86_64", tag.platform) for tag in tags):
                    continue
            else:
                version = parse_sdist_filename(file["filename"])[1]
        except (InvalidSdistFilename, InvalidWheelFilename):
            continue
        if not file.get("yanked"):
            found.append({**file, "version": version, "url": urljoin(address, file["url"])})
    return found


def index() -> str:
    """The address of the index that pip is told to use."""
    if address := os.environ.get("PIP_INDEX_URL"):
        return address.rstrip("/")
    told = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    addresses = re.findall(r"^(?:global|install)\.index-url='(.*)'$", told.stdout, re.MULTILINE)
    return next(iter(addresses), "https://pypi.org/simple").rstrip("/")


def chosen(files: list[dict[str, Any]]) -> dict[str, Any]:
    """The source distribution, or the smallest wheel."""
    return min(files, key=lambda file: (file["filename"].endswith(".whl"), file.get("size") or 0))


def folder() -> Path:
    """Where archives are kept: TREEOPT_ENGINES, or the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("TREEOPT_ENGINES") or cache / "treeopt" / "engines")


def fetched(file: Mapping[str, Any], kept: Path) -> Path:
    """The archive, downloaded where it is not kept yet; older releases are removed. Raises NotThereError for a wrong hash."""
    path = kept / Path(file["filename"]).name
    kept.mkdir(parents=True, exist_ok=True)
    with FileLock(kept / "lock"):
        if not path.exists() or digest(path) != file["hashes"]["sha256"]:
            part = kept / "part"
            with urllib.request.urlopen(file["url"], timeout=SECONDS) as answer, part.open("wb") as stream:
                shutil.copyfileobj(answer, stream, 2**20)
            if digest(part) != file["hashes"]["sha256"]:
                raise NotThereError(f"{file['filename']} has not the hash that the index gives")
            part.rename(path)
        for other in kept.iterdir():
            if other.is_file() and other.name not in (path.name, "lock"):
                other.unlink()
    return path


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def texts_of(archive: Path) -> Iterator[tuple[str, str]]:
    """Path and text of every source in an archive; of a source distribution without its top folder."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for member in wheel.infolist():
                if TEXTS.search(member.filename) and member.file_size < MOST_BYTES:
                    yield member.filename, wheel.read(member).decode(errors="replace")
        return
    with tarfile.open(archive) as source:
        for entry in source:
            if entry.isfile() and TEXTS.search(entry.name) and entry.size < MOST_BYTES:
                stream = source.extractfile(entry)
                assert stream is not None
                yield entry.name.partition("/")[2], stream.read().decode(errors="replace")
