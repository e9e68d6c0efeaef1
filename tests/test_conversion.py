"""The environment that converts models for OpenVINO, without installing it."""

import venv
from pathlib import Path

import pytest

from treeopt.errors import Unsupported
from treeopt.runtime.engines import openvino


@pytest.mark.parametrize("reached", [True, False])
def test_torch_is_its_cpu_build_where_that_is_to_be_had(reached, monkeypatch, tmp_path):
    """PyTorch's own index is not reached from everywhere; the usual one has a build for processors as well."""
    ran = []

    def run(command, done, place, **environment):
        ran.append([str(word) for word in command])
        if openvino.CPU_BUILDS in ran[-1] and not reached:
            raise Unsupported("not reached")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(venv, "create", lambda folder, **_: Path(folder, "bin").mkdir(parents=True, exist_ok=True))
    monkeypatch.setattr(openvino, "_run", run)
    openvino._environment(lambda message: None)
    first, *others = ran
    assert openvino.CPU_BUILDS in first
    assert first[-1].startswith("torch==")
    assert {"--no-deps", "--retries", "0"} <= set(first), "nothing else of that index, and no long wait for it"
    assert not any(openvino.CPU_BUILDS in command for command in others)
    assert first[-1] in others[0], "kept, or taken from the usual index"
