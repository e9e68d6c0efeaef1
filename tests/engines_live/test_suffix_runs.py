"""Suffix decoding drafts what ArcticInference's own package does, built from its sources (a few seconds), on random requests."""

from __future__ import annotations

import importlib
import random
import shutil
import subprocess
import sys
import tarfile
from typing import Any

import pytest

from treeopt.text.suffix import SuffixDecoding

from . import archives

pytestmark = pytest.mark.slow
PARTS = ("csrc/suffix_decoding/", "arctic_inference/suffix_decoding/")


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Any:
    """The package's suffix decoding alone: the rest of it wants a GPU."""
    pytest.importorskip("nanobind", reason="ArcticInference is built with nanobind: pip install nanobind")
    if missing := [name for name in ("cmake", "c++") if shutil.which(name) is None]:
        pytest.skip(f"no {' and no '.join(missing)} to build ArcticInference with")
    try:
        version, archive = archives.newest_archive("arctic-inference")
    except archives.AWAY as error:
        pytest.skip(f"no source of ArcticInference can be had: {error}")
    folder = tmp_path_factory.mktemp("arctic")
    with tarfile.open(archive) as packed:
        packed.extractall(
            folder, [one for one in packed if any(f"/{part}" in one.name for part in PARTS)], filter="data"
        )
    (top,) = folder.iterdir()
    own = top / "arctic_inference" / "suffix_decoding"
    subprocess.run(
        ["cmake", "-S", top / PARTS[0], "-B", folder / "build", f"-DPython_EXECUTABLE={sys.executable}"], check=True
    )
    subprocess.run(["cmake", "--build", folder / "build"], check=True)
    shutil.copy(next((folder / "build").glob("_C*")), own)
    print(f"ArcticInference {version}")
    sys.path.insert(0, str(top))
    try:
        return importlib.import_module("arctic_inference.suffix_decoding")
    finally:
        sys.path.remove(str(top))


@pytest.mark.parametrize("seed", range(4))
def test_every_draft_of_every_step_is_the_packages(package, seed):
    rng, steps = random.Random(seed), 0
    for _ in range(500):
        depth, cached, letters = rng.randint(2, 12), rng.choice([0, 1, 2, 5]), rng.randint(2, 4)
        limits = {"factor": rng.choice([0.5, 1.0, 2.0]), "offset": rng.choice([-1.0, 0.0, 1.5]), "least": rng.choice([0.0, 0.1, 0.34])}  # fmt: skip
        length = rng.randint(1, 8)
        ours, theirs = (
            SuffixDecoding(length, depth, cached=cached, **limits),
            package.SuffixDecodingCache(depth, cached),
        )
        asked = {"max_spec_tokens": length, **{f"max_spec_{name}": limits[name] for name in ("factor", "offset")}}
        for number in range(rng.randint(1, 8)):
            text = [rng.randrange(letters) for _ in range(rng.randint(1, 16))]
            state = ours.start(text)
            theirs.start_request(number, text)
            for at in range(rng.randint(1, 12)):
                if at:
                    draft = theirs.speculate(number, text[-depth:], min_token_prob=limits["least"], **asked)
                    assert list(ours.draft(state, 100).tokens) == draft.token_ids, (depth, cached, limits, text)
                    steps += 1
                new = [rng.randrange(letters) for _ in range(rng.randint(1, 3))]
                text += new
                ours.commit(state, new, len(new) - 1)
                theirs.add_active_response(number, new)
            theirs.stop_request(number)
    assert steps > 10_000
