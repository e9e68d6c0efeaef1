"""Archives of arrays (.npz): only those that are asked for are read, and only when their headers say that they are small.

An archive says of each member how long it is, and a member begins with the type and shape of its array. Both are read
first; a few bytes can unpack to gigabytes.
"""

import math
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from treeopt.errors import InvalidInput
from treeopt.files import bounds
from treeopt.files.bounds import MOST_ARRAY_BYTES, MOST_RATIO
from treeopt.files.writing import atomic_writer

NPY = ".npy"
LARGE_BYTES = 2**24  # of an array beside which nothing is compressed


def write(path: str | Path | BytesIO, arrays: Mapping[str, NDArray[Any]], *, compressed: bool = True) -> None:
    """Without pickles, and compressed where all arrays are small: large ones would take minutes."""
    is_small = compressed and all(array.nbytes < LARGE_BYTES for array in arrays.values())
    with nullcontext(path) if isinstance(path, BytesIO) else atomic_writer(path) as stream:
        (np.savez_compressed if is_small else np.savez)(stream, allow_pickle=False, **arrays)


def packed(write: Callable[[BytesIO], object]) -> bytes:
    """The bytes that are written into a stream."""
    made = BytesIO()
    write(made)
    return made.getvalue()


def read(path: str | Path, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, NDArray[Any]]:
    """The arrays of these names, as far as they are there, read-only; InvalidInput where a required one is not, or is damaged."""
    arrays = {}
    with _opened(path) as archive:
        members = set(archive.namelist())
        if missing := [name for name in required if name + NPY not in members]:
            raise InvalidInput(f"{path} must hold the array {missing[0]!r}, but it is missing.")
        there = [name for name in dict.fromkeys((*required, *optional)) if name + NPY in members]
        sizes = {name: _unpacked_bytes(archive, name) for name in there}
        most = min(MOST_ARRAY_BYTES, max(bounds.SMALL_BYTES, MOST_RATIO * Path(path).stat().st_size))
        if (held := sum(sizes.values())) > most:
            raise InvalidInput(
                f"The arrays of {path} may have {most // 2**20} MiB ({MOST_RATIO} times the file, {MOST_ARRAY_BYTES // 2**20} "
                f"MiB at most), but have {held // 2**20} MiB, {max(sizes, key=lambda name: sizes[name])!r} the most of them."
            )
        for name in there:
            with archive.open(name + NPY) as stream:
                arrays[name] = npy.read_array(stream, allow_pickle=False)
            arrays[name].setflags(write=False)
    return arrays


def names(path: str | Path) -> set[str]:
    """The names of an archive's arrays; InvalidInput where it is none."""
    with _opened(path) as archive:
        return {name.removesuffix(NPY) for name in archive.namelist() if name.endswith(NPY)}


def json_of(array: NDArray[Any], source: object) -> Any:
    """The document in an array of one text; InvalidInput where it is no text, or no JSON within bounds."""
    if array.dtype.kind != "U" or array.ndim:
        raise InvalidInput(f"{source} must be one text, but is of type {array.dtype} and shape {array.shape}.")
    try:
        return bounds.loads(str(array[()]))
    except (ValueError, SystemError) as error:  # the latter from letters beyond Unicode
        raise InvalidInput(f"{source} must be JSON, but cannot be read: {error}; was it cut off?") from None


class Form(NamedTuple):
    """What an array of a record must be.

    kind : type of its numbers
    axes : a name for each. Axes of one name have one length in all arrays of a record; "steps+1" is one longer than "steps"
    """

    kind: type[np.generic]
    axes: str


def fitting(arrays: Mapping[str, NDArray[Any]], forms: Mapping[str, Form]) -> dict[str, NDArray[Any]]:
    """The arrays of a record that its table of forms names; InvalidInput where one does not fit its form."""
    found = {name: _in_kind(arrays[name], form.kind, name) for name, form in forms.items() if name in arrays}
    check_shapes(found, forms)
    return found


def check_shapes(arrays: Mapping[str, NDArray[Any]], forms: Mapping[str, Form]) -> None:
    """Raise InvalidInput where arrays have other axes than their forms, or the same axis has two lengths."""
    lengths = dict[str, int]()
    for name, array in arrays.items():
        axes = forms[name].axes.split()
        if array.ndim != len(axes):
            raise InvalidInput(f"{name} must have the axes ({', '.join(axes)}), but has shape {array.shape}.")
        for axis, length in zip(axes, array.shape, strict=True):
            more = axis.endswith("+1")
            wanted = lengths.setdefault(axis.removesuffix("+1"), length - more) + more
            if length != wanted:
                raise InvalidInput(f"{name} must have {wanted} entries along {axis}, but has shape {array.shape}.")


def _in_kind(array: NDArray[Any], kind: type[np.generic], name: str) -> NDArray[Any]:
    """The array, whose numbers all fit into a type; InvalidInput where they do not, or are not of its kind."""
    wanted = np.dtype(kind)
    if array.dtype.kind not in ("f" if wanted.kind == "f" else "iu"):
        said = "numbers with a point" if wanted.kind == "f" else "whole numbers"
        raise InvalidInput(f"its {name} must be {said}, but are of type {array.dtype}.")
    if wanted.kind != "f" and array.size:
        limits, least, most = np.iinfo(wanted), int(array.min()), int(array.max())
        if not limits.min <= least <= most <= limits.max:
            raise InvalidInput(f"its {name} must fit into {wanted.name}, but go from {least} to {most}.")
    return array


@contextmanager
def _opened(path: str | Path) -> Iterator[zipfile.ZipFile]:
    """The archive; whatever damaged bytes raise becomes one InvalidInput."""
    try:
        with bounds.open_regular(path) as stream:
            bounds.check_directory(stream)
            with zipfile.ZipFile(stream) as archive:
                if len(archive.namelist()) > bounds.MOST_MEMBERS:
                    raise ValueError("it has too many members")
                yield archive
    except InvalidInput:
        raise
    except FileNotFoundError:
        raise InvalidInput(f"{path} does not exist.") from None
    except Exception:  # zipfile, zlib and numpy raise anything at damaged bytes
        raise InvalidInput(f"{path} is not a readable .npz file without pickles; was it cut off?") from None


def _unpacked_bytes(archive: zipfile.ZipFile, name: str) -> int:
    """Bytes of an array by its header, which the later versions of the format let be as long as they like."""
    if archive.getinfo(name + NPY).compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError("it is compressed by a method that may take any memory")
    with archive.open(name + NPY) as stream:
        if npy.read_magic(stream) != (1, 0):
            raise ValueError("its header may be too long")
        shape, _, kind = npy.read_array_header_1_0(stream)
    if min(shape, default=0) < 0:
        raise ValueError("an array has no negative length")
    return int(math.prod(shape) * kind.itemsize)
