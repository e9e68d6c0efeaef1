"""Archives of arrays (.npz): only the arrays that are asked for are read, and only if they are small when they are unpacked.

A few bytes can unpack to gigabytes. The archive says of each member how many bytes it unpacks to, and no more are unpacked.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import InvalidInput
from treeopt.files.bounds import MOST_ARRAY_BYTES, loads, open_regular
from treeopt.files.writing import atomic_writer

LARGE_BYTES = 2**24  # of an array beside which nothing is compressed


def write(path: str | Path | BytesIO, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write arrays without pickles. They are compressed where all are small: large ones would take minutes."""
    is_small = all(array.nbytes < LARGE_BYTES for array in arrays.values())
    with nullcontext(path) if isinstance(path, BytesIO) else atomic_writer(path) as stream:
        (np.savez_compressed if is_small else np.savez)(stream, allow_pickle=False, **arrays)


def packed(write: Callable[[BytesIO], object]) -> bytes:
    """The bytes that ``write`` writes into a stream."""
    stream = BytesIO()
    write(stream)
    return stream.getvalue()


def read(path: str | Path, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, NDArray[Any]]:
    """The required arrays and those of the optional ones that the file has, read-only.

    Raises InvalidInput where a required array is missing, where the arrays are too large, and for a damaged file.
    """
    arrays = {}
    with _opened(path) as archive:
        for name in required:
            if name not in archive.files:
                raise InvalidInput(f"{path} must hold the array {name!r}, but it is missing.")
        names = [name for name in dict.fromkeys((*required, *optional)) if name in archive.files]
        assert archive.zip is not None, "it is open"
        size = sum(archive.zip.getinfo(f"{name}.npy").file_size for name in names)
        if size > MOST_ARRAY_BYTES:
            raise InvalidInput(
                f"The arrays of {path} may have {MOST_ARRAY_BYTES // 2**20} MiB, but have {size // 2**20} MiB."
            )
        for name in names:
            arrays[name] = archive[name]
            arrays[name].setflags(write=False)
    return arrays


def names(path: str | Path) -> set[str]:
    """The names of an archive's arrays. Raises InvalidInput for a file that is no archive."""
    with _opened(path) as archive:
        return set(archive.files)


def json_of(array: NDArray[Any], source: object) -> Any:
    """The document in an array of one text. Raises InvalidInput where it is no text, or no JSON within the bounds."""
    if array.dtype.kind != "U" or array.ndim:
        raise InvalidInput(f"{source} must be one text, but is of type {array.dtype} and shape {array.shape}.")
    try:
        return loads(str(array[()]))
    except (ValueError, SystemError) as error:  # the latter from letters beyond Unicode
        raise InvalidInput(f"{source} must be JSON, but cannot be read: {error}; was it cut off?") from None


class Form(NamedTuple):
    """What an array of a record must be.

    kind        : type of its numbers
    axes        : a name for each axis. Axes of one name have one length in all arrays of a record; "steps+1" is one longer
                  than "steps"
    least, most : range of whole numbers in a file; None for that of their type
    """

    kind: type[np.generic]
    axes: str
    least: int | None = None
    most: int | None = None


def fitting(arrays: Mapping[str, NDArray[Any]], forms: Mapping[str, Form]) -> dict[str, NDArray[Any]]:
    """The arrays that a table of forms names. Raises InvalidInput where an array does not fit its form."""
    named = {name: arrays[name] for name in forms if name in arrays}
    for name, array in named.items():
        _check_numbers(name, array, forms[name])
    check_shapes(named, forms)
    return named


def check_shapes(arrays: Mapping[str, NDArray[Any]], forms: Mapping[str, Form]) -> None:
    """Raise InvalidInput where an array has other axes than its form, or an axis has two lengths."""
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


def _check_numbers(name: str, array: NDArray[Any], form: Form) -> None:
    """Raise InvalidInput where the numbers of an array are of another kind, do not fit into the type, or are out of range."""
    wanted = np.dtype(form.kind)
    if wanted.kind == "f":
        if array.dtype.kind != "f":
            raise InvalidInput(f"its {name} must be numbers with a point, but are of type {array.dtype}.")
        return
    if array.dtype.kind not in "iu":
        raise InvalidInput(f"its {name} must be whole numbers, but are of type {array.dtype}.")
    if not array.size:
        return
    limits, least, most = np.iinfo(wanted), int(array.min()), int(array.max())
    if not limits.min <= least <= most <= limits.max:
        raise InvalidInput(f"its {name} must fit into {wanted.name}, but go from {least} to {most}.")
    low = limits.min if form.least is None else form.least
    high = limits.max if form.most is None else form.most
    if not low <= least <= most <= high:
        raise InvalidInput(f"its {name} must be from {low} to {high}, but go from {least} to {most}.")


@contextmanager
def _opened(path: str | Path) -> Iterator[np.lib.npyio.NpzFile]:
    """The archive; whatever damaged bytes raise becomes one InvalidInput."""
    try:
        with open_regular(path) as stream, np.load(stream, allow_pickle=False) as archive:
            yield archive
    except InvalidInput:
        raise
    except FileNotFoundError:
        raise InvalidInput(f"{path} does not exist.") from None
    except Exception:  # zipfile, zlib and numpy raise anything at damaged bytes
        raise InvalidInput(f"{path} is not a readable .npz file without pickles; was it cut off?") from None
