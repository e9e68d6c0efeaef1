"""A model's folder: what must be so before transformers opens it, and what it raises as one sentence.

Transformers, tokenizers, safetensors and torch raise errors of their own at damaged files, of any class. What they would
take hours or all memory for is looked at first: how many layers a config names, how long a header is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from treeopt.errors import InvalidInput, TreeoptError, quoted
from treeopt.files.bounds import check_stored, open_regular
from treeopt.files.storage import load_json

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
WIDTHS = ("hidden_size", "n_embd", "d_model")
MOST_LAYERS = 1000
MOST_HEADER_BYTES = 2**25  # of a file of safetensors: the names and shapes
MOST_REASON_CHARS = 200  # of another library's message
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")


def read_object(file: Path) -> dict[str, object]:
    """The JSON object in a file of somebody else's; InvalidInput where there is none."""
    document = load_json(file, big_numbers=True)
    if not isinstance(document, dict):
        raise InvalidInput(f"{file} must hold a JSON object, but it holds a {type(document).__name__}.")
    return document


def check_header(file: Path) -> None:
    """ValueError where the header of safetensors says that it is longer than any is."""
    with file.open("rb") as stream:
        if int.from_bytes(stream.read(8), "little") > MOST_HEADER_BYTES:
            raise ValueError(
                f"the header of {file.name} may have {MOST_HEADER_BYTES // 2**20} MiB, but says that it has more"
            )


def check_folder(folder: Path) -> None:
    """InvalidInput where a config names more layers or tokens than there are weights for; ValueError for damaged files."""
    for file in folder.iterdir():
        if not file.is_dir():
            open_regular(file).close()
    weights = [file for pattern in WEIGHTS for file in folder.glob(pattern) if file.is_file()]
    for file in weights:
        check_header(file) if file.suffix == ".safetensors" else check_stored(file)
    if not (folder / "config.json").is_file():
        return
    config = read_object(folder / "config.json")
    check_config(config, folder / "config.json")
    held = sum(file.stat().st_size for file in weights)
    for part in parts_of(config):
        tokens = part.get("vocab_size")
        width = next((size for name in WIDTHS if isinstance(size := part.get(name), int)), 1)
        if held and isinstance(tokens, int) and tokens * width > 8 * held:  # weights have a bit at least
            raise InvalidInput(
                f"{folder / 'config.json'} must describe the weights beside it, but {quoted(tokens)} tokens of width "
                f"{quoted(width)} are more than these files can hold."
            )


def check_config(config: dict[str, object], file: Path) -> None:
    """InvalidInput for more layers than any model has: each takes memory before a weight is read."""
    for part in parts_of(config):
        for name in LAYERS:
            if isinstance(number := part.get(name), int) and number > MOST_LAYERS:
                raise InvalidInput(f"A model may have {MOST_LAYERS} layers, but {file} has {name} {quoted(number)}.")


def parts_of(config: dict[str, object]) -> list[dict[str, object]]:
    """A config and those nested in it, as of a model that also sees."""
    return [config, *(value for value in config.values() if isinstance(value, dict))]


@contextmanager
def loadable(must: str, name: str) -> Iterator[None]:
    """Whatever a library raises as InvalidInput: ``must`` begins its sentence, and the first line is the reason."""
    try:
        yield
    except (TreeoptError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # tokenizers and safetensors are in Rust, whose panics are no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InvalidInput(f"{must}, but {name}: {reason_of(error, path=name)}") from None


def reason_of(error: BaseException, path: str = "") -> str:
    """The message of a library's error in one line; of some errors the second line.

    path : that the sentence before has named already
    """
    if type(error).__name__ == "DatasetGenerationError" and error.__cause__ is not None:
        error = error.__cause__  # it says nothing itself
    text = str(error).replace(path, "it") if "/" in path else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = " ".join(lines[:2]) if lines and lines[0].endswith(":") else lines[0] if lines else ""
    kind = type(error).__name__
    if isinstance(error, OSError | ValueError | RuntimeError) and said:
        return said[:MOST_REASON_CHARS]
    return f"{kind}: {said}"[:MOST_REASON_CHARS].removesuffix(": ")
