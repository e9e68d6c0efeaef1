"""The newest release of an engine, as the Python package index has it, and the texts in it. Nothing is built or run.

index    pip's own: PIP_INDEX_URL or index-url of its configuration, else pypi.org
archive  the source distribution, else the smallest wheel for Linux; kept, so that a second look downloads nothing
"""

from __future__ import annotations

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urljoin

from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename
from packaging.version import Version

from treeopt.files.places import user_cache
from treeopt.files.writing import locked

SECONDS = 20  # that the index may stay silent
COMPILED = r"(libopenvino_genai|onnxruntime_genai[\w.-]*|libonnxruntime-genai)\.so[.\d]*"
TEXTS = re.compile(rf"(\.(py|pyi|cpp|h|toml)|CMakeLists\.txt|entry_points\.txt|{COMPILED})$")
MOST_BYTES = 256 * 2**20  # of a release's texts; the largest has 74 MiB


class NotThereError(Exception):
    """The index has no such package, or no release that can be read; the message says which."""


AWAY = (NotThereError, OSError, HTTPException)  # what a release that cannot be had may raise


@dataclass(frozen=True)
class Release:
    """A release and its texts, by path from the top of the source or of site-packages."""

    version: str
    texts: Mapping[str, str]


def release_of(package: str, version: str | None = None) -> Release:
    """A release as `newest_archive` finds it."""
    version, archive = newest_archive(package, version)
    try:
        return Release(version, dict(texts_of(archive)))
    except Exception as error:  # damaged archives raise a dozen kinds
        raise NotThereError(f"{archive.name} cannot be read: {type(error).__name__}: {error}") from None


@dataclass(frozen=True)
class File:
    """An archive that the index lists."""

    name: str
    url: str
    sha256: str | None
    size: int
    package: str
    version: Version
    platforms: frozenset[str]

    @staticmethod
    def named(name: str, url: str = "", sha256: str | None = None, size: int = 0) -> File | None:
        """What a name says of a wheel or a source distribution; None for other files."""
        try:
            if not name.endswith(".whl"):
                return File(name, url, sha256, size, *parse_sdist_filename(name), frozenset(["any"]))
            package, version, _, tags = parse_wheel_filename(name)
            return File(name, url, sha256, size, package, version, frozenset(tag.platform for tag in tags))
        except (InvalidSdistFilename, InvalidWheelFilename):
            return None


def newest_archive(package: str, version: str | None = None) -> tuple[str, Path]:
    """The newest final release, or the one asked for, and its archive: the source, or the smallest wheel.

    Raises one of `AWAY`.
    """
    files = [f for f in index_page(package) if version == str(f.version) or not (version or f.version.is_prerelease)]
    if not files:
        raise NotThereError(f"the index has no {version or 'final release'}")
    file = max(files, key=lambda f: (f.version, not f.name.endswith(".whl"), -f.size))
    return str(file.version), fetched(file, folder() / package / (version or ""))


def index_page(package: str) -> list[File]:
    """The files of a package that can be read here and were not yanked (PEP 691)."""
    address = f"{index()}/{package}/"
    try:
        request = urllib.request.Request(address, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            listed = [one for one in json.load(answer)["files"] if not one.get("yanked")]
        files = [
            File.named(
                one["filename"], urljoin(address, one["url"]), one["hashes"].get("sha256"), int(one.get("size") or 0)
            )
            for one in listed
        ]
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
        raise NotThereError("not on the index") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise NotThereError(f"{address} cannot be read as JSON of PEP 691: {type(error).__name__}: {error}") from None
    return [f for f in files if f and any(re.search(r"^any$|linux.*x86_64", one) for one in f.platforms)]


def index() -> str:
    """The address of the index that pip is told to use."""
    if address := os.environ.get("PIP_INDEX_URL"):
        return address.rstrip("/")
    told = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    addresses = re.findall(r"^(?:global|install)\.index-url='(.*)'$", told.stdout, re.MULTILINE)
    return next(iter(addresses), "https://pypi.org/simple").rstrip("/")


def folder() -> Path:
    """Where archives are kept: TREEOPT_ENGINES, or the user's cache."""
    return Path(os.environ.get("TREEOPT_ENGINES") or user_cache() / "engines")


def fetched(file: File, kept: Path) -> Path:
    """The archive, downloaded where it is not kept whole; the package's others are removed. Raises one of `AWAY`."""
    path = kept / Path(file.name).name  # nowhere else, whatever the index says
    part = path.with_name(f"{path.name}.part")
    kept.mkdir(parents=True, exist_ok=True)
    with locked(kept / "lock"):
        if not path.exists() or digest(path) != file.sha256:
            with urllib.request.urlopen(file.url, timeout=SECONDS) as answer, part.open("wb") as stream:
                shutil.copyfileobj(answer, stream, 2**20)
            if digest(part) != file.sha256:
                raise NotThereError(f"{file.name} has not the hash that the index gives: {file.sha256}")
            part.replace(path)
        for other in kept.iterdir():
            known = File.named(other.name.removesuffix(".part"))
            if known and known.package == file.package and other.is_file() and other != path:
                other.unlink()
    return path


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def texts_of(archive: Path) -> Iterator[tuple[str, str]]:
    """Path and text of every source in an archive; of a source distribution without its top folder."""
    left = MOST_BYTES
    for path, size, read in members(archive):
        if TEXTS.search(path):
            if (left := left - size) < 0:
                raise ValueError(f"its texts take more than {MOST_BYTES >> 20} MiB")
            yield path, read().decode(errors="replace")


def members(archive: Path) -> Iterator[tuple[str, int, Callable[[], bytes]]]:
    """Path and size of every file in an archive, and what reads it."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for one in wheel.infolist():
                yield one.filename, one.file_size, partial(wheel.read, one)
        return
    with tarfile.open(archive) as source:
        for entry in source:
            if stream := source.extractfile(entry) if entry.isfile() else None:
                yield entry.name.partition("/")[2], entry.size, stream.read
