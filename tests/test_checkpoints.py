"""Reading the published layouts of heads, writing each as any other, and refusing what is not one.

K heads · L blocks · d width · V vocabulary
"""

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from treeopt.errors import InvalidInput, TreeoptError
from treeopt.records.drafters import WRITTEN
from treeopt.runtime.checkpoints import Base, convert, load_heads, save_heads
from treeopt.runtime.checkpoints.medusa import PREFIXES
from treeopt.runtime.checkpoints.save import write_tensors
from treeopt.runtime.drafters.medusa import MedusaHeads
from treeopt.runtime.target import Target

from .conftest import some_long
from .helpers.synthetic import check_damage, edit_json, read_file, small_llama, synthetic, write_file

WIDTH, VOCAB = 16, 40  # of the synthetic checkpoints, and of the small base here
MEDUSA = {"medusa_v01_pt": "medusa", "medusa_v01_safetensors": "medusa", "medusa_v01_two_layers_pt": "medusa",
          "medusa_v2_safetensors": "medusa-shared", "medusa2_merged": "merged", "modelopt_hf": "modelopt"}  # fmt: skip
# Each of these has tests of its own.
SEQUENTIAL = ("hydra", "hydra-pt", "eagle-1", "eagle-3", "p-eagle", "dflash", "dflash2",
              "dspark")  # fmt: skip
STACKED = tuple(layout for layout in WRITTEN if layout not in SEQUENTIAL)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Target:
    """A small model whose folder is its name."""
    model = small_llama(max_position_embeddings=96, initializer_range=0.6, pad_token_id=0).double()
    folder = tmp_path_factory.mktemp("base")
    model.save_pretrained(folder)
    return Target(model, name=str(folder))


@pytest.fixture(scope="module")
def lm_head(base) -> torch.Tensor:
    return base.lm_head.weight


def load(path, lm_head=None, dtype=None):
    return load_heads(str(path), Base(lm_head, dtype=dtype))


def random_heads(num_heads=3, num_layers=1, vocab=VOCAB, *, seed=0, biases=True, **options):
    torch.manual_seed(seed)
    heads = MedusaHeads(num_heads, num_layers, WIDTH, vocab, **options).requires_grad_(False)
    torch.nn.init.normal_(heads.blocks)
    if biases:
        torch.nn.init.normal_(heads.biases)
    if not heads.shares_projection:
        torch.nn.init.normal_(heads.projection)
    return heads


def assert_same(ours: MedusaHeads, theirs: MedusaHeads) -> None:
    """The same weights over the same tokens; bit-equal logits where they are stored in the same way."""
    hidden = torch.randn(5, ours.width, dtype=ours.blocks.dtype)
    assert (ours.num_heads, ours.num_layers) == (theirs.num_heads, theirs.num_layers)
    assert ours.vocab_size == theirs.vocab_size
    assert torch.equal(ours.blocks, theirs.blocks)
    assert torch.equal(ours.biases, theirs.biases)
    assert all(torch.equal(a, b) for a, b in zip(projections(ours), projections(theirs), strict=True))
    if ours.shares_projection == theirs.shares_projection:
        for k in range(ours.num_heads):
            assert torch.equal(ours.logits(hidden, k), theirs.logits(hidden, k))


def projections(heads: MedusaHeads) -> torch.Tensor:
    return heads.projection.expand(heads.num_heads, -1, -1)


# Layouts, one as any other


@pytest.mark.parametrize("source", STACKED)
def test_every_layout_becomes_every_other(source, base, lm_head, tmp_path):
    """Projections that are copies of the lm_head, so that the layouts without any can hold them too."""
    heads = random_heads()
    heads.projection.copy_(lm_head.T)
    heads = heads.double()
    save_heads(heads, source, tmp_path / "source", base=base.name, lm_head=lm_head)
    for layout in STACKED:
        there = tmp_path / layout
        read, files = convert(str(tmp_path / "source"), layout, there, base=base.name)
        assert all(file.is_file() for file in files)
        assert read.layout == source.removesuffix("-pt")
        loaded = load(there, lm_head)
        assert loaded.layout == layout.removesuffix("-pt")
        assert_same(loaded.heads, heads)


@pytest.mark.parametrize("layout", sorted({*STACKED} - {"medusa-shared"}))
@pytest.mark.parametrize(("num_layers", "biases"), [(1, False), (2, True)])
def test_heads_survive_their_file(layout, num_layers, biases, base, tmp_path):
    if layout == "neuron" and num_layers == 2:
        return  # which it cannot hold
    heads = random_heads(4, num_layers, biases=biases)
    written = save_heads(heads, layout, tmp_path, base=base.name)
    assert sorted(tmp_path.iterdir()) == sorted(written)  # and nothing unfinished
    loaded = load(tmp_path)
    assert loaded.notes == ()
    assert_same(loaded.heads, heads)


@pytest.mark.parametrize("name", MEDUSA)
def test_published_layouts_load(name, lm_head):
    loaded = load(synthetic(name), lm_head.float())
    heads = loaded.heads
    assert loaded.layout == MEDUSA[name]
    assert heads.num_layers == (2 if "two_layers" in name else 1)
    assert (heads.width, heads.vocab_size) == (WIDTH, VOCAB)
    assert ("config.json says 2 heads, the file has 4: 4 are used." in loaded.notes) == (name == "medusa_v01_pt")


# What engines want


def test_each_engine_finds_its_config(base, tmp_path):
    heads, config = random_heads(3, 1), {}
    for layout in ("medusa", "medusa-pt"):
        save_heads(heads, layout, tmp_path / layout, base=base.name)
        config[layout] = json.loads((tmp_path / layout / "config.json").read_text())
    counts = {"medusa_num_heads": 3, "medusa_num_layers": 1}
    assert config["medusa"] == {**counts, "base_model_name_or_path": base.name} == config["medusa-pt"]
    save_heads(heads, "neuron", tmp_path / "neuron", base="x")
    assert [file.name for file in (tmp_path / "neuron").iterdir()] == ["medusa_heads.pt"]


def test_shared_heads_are_version_2_and_share_what_they_are_given(lm_head, tmp_path):
    save_heads(random_heads(shared=lm_head).double(), "medusa-shared", tmp_path, base="x")
    assert json.loads((tmp_path / "config.json").read_text())["version"] == "2"
    names = {f"{k}.0.linear.{kind}" for k in range(3) for kind in ("weight", "bias")}
    assert set(load_file(tmp_path / "medusa_lm_head.safetensors")) == names
    loaded = load(tmp_path, lm_head, torch.float64)
    assert loaded.heads.projection.data_ptr() == lm_head.data_ptr()
    assert loaded.notes == ("The heads share the target's lm_head.",)
    for other, message in (
        (None, "it needs the target: pass model"),
        (lm_head[:, :15], r"width 16 .* shape \(40, 15\)"),
    ):
        with pytest.raises(InvalidInput, match=message):
            load(tmp_path, other)


def named(heads: MedusaHeads, layout: str) -> dict[str, torch.Tensor]:
    """The heads' tensors by the names of a layout."""
    return {
        PREFIXES[layout] + name: weight.clone(memory_format=torch.contiguous_format)
        for name, weight in heads.weights.items()
    }


def save_merged(heads: MedusaHeads, folder: Path, base: Target) -> None:
    """Write one model with the heads in a shard of their own, as Medusa-2 is published."""
    folder.mkdir(exist_ok=True)
    shards = [folder / f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    shutil.copy(Path(base.name) / "model.safetensors", shards[0])
    save_file(named(heads, "merged"), shards[1])
    where = {name: shard.name for shard in shards for name in load_file(shard)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    shutil.copy(Path(base.name) / "config.json", folder)


def test_heads_of_a_model_that_contains_them_name_it_as_their_base(base, tmp_path):
    """A model with heads is read as heads of itself, and they are written without it."""
    save_merged(random_heads(), tmp_path / "model", base)
    read, files = convert(str(tmp_path / "model"), "medusa", tmp_path / "heads")
    assert read.layout == "merged"
    assert [file.name for file in files] == ["medusa_lm_head.safetensors", "config.json"]
    config = json.loads((tmp_path / "heads" / "config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "model")
    assert_same(load(tmp_path / "heads").heads, random_heads())


def test_only_the_shards_with_heads_are_read(base, tmp_path):
    save_merged(random_heads(), tmp_path, base)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"not even a shard")
    loaded = load(tmp_path)
    assert [file.name for file in loaded.files] == ["model-00002-of-00002.safetensors"]
    assert_same(loaded.heads, random_heads())


def test_pickled_models_and_prefixed_heads_are_read_too(base, tmp_path):
    heads = random_heads()
    save_merged(heads, tmp_path / "a", base)
    tensors = {name: one for file in (tmp_path / "a").glob("*.safetensors") for name, one in load_file(file).items()}
    alone = {name: tensor for name, tensor in tensors.items() if name.startswith("medusa_head.")}
    for file, some, layout in (
        ("pytorch_model.bin", tensors, "merged"),
        ("medusa_lm_head.safetensors", alone, "medusa"),
    ):
        write_file(some, tmp_path / file)
        loaded = load(tmp_path)
        assert loaded.layout == layout
        assert_same(loaded.heads, heads)


def test_what_a_layout_cannot_hold_is_refused(base, lm_head, tmp_path):
    for heads, layout, options, message in (
        (random_heads(), "medusa-shared", {}, "projections of their own"),
        (random_heads(), "medusa-shared", {"lm_head": lm_head}, "projections other than"),
        (random_heads(num_layers=2, shared=lm_head), "medusa-shared", {}, "2 residual blocks"),
        (random_heads(num_layers=2), "neuron", {}, "2 residual blocks"),
        (random_heads(), "merged", {}, "layout must be one of medusa, medusa-pt, medusa-shared, neuron, "),
        (random_heads(), "gguf", {}, "layout must be one of medusa, "),
        (random_heads(), "hydra", {}, "these are 'medusa' heads, whose layouts are medusa, medusa-pt, "),
    ):
        with pytest.raises(TreeoptError, match=message):
            save_heads(heads, layout, tmp_path, base="x", **options)
    assert not list(tmp_path.iterdir())


def test_the_output_is_a_folder_of_its_own(base, tmp_path):
    saved = save_heads(random_heads(), "medusa", tmp_path, base="x")
    assert save_heads(random_heads(seed=1), "medusa", tmp_path, base="x") == saved  # again is fine
    assert_same(load(tmp_path).heads, random_heads(seed=1))
    with pytest.raises(InvalidInput, match=r"has medusa_lm_head.safetensors"):
        save_heads(random_heads(), "medusa-pt", tmp_path, base="x")
    with pytest.raises(InvalidInput, match="is a file"):
        save_heads(random_heads(), "medusa", saved[0], base="x")


def test_a_conversion_says_when_it_needs_the_base(base, lm_head, tmp_path):
    heads = random_heads(shared=lm_head.float())
    save_heads(heads, "medusa-shared", tmp_path / "shared", base="a/base")
    with pytest.raises(InvalidInput, match="pass it with model"):
        convert(str(tmp_path / "shared"), "medusa", tmp_path / "out")
    convert(str(tmp_path / "shared"), "medusa", tmp_path / "out", lm_head=lm_head)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["base_model_name_or_path"] == "a/base"
    save_heads(random_heads(), "neuron", tmp_path / "nameless", base="x")
    with pytest.raises(InvalidInput, match="names its base model"):
        convert(str(tmp_path / "nameless"), "medusa", tmp_path / "named")
    assert convert(str(tmp_path / "nameless"), "neuron", tmp_path / "n")[1] == [tmp_path / "n" / "medusa_heads.pt"]


def test_a_shared_projection_is_one_and_does_what_copies_do(lm_head):
    shared, own = random_heads(shared=lm_head).double(), random_heads().double()
    own.projection.copy_(lm_head.T)
    assert shared.projection.shape == (1, WIDTH, VOCAB)
    hidden = torch.randn(7, WIDTH, dtype=torch.float64)
    for depth in (1, 3):
        torch.testing.assert_close(shared.first(depth)(hidden), own.first(depth)(hidden))
    for k in range(3):
        torch.testing.assert_close(shared.logits(hidden, k), own.logits(hidden, k))


# Damage


DAMAGED = [
    *("medusa_v01_safetensors", "hydra_mlp_pt"),
    *some_long("neuron", "eagle1_bin", *(name for name in MEDUSA if name != "medusa_v01_safetensors")),
]


def published(name: str, folder: Path) -> Path:
    """A checkpoint that may be changed; without an index the file alone counts."""
    shutil.copytree(synthetic(name), folder, dirs_exist_ok=True)
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    return folder


@pytest.mark.parametrize("name", DAMAGED)
def test_a_tensor_renamed_dropped_or_reshaped_is_refused_by_its_name(name, lm_head, tmp_path, request):
    """In the suite a third of the seven changes to each tensor, other ones to the next."""
    if name == "neuron":
        save_heads(random_heads(2), name, tmp_path, base="x")
    else:
        published(name, tmp_path)
    (file,) = load(tmp_path, lm_head).files
    tensors, every = read_file(file), 1 if request.node.get_closest_marker("long") else 3
    names = [tensor for tensor in tensors if not tensor.startswith("model.") and tensor != "lm_head.weight"]

    def may_lack(tensor: str) -> bool:
        return tensor == "fc.bias"

    check_damage(lambda: load(tmp_path, lm_head), file, tensors, may_lack, itertools.count(), every, names)
    write_file({tensor: values.to(torch.int8) for tensor, values in tensors.items()}, file)
    with pytest.raises(InvalidInput, match="int8"):
        load(tmp_path, lm_head)


@pytest.mark.parametrize(
    "name", ["medusa_v01_pt", *some_long("medusa_v2_safetensors", "medusa2_merged", "modelopt_hf")]
)
def test_a_wrong_count_is_repaired_and_a_wrong_size_refused(name, lm_head, tmp_path):
    config = json.loads((published(name, tmp_path) / "config.json").read_text())
    heads = load(tmp_path, lm_head).heads
    nested, usual = "num_medusa_heads", {"medusa_num_heads": 9, "medusa_num_layers": []}
    change = {"medusa": {nested: 9, "num_medusa_layers": []}} if name == "modelopt_hf" else usual
    edit_json(tmp_path / "config.json", **change)
    loaded = load(tmp_path, lm_head)
    assert_same(loaded.heads, heads)
    assert any(f"9 heads, the file has {heads.num_heads}" in note for note in loaded.notes)
    assert any("[] blocks per head, the file has" in note for note in loaded.notes)
    for key, value in itertools.product(("hidden_size", "vocab_size"), (17, "x", [16])):
        (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
        with pytest.raises(InvalidInput, match=key):
            load(tmp_path, lm_head)
    (tmp_path / "config.json").unlink()
    load(tmp_path, lm_head)  # nothing needs it


@pytest.mark.parametrize(
    "names",
    [
        ["9999.0.linear.weight"],
        ["0.9999.linear.weight", "0.0.linear.bias"],
        ["00.0.linear.weight"],
        ["0.0.linear.weight", "0.0.linear.bias", "0.1.weight", "\ud800"],
        ["0.0.linear.weight", "0.0.linear.bias", "0.1.weight", "x" * 500],
        ["٣.0.linear.weight"],  # a digit, but not ours
        ["hydra_mlp.9999.9999.linear.weight", "x" * 500],
        ["hydra_lm_head.9999.weight"],
        ["hydra_mlp.٣.0.linear.weight"],
    ],
)
def test_odd_names_are_refused(tmp_path, names):
    file = "hydra_lm_head.pt" if names[0].startswith("hydra") else "medusa_lm_head.pt"
    torch.save({name: torch.zeros(8, 8) for name in names}, tmp_path / file)
    with pytest.raises(InvalidInput) as caught:
        load(tmp_path)
    assert len(str(caught.value).encode()) < 600


def test_tensors_larger_than_their_bytes_are_refused(tmp_path):
    tensors = {"0.0.linear.weight": torch.zeros(1).expand(2**20, 2**20), "0.0.linear.bias": torch.zeros(8)}
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(InvalidInput, match=r"plain tensors, but '0.0.linear.weight'"):
        load(tmp_path)
    header = b'{"0.0.linear.weight":{"dtype":"F32","shape":[1048576,1048576],"data_offsets":[0,4398046511104]}}'
    file = tmp_path / "medusa_lm_head.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    with pytest.raises(InvalidInput, match="not readable"):
        load(tmp_path)
    empty = {"0.0.linear.weight": torch.zeros(0, 0), "0.0.linear.bias": torch.zeros(0), "0.1.weight": torch.zeros(0, 0)}
    save_file(empty, file)
    with pytest.raises(InvalidInput, match=r"'0.1.weight' must have the shape"):
        load(tmp_path)


def test_weights_beyond_the_dtype_are_refused(tmp_path):
    heads = random_heads()
    heads.projection[1, 2, 3] = 1e6
    save_heads(heads, "medusa", tmp_path, base="x")
    with pytest.raises(InvalidInput, match=r"'1.1.weight' .* too large for float16"):
        load(tmp_path, dtype=torch.float16)


class Executes:
    def __reduce__(self):
        return (pytest.fail, ("the checkpoint was executed",))


def test_missing_truncated_and_executable_files_are_refused(tmp_path):
    for path, message in (
        (tmp_path / "nowhere", "does not exist"),
        (tmp_path, "has no weights"),
        ("x" * 5000, "is none of"),
    ):
        with pytest.raises(InvalidInput, match=message):
            load(path)
    broken = {"a.txt": b"x", "b.pt": b"", "c.safetensors": b"version https://git-lfs", "d.bin": b"\x80"}
    pickled = {"bad.pt": Executes(), "list.pt": [1], "other.pt": {"a": 1}, "keys.bin": {1: torch.zeros(1)}}
    for name, content in (broken | pickled).items():
        (tmp_path / name).write_bytes(content) if name in broken else torch.save(content, tmp_path / name)
        with pytest.raises(InvalidInput, match=r"must (be safetensors or a pickled|hold a state dict|end in)"):
            load(tmp_path / name)


def test_an_index_points_to_files_beside_it(base, tmp_path):
    save_merged(random_heads(), tmp_path, base)
    index = tmp_path / "model.safetensors.index.json"
    where = json.loads(index.read_text())["weight_map"]
    outside = tmp_path.parent / "outside.safetensors"
    save_file({"x": torch.zeros(1)}, outside)
    for weight_map, message in (
        (None, "must have a weight_map"),
        ({}, "must have a weight_map"),
        (where | {"medusa_head.0.1.weight": "../outside.safetensors"}, "which is not there"),
        (where | {"medusa_head.0.1.weight": "model-00001-of-00002.safetensors"}, "but it does not"),
        (where | {"medusa_head.0.1.weight": 5}, "which is not there"),
        ({n: f for n, f in where.items() if n != "medusa_head.0.1.weight"}, "'medusa_head.0.1.weight' is missing"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(InvalidInput, match=message):
            load(tmp_path)


def test_two_files_of_heads_are_told_apart(tmp_path):
    save_heads(random_heads(), "medusa", tmp_path, base="x")
    torch.save({"0.0.linear.weight": torch.zeros(1)}, tmp_path / "medusa_lm_head.pt")
    loaded = load(tmp_path)
    assert loaded.files == (tmp_path / "medusa_lm_head.safetensors",)
    assert "medusa_lm_head.safetensors is read" in loaded.notes[0]


# The hub


def test_a_hub_id_is_downloaded(monkeypatch, tmp_path):
    save_heads(random_heads(), "medusa", tmp_path, base="x")
    asked = []

    def download(repo_id, *, revision, allow_patterns):
        asked.append((repo_id, revision, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    loaded = load_heads("someone/medusa-heads", Base(), "v2")
    assert_same(loaded.heads, random_heads())
    ((repo_id, revision, patterns),) = asked
    assert (repo_id, revision) == ("someone/medusa-heads", "v2")
    assert {"config.json", "*.safetensors", "*.pt", "*.bin"} <= set(patterns)
    monkeypatch.undo()  # the suite is offline
    with pytest.raises(
        InvalidInput, match=r"^[^\n]*nobody/nothing is none of these here, and as a hub id it cannot be"
    ):
        load("nobody/nothing")


def test_weights_can_be_read_by_whom_their_folder_lets(tmp_path):
    (tmp_path / "usual").touch()
    for name in ("weights.safetensors", "weights.pt"):
        write_tensors(tmp_path / name, {"weight": torch.zeros(2)})
        assert (tmp_path / name).stat().st_mode == (tmp_path / "usual").stat().st_mode
