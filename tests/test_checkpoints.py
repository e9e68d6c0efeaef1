"""Reading the published layouts of heads, writing each as any other, and refusing what is not one.

K heads · L blocks · d width · V vocabulary · Vt tokens of a truncated one
"""

import itertools
import json
import random
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from treeopt.errors import InvalidInput, TreeoptError, Unsupported
from treeopt.records.drafters import WRITTEN
from treeopt.runtime.checkpoints import Base, convert, load_heads, save_heads
from treeopt.runtime.checkpoints.medusa import SCHEMES
from treeopt.runtime.checkpoints.save import write_tensors
from treeopt.runtime.drafters.medusa import MedusaHeads
from treeopt.runtime.drafters.protocol import top_candidates
from treeopt.runtime.drafters.states import ranks_among
from treeopt.runtime.target import Target

from .conftest import examples
from .helpers.synthetic import check_damage, edit_json, read_file, small_llama, synthetic, write_file

WIDTH, VOCAB = 16, 40  # of the synthetic checkpoints, and of the small base here
MEDUSA = {"medusa_v01_pt": "medusa", "medusa_v01_safetensors": "medusa", "medusa_v01_two_layers_pt": "medusa",
          "medusa_v2_safetensors": "medusa-shared", "medusa2_merged": "merged", "modelopt_hf": "modelopt",
          "vllm_medusa": "vllm", "vllm_medusa_shared_head": "vllm",
          "vllm_medusa_token_map": "vllm"}  # fmt: skip
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
    assert (ours.vocab_size, ours.draft_vocab_size) == (theirs.vocab_size, theirs.draft_vocab_size)
    assert (ours.token_ids is None) == (theirs.token_ids is None)
    assert ours.token_ids is None or torch.equal(ours.token_ids, theirs.token_ids)
    assert torch.equal(ours.blocks, theirs.blocks)
    assert torch.equal(ours.biases, theirs.biases)
    assert all(torch.equal(a, b) for a, b in zip(projections(ours), projections(theirs), strict=True))
    if ours.shares_projection == theirs.shares_projection:
        for k in range(ours.num_heads):
            assert torch.equal(ours.logits(hidden, k), theirs.logits(hidden, k))


def projections(heads: MedusaHeads) -> torch.Tensor:
    return heads.projection.expand(heads.num_heads, -1, -1)


def weights_in(folder: Path) -> Path:
    """The file of ``folder`` that holds heads."""
    return load(folder, torch.zeros(VOCAB, WIDTH)).files[0]


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


def test_other_drafters_are_refused_by_what_they_are():
    with pytest.raises(Unsupported, match="MLP speculator"):
        load(synthetic("tgi_mlp_speculator"))


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
    ours = SCHEMES[0]
    theirs = next(scheme for scheme in SCHEMES if scheme.layout == layout)
    return {
        theirs.name(*ours.place(name)): weight.clone(memory_format=torch.contiguous_format)
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
    some = random_heads(vocab=VOCAB, token_ids=torch.tensor([1, 5, 9]))
    for heads, layout, options, message in (
        *((some, layout, {}, "know 3 of 40 tokens, and it has no token map") for layout in STACKED),
        (random_heads(), "medusa-shared", {}, "projections of their own"),
        (random_heads(), "medusa-shared", {"lm_head": lm_head}, "projections other than"),
        (random_heads(num_layers=2, shared=lm_head), "medusa-shared", {}, "2 residual blocks"),
        (random_heads(num_layers=2), "neuron", {}, "2 residual blocks"),
        (random_heads(), "merged", {}, "layout must be one of medusa, medusa-pt, medusa-shared, neuron, "),
        (random_heads(), "vllm", {}, "layout must be one of medusa, "),
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
    save_vllm(random_heads(), tmp_path / "vllm")
    with pytest.raises(InvalidInput, match="names its base model"):
        convert(str(tmp_path / "vllm"), "medusa", tmp_path / "named")
    assert convert(str(tmp_path / "vllm"), "neuron", tmp_path / "n")[1] == [tmp_path / "n" / "medusa_heads.pt"]


# Truncated vocabularies and shared projections


def truncated(tmp_path: Path, token_map: list[int], *, rows=None, layers=1, **config) -> Path:
    """A vLLM checkpoint with a token map in any order, its projections full if ``rows`` says so."""
    heads = random_heads(2, layers, vocab=rows or len(token_map), seed=3)
    sizes = {"vocab_size": VOCAB, "truncated_vocab_size": len(token_map), "medusa_fc_bias": True}
    save_vllm(heads, tmp_path, {"token_map": torch.tensor(token_map)}, **sizes | config)
    return tmp_path


def save_vllm(heads: MedusaHeads, folder: Path, more=(), **config) -> None:
    """Write heads as vLLM reads them."""
    folder.mkdir(exist_ok=True)
    save_file(named(heads, "vllm") | dict(more), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "medusa", "hidden_size": WIDTH, **config}))


@given(st.integers(0, 2**32), st.integers(1, 9), st.booleans())
@examples(15)
def test_truncated_heads_rank_and_propose_target_ids(tmp_path_factory, seed, width, full):
    """Against sorting pairs of (logit, target id) in the order of vLLM's file; bfloat16 is full of ties."""
    rng = random.Random(seed)
    token_map = rng.sample(range(VOCAB), 10)
    folder = truncated(tmp_path_factory.mktemp("t"), token_map, rows=VOCAB if full else None)
    heads = load(folder, dtype=torch.bfloat16).heads
    assert (heads.vocab_size, heads.draft_vocab_size) == (VOCAB, 10)
    assert heads.token_ids.tolist() == sorted(token_map)
    stored = load_file(folder / "model.safetensors")
    hidden = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16().round(decimals=0)
    labels = torch.tensor([[rng.randrange(VOCAB) for _ in range(2)] for _ in range(6)])
    candidates = heads.token_ids[top_candidates(heads.first(2)(hidden), width)]
    for k in range(2):
        rows = stored[f"lm_heads.{k}.weight"].bfloat16()
        draft = heads.logits(hidden, k).float()
        ranks = ranks_among(partial(heads.logits, k=k), hidden, labels[:, k].contiguous(), 8, VOCAB, heads.token_ids)
        for n in range(6):
            of_id = {token: draft[n, i].item() for i, token in enumerate(sorted(token_map))}
            order = sorted(of_id, key=lambda token: (-of_id[token], token))
            assert candidates[n, k].tolist() == order[:width]
            label = int(labels[n, k])
            assert ranks[n] == (order.index(label) if label in order[:8] else -1)
        weight = stored[f"blocks.{k}.layers.0.weight"].bfloat16()
        inner = torch.nn.functional.linear(hidden, weight, stored[f"blocks.{k}.layers.0.bias"].bfloat16())
        inner = hidden + torch.nn.functional.silu(inner)
        for i, token in enumerate(token_map):
            column = sorted(token_map).index(token)
            row = rows[token if full else i]
            torch.testing.assert_close(heads.logits(hidden, k)[:, column], inner @ row, rtol=0.05, atol=0.3)


@pytest.mark.parametrize(
    ("token_map", "options", "message"),
    [
        ([1, 2, 2], {}, "distinct token ids"),
        ([1, 2, 40], {}, "below the vocabulary's 40"),
        ([1, 2, -3], {}, "distinct token ids"),
        ([1, 2, 3], {"truncated_vocab_size": 4}, "truncated_vocab_size .* says 4"),
        ([1, 2, 3], {"rows": 5}, "in .* they have 5"),
        ([1, 2, 3], {"vocab_size": "many"}, "vocab_size .* says 'many'"),
        ([1, 2, 3], {"vocab_size": 10**30, "rows": 3}, "vocab_size must be a whole number"),
        ([1, 2, 3], {"hidden_size": 17}, "hidden_size 17"),
    ],
)
def test_token_maps_that_do_not_fit_are_refused(tmp_path, token_map, options, message):
    with pytest.raises(InvalidInput, match=message):
        load(truncated(tmp_path, token_map, **options))


def test_what_config_json_does_not_say_of_a_token_map_is_told(tmp_path):
    folder = truncated(tmp_path, [4, 2, 7], truncated_vocab_size=None)
    assert "lacks truncated_vocab_size" in " ".join(load(folder).notes)
    edit_json(folder / "config.json", vocab_size=None)
    assert load(folder, torch.zeros(VOCAB, WIDTH)).heads.vocab_size == VOCAB
    loaded = load(folder)
    assert loaded.heads.vocab_size == 8
    assert "8 is taken" in " ".join(loaded.notes)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("token_map")
    save_file(tensors, folder / "model.safetensors")
    edit_json(folder / "config.json", truncated_vocab_size=3, vocab_size=VOCAB)
    with pytest.raises(InvalidInput, match="no token_map"):
        load(folder)


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


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, lm_head, base):
    """A folder per layout: the published ones, and one of each of our own."""
    root = tmp_path_factory.mktemp("damaged")
    for layout in STACKED:
        heads = random_heads(2, shared=lm_head.float()) if layout == "medusa-shared" else random_heads(2)
        save_heads(heads, layout, root / layout, base="x")
    for name in MEDUSA:
        shutil.copytree(synthetic(name), root / name)
    return sorted(root.iterdir())


def is_heads(name: str) -> bool:
    return not name.startswith("model.") and name != "lm_head.weight"


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.long)], ids=["some", "all"])
def test_a_tensor_renamed_dropped_or_reshaped_is_refused_by_its_name(checkpoints, lm_head, tmp_path, every):
    """In the suite a third of the five changes to each tensor, other ones to the next."""
    number = itertools.count()
    for source in checkpoints:
        folder = tmp_path / source.name
        shutil.copytree(source, folder)
        # Without an index the file alone counts.
        (folder / "model.safetensors.index.json").unlink(missing_ok=True)
        file = weights_in(source)
        tensors = read_file(file)

        def may_lack(name: str, folder: Path = folder) -> bool:
            if folder.name != "vllm_medusa_shared_head" or not name.startswith("blocks.2"):
                return False
            notes = load(folder, lm_head).notes  # it is all that the last head has
            return notes == ("config.json says 3 heads, the file has 2: 2 are used.",)

        names = list(filter(is_heads, tensors))
        check_damage(
            lambda folder=folder: load(folder, lm_head), folder / file.name, tensors, may_lack, number, every, names
        )
        write_file({name: t.to(torch.int8) for name, t in tensors.items()}, folder / file.name)
        with pytest.raises(InvalidInput, match="int8"):
            load(folder, lm_head)


def test_a_wrong_count_is_repaired_and_a_wrong_size_refused(checkpoints, lm_head, tmp_path):
    for source in checkpoints:
        if not (source / "config.json").exists():
            continue  # Neuron's
        folder = tmp_path / source.name
        shutil.copytree(source, folder)
        layout, config = load(source, lm_head).layout, json.loads((source / "config.json").read_text())
        own, vllm = ("medusa_num_heads", "medusa_num_layers"), ("num_heads", "num_hidden_layers")
        heads, layers = vllm if layout == "vllm" else own
        change = {"medusa": {"num_medusa_heads": 9, "num_medusa_layers": []}}
        edit_json(folder / "config.json", **change if layout == "modelopt" else {heads: 9, layers: []})
        loaded = load(folder, lm_head)
        assert_same(loaded.heads, load(source, lm_head).heads)
        assert any(f"9 heads, the file has {loaded.heads.num_heads}" in note for note in loaded.notes)
        assert any("[] blocks per head, the file has" in note for note in loaded.notes)
        for key in ("hidden_size", "vocab_size"):
            for value in (17, "x", [16]):
                (folder / "config.json").write_text(json.dumps(config | {key: value}))
                with pytest.raises(InvalidInput, match=f"{key}|by config.json|vocabulary's 17"):
                    load(folder, lm_head)
        (folder / "config.json").unlink()
        if source.name not in ("vllm_medusa_shared_head",):
            load(folder, lm_head)  # nothing needs it


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
