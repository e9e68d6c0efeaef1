"""Models and drafters as OpenVINO reads them: converted once by optimum-intel, into the user's cache.

optimum-intel needs other versions than treeopt does, so it gets a virtual environment of its own in the cache; the user's
stays as it is. A folder in the cache is named for the weights that it was made from.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treeopt.errors import Unsupported
from treeopt.files.places import user_cache
from treeopt.files.shell import command_line
from treeopt.files.writing import discard, folder_made_once
from treeopt.runtime.checkpoints.eagle3 import eagle3_config, eagle3_tensors
from treeopt.runtime.checkpoints.save import write_tensors
from treeopt.runtime.drafters.draft_model import DraftModel
from treeopt.runtime.drafters.eagle3 import Eagle3Heads, Form
from treeopt.runtime.folder import loadable
from treeopt.runtime.target import Target

OPENVINO, OPTIMUM_INTEL = "2026.4.1", "2.2.0"
# optimum-intel's EAGLE-3 imports these without asking for them; diffusers 0.38 needs a newer huggingface_hub than it takes.
UNASKED = ("einops", "diffusers<0.38")
# Not needed for text: the first is broken where it was built for another torch, the second reports what is converted.
UNWANTED = ("torchvision", "openvino-telemetry")
FORMATS = ("fp32", "int8")
# PyPI's torch for Linux brings CUDA, some GB that nothing here uses.
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
# Says in an EAGLE-3 model which of the target's outputs it reads.
NAME_LAYERS = """
import os, sys, openvino
folder, *layers = sys.argv[1:]
file = os.path.join(folder, "openvino_model.xml")
model = openvino.Core().read_model(file)
model.set_rt_info([int(layer) for layer in layers], "hidden_layers_list")
openvino.save_model(model, "named.xml", compress_to_fp16=False)
del model
for suffix in ("xml", "bin"):
    os.replace(f"named.{suffix}", os.path.join(folder, f"openvino_model.{suffix}"))
"""
TASK = "text-generation-with-past"
Say = Callable[[str], None]


def converted(target: Target, weights: str, say: Say) -> Path:
    """The folder with a causal LM as OpenVINO reads it, its tokenizer beside it.

    weights : one of `FORMATS`
    """

    def save(folder: Path) -> None:
        target.model.save_pretrained(folder)
        target.tokenizer.save_pretrained(folder)

    about = (target.config.to_json_string(), target.model.generation_config.to_json_string(), _words(target.tokenizer))
    digest = _digest(target.model.state_dict().items(), *about)
    return _made(f"{target.name} ({weights})", f"{digest}-{weights}", save, ("--weight-format", weights), say)


def converted_drafter(drafter: DraftModel | Eagle3Heads, target: Target, say: Say) -> Path:
    """The folder with a draft model or EAGLE-3's layer as OpenVINO reads it."""
    if isinstance(drafter, DraftModel):
        return converted(drafter.model, "fp32", say)
    read, form = drafter.layers_of(target.num_layers), drafter.form
    if form != Form(form.width, form.vocab_size, layers=form.layers) or len(read) != 3 or min(read) < 1:
        raise Unsupported(
            "OpenVINO GenAI takes EAGLE-3 layers as its authors publish them, which read three of the target's layers. This "
            "drafter is another: decode with it in treeopt itself."
        )
    # GenAI reads outputs where the authors' code reads inputs, so it has to be told (docs/engines.md).
    outputs = [layer - 1 for layer in read]
    config = {key: value for key, value in eagle3_config(drafter, target.name).items() if key != "eagle_config"}
    tensors = eagle3_tensors(drafter)
    if drafter.token_ids is None:
        tensors |= {"d2t": torch.zeros(form.vocab_size, dtype=torch.long), "t2d": torch.ones(form.vocab_size) > 0}

    def save(folder: Path) -> None:
        write_tensors(folder / "model.safetensors", tensors)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")

    digest = _digest(tensors.items(), json.dumps([config, outputs]))
    options = ("--weight-format", "fp32", "--trust-remote-code")  # optimum-intel's own code: nothing is fetched
    return _made("The EAGLE-3 layer", f"{digest}-eagle3", save, options, say, outputs)


def _made(
    what: str, name: str, save: Callable[[Path], object], options: Sequence[str], say: Say, outputs: Sequence[int] = ()
) -> Path:
    """The folder of that name in the cache, made where it is missing."""
    cached = user_cache() / "openvino" / f"{name}-{OPENVINO}-{OPTIMUM_INTEL}"
    with folder_made_once(cached) as folder:
        if folder is None:
            return cached
        python = _environment(say)
        say(f"{what} is being converted for OpenVINO, once, into {cached}.")
        with tempfile.TemporaryDirectory(dir=cached.parent) as place:
            source = Path(place) / "model"
            source.mkdir()
            with loadable(f"{what} must be written for its conversion", place):
                save(source)
            command = [python, "-m", "optimum.commands.optimum_cli", "export", "openvino", "--model", source]
            _run([*command, "--task", TASK, *options, folder], "converted", place, HF_HUB_OFFLINE="1")
            if outputs:
                _run([python, "-c", NAME_LAYERS, folder, *outputs], "converted", place)
    return cached


def _environment(say: Say) -> Path:
    """The Python of the virtual environment that converts, which is made where it is missing."""
    version = "{}.{}".format(*sys.version_info[:2])
    folder = user_cache() / f"openvino-conversion-{OPENVINO}-{OPTIMUM_INTEL}-python-{version}"
    if folder.is_dir() and not _python(folder).exists():  # the Python that it was made with is gone
        discard(folder)
    with folder_made_once(folder) as made:
        if made is not None:
            say(
                f"The conversion to OpenVINO gets a virtual environment of its own, once: 1.3 GB and some minutes, in {folder}."
            )
            with loadable("A virtual environment must be made for the conversion", "venv"):
                venv.create(made, with_pip=True, symlinks=os.name != "nt")
            torch_ = f"torch=={torch.__version__.partition('+')[0]}"
            wanted = (f"optimum-intel[openvino]=={OPTIMUM_INTEL}", f"openvino=={OPENVINO}", torch_)
            pip = [_python(made), "-m", "pip", "--quiet", "--disable-pip-version-check"]
            without = ("install", "--no-compile", "--no-deps")
            with suppress(Unsupported):  # not to be reached everywhere; torch is then the usual index's
                only = ("--index-url", CPU_BUILDS, "--retries", "0", "--timeout", "10")
                _run([*pip, *without, *only, torch_], "installed", str(made))
            for task in (("install", "--no-compile", *wanted), (*without, *UNASKED), ("uninstall", "--yes", *UNWANTED)):
                _run([*pip, *task], "installed", str(made))
    return _python(folder)


def _python(environment: Path) -> Path:
    return environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _run(command: Sequence[Any], done: str, place: str, **environment: str) -> None:
    """Run a command to its end; Unsupported with what it said last where it fails."""
    words = list(map(str, command))
    own = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    result = subprocess.run(
        words, cwd=place, env={**own, **environment}, capture_output=True, text=True, errors="replace"
    )
    if result.returncode:
        lines = [line.strip() for line in (result.stderr or result.stdout).splitlines() if line.strip()]
        raise Unsupported(
            f"What OpenVINO needs cannot be {done}: {lines[-1][:300] if lines else 'no word of why'}. The command was: "
            f"{command_line(*words)}"
        )


def _words(tokenizer: Any) -> str:
    """All that a tokenizer is saved as."""
    with tempfile.TemporaryDirectory() as place:
        tokenizer.save_pretrained(place)
        return "".join(file.read_text(encoding="utf-8") for file in sorted(Path(place).rglob("*")) if file.is_file())


def _digest(tensors: Iterable[tuple[str, Tensor]], *texts: str) -> str:
    """Hex digest of all numbers of some tensors, their names, and some texts."""
    digest = hashlib.sha256("\0".join(texts).encode())
    for name, tensor in tensors:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
