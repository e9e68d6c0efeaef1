"""Reading and writing the published layouts of Hydra and EAGLE-1, and refusing what is not one."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.nn.functional import silu

from treeopt.errors import InvalidInput, Unsupported
from treeopt.records.drafters import LAYOUTS, WRITTEN
from treeopt.runtime.checkpoints import Base, convert, load_heads, save_heads
from treeopt.runtime.drafters.hydra import HydraHeads
from treeopt.runtime.drafters.layer import EagleHeads, layer_config

from .helpers.synthetic import edit_json, read_file, small_llama, synthetic, write_file

WIDTH, VOCAB = 16, 40
PUBLISHED = {"hydra_mlp_pt": "hydra", "eagle1_bin": "eagle-1"}
WEIGHTS = ("hydra_lm_head.pt", "hydra_lm_head.safetensors", "pytorch_model.bin", "model.safetensors")


@pytest.fixture(scope="module")
def model():
    return small_llama(bos_token_id=None)


@pytest.fixture(params=PUBLISHED)
def published(request, tmp_path) -> Path:
    return copied(request.param, tmp_path)


def copied(name: str, folder: Path) -> Path:
    """A copy of a synthetic checkpoint that may be changed."""
    return Path(shutil.copytree(synthetic(name), folder / name))


hydra_only = pytest.mark.parametrize("published", ["hydra_mlp_pt"], indirect=True)


def load(path, *, dtype=None, lm_head=None, **options):
    return load_heads(str(path), Base(torch.ones(VOCAB, WIDTH) if lm_head is None else lm_head, dtype=dtype, **options))


def with_target(path, model, **options):
    return load(
        path,
        lm_head=model.lm_head.weight,
        embedding=model.get_input_embeddings().weight,
        config=model.config,
        **options,
    )


def weights_of(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    file = next(folder / name for name in WEIGHTS if (folder / name).exists())
    return file, read_file(file)


def same_bytes(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


def layouts_of(kind: str) -> list[str]:
    return [name for name in LAYOUTS if name.removesuffix("-pt") == kind]


def random_heads(kind: str, model, *, num_layers=2, seed=0):
    torch.manual_seed(seed)
    embedding, lm_head = model.get_input_embeddings().weight, model.lm_head.weight
    if kind == "eagle-1":
        heads = EagleHeads(layer_config(model.config, WIDTH), embedding=embedding, lm_head=lm_head, bias=False)
    else:
        heads = HydraHeads(3, num_layers, VOCAB, embedding=embedding)
    for weight in heads.parameters():
        torch.nn.init.normal_(weight)
    return heads.requires_grad_(False)


# Round trips


def test_a_published_checkpoint_comes_back_byte_for_byte(published, model, tmp_path):
    kind = PUBLISHED[published.name]
    loaded = load(published)
    assert (loaded.layout, loaded.heads.kind) == (kind, kind.replace("eagle-1", "eagle"))
    assert (loaded.heads.width, loaded.heads.vocab_size) == (WIDTH, VOCAB)
    assert not any(weight.requires_grad for weight in loaded.heads.parameters())
    assert loaded.files == (weights_of(published)[0],)
    config = json.loads((published / "config.json").read_text())
    for layout in layouts_of(kind):
        files = save_heads(loaded.heads, layout, tmp_path / layout, base=loaded.base or "")
        assert sorted((tmp_path / layout).iterdir()) == sorted(files)
        same_bytes(weights_of(tmp_path / layout)[1], weights_of(published)[1])
        written = json.loads((tmp_path / layout / "config.json").read_text())
        changed = {key for key in config if written.get(key) != config[key]}
        assert changed <= {"torch_dtype"}  # the synthetic one says float16 and stores float32
        again = with_target(tmp_path / layout, model)
        assert again.heads.num_heads == loaded.heads.num_heads
        same_bytes(dict(again.heads.state_dict()), dict(loaded.heads.state_dict()))


def test_conversions_stay_within_a_kind(published, model, tmp_path):
    for layout in WRITTEN:
        options = {"base": "a/base", "lm_head": model.lm_head.weight}
        if layout in layouts_of(PUBLISHED[published.name]):
            convert(str(published), layout, tmp_path / layout, **options)
            same_bytes(weights_of(tmp_path / layout)[1], weights_of(published)[1])
        else:
            with pytest.raises(Unsupported, match=r"these are '(hydra|eagle)' heads"):
                convert(str(published), layout, tmp_path / layout, **options)


# What the tensors mean


@hydra_only
def test_hydras_tensors_are_the_heads_of_the_paper(published):
    """The hidden state first, then the path in the order of the text; later blocks are residual."""
    heads, t = load(published, dtype=torch.float64).heads, weights_of(published)[1]
    t = {name: tensor.double() for name, tensor in t.items()}
    hidden, path = torch.randn(WIDTH, dtype=torch.float64), [7, 31, 2]
    x = torch.cat([hidden, *(t["input_embed_fn.weight"][token] for token in path)])
    assert heads.num_layers == 3
    first = "hydra_mlp.2.0."
    y = t[first + "res_connection.weight"] @ x + t[first + "res_connection.bias"]
    y = y + silu(t[first + "linear.weight"] @ x + t[first + "linear.bias"])
    for place in (1, 2):
        y = y + silu(t[f"hydra_mlp.2.{place}.linear.weight"] @ y + t[f"hydra_mlp.2.{place}.linear.bias"])
    expected = t["hydra_lm_head.2.weight"] @ y + t["hydra_lm_head.2.bias"]
    torch.testing.assert_close(heads.logits(x, 2), expected)


def test_eagle_guesses_five_tokens_or_as_many_as_are_asked():
    published = synthetic("eagle1_bin")
    assert load(published).heads.num_heads == 5
    assert load(published, num_heads=3).heads.num_heads == 3


# What is told


@hydra_only
def test_counts_come_from_the_tensors(published, model):
    edit_json(published / "config.json", hydra_num_heads=9, hydra_num_layers=[], hydra_head_arch=None)
    notes = load(published).notes
    assert "config.json says 9 heads, the file has 4: 4 are used." in notes
    assert any(note.startswith("config.json says [] blocks per head, the file has") for note in notes)
    (published / "config.json").unlink()
    assert with_target(published, model).heads.num_heads == 4


@pytest.mark.parametrize(
    ("there", "claim", "note"),
    [
        (True, True, None),
        (True, None, None),  # absent is true
        (True, False, "config.json says bias False, but fc has one in the file, which decides."),
        (False, False, None),
        (False, True, "config.json says bias True, but fc has none in the file, which decides."),
        (False, None, "config.json lacks bias, which means true in EAGLE, but fc has none in the file, which decides."),
    ],
)
def test_eagles_bias_is_what_the_file_has(tmp_path, there, claim, note):
    published = copied("eagle1_bin", tmp_path)
    file, tensors = weights_of(published)
    if not there:
        tensors.pop("fc.bias")
    write_file(tensors, file)
    edit_json(published / "config.json", bias=claim)
    loaded = load(published)
    assert (loaded.heads.fc.bias is not None) == there
    assert loaded.notes[0].startswith("EAGLE-1 and EAGLE-2 share this layout: a static tree")
    assert loaded.notes[1:] == ((note,) if note else ())


def test_the_targets_embeddings_are_shared_where_the_file_has_a_copy(published, model):
    name = "embed_tokens.weight" if PUBLISHED[published.name] == "eagle-1" else "input_embed_fn.weight"
    target = model.get_input_embeddings().weight
    other = with_target(published, model)
    assert any(name in note and "not a copy" in note for note in other.notes)
    file, tensors = weights_of(published)
    assert torch.equal(other.heads.embedding, tensors[name])  # what they were trained with
    for copy in (target, target.bfloat16(), target.half()):
        write_file(tensors | {name: copy}, file)
        loaded = with_target(published, model, dtype=torch.float32)
        assert loaded.heads.embedding.data_ptr() == target.data_ptr()
        assert not any(name in note for note in loaded.notes)
    tensors.pop(name)
    write_file(tensors, file)
    loaded = with_target(published, model)
    assert loaded.heads.embedding.data_ptr() == target.data_ptr()
    assert any(f"no {name}" in note for note in loaded.notes)
    with pytest.raises(InvalidInput, match=f"'{name}' is missing"):
        load(published)


def test_copy_of_the_targets_head(model, tmp_path):
    """vLLM's checkpoints of EAGLE-1 have a copy of lm_head; another one is refused."""
    published = copied("eagle1_bin", tmp_path)
    file, tensors = weights_of(published)
    head = model.lm_head.weight.detach()
    write_file(tensors | {"lm_head.weight": head.half()}, file)
    heads = with_target(published, model, dtype=torch.float32).heads
    assert heads.lm_head.data_ptr() == head.data_ptr()
    write_file(tensors | {"lm_head.weight": head + 1}, file)
    with pytest.raises(InvalidInput, match="must be a copy of the target's lm_head"):
        with_target(published, model)


def test_eagle_takes_its_sizes_from_its_config_or_the_targets(model, tmp_path):
    heads = random_heads("eagle-1", model)
    for key, value, message in (  # others are refused as of EAGLE-3
        ("num_attention_heads", 8, "num_attention_heads 8"),
        ("num_attention_heads", 3, "multiple"),
        ("head_dim", 8, "num_attention_heads 4"),
        ("rope_scaling", {"type": "zz"}, "must describe the heads"),
        ("intermediate_size", 25, "intermediate_size 25"),
        ("vocab_size", 41, "vocab_size 41"),
    ):
        save_heads(heads, "eagle-1", tmp_path, base="x")
        edit_json(tmp_path / "config.json", **{key: value})
        with pytest.raises(InvalidInput, match=message):
            load(tmp_path)
    save_heads(heads, "eagle-1", tmp_path, base="x")
    linear = {"type": "linear", "factor": 2.0}
    edit_json(tmp_path / "config.json", rope_theta=77.0, rope_scaling=linear, rms_norm_eps=0.5)
    config = load(tmp_path).heads.layer.config
    rope = config.rope_parameters
    assert (rope["rope_theta"], rope["factor"], config.rms_norm_eps) == (77.0, 2.0, 0.5)
    save_heads(load(tmp_path).heads, "eagle-1", tmp_path / "again", base="x")
    again = load(tmp_path / "again").heads.layer.config
    assert again.rope_parameters == config.rope_parameters
    assert again.rms_norm_eps == 0.5
    (tmp_path / "config.json").unlink()
    assert with_target(tmp_path, model).heads.layer.config.num_attention_heads == 4
    with pytest.raises(InvalidInput, match="The number of attention heads"):
        load(tmp_path)


# What is refused


@hydra_only
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hydra_head_arch": "cross-attn"}, "'mlp'.*'cross-attn'"),
        ({"hydra_head_arch": ["mlp"]}, "hydra_head_arch"),
        ({"hidden_state_offset": 1}, "hidden_state_offset must be 0.*says 1"),
        ({"grounded_heads": False}, "grounded_heads must be true.*says False"),
    ],
)
def test_what_would_change_the_guesses_is_not_ignored(published, change, message):
    edit_json(published / "config.json", **change)
    with pytest.raises(Unsupported, match=message):
        load(published)


def test_hydra_plus_plus_is_refused_by_its_name(tmp_path):
    for name in ("prefix_embeding_layer.norm.weight", "hydra_lm_head.0.1.weight"):
        torch.save({name: torch.zeros(2)}, tmp_path / "hydra_lm_head.pt")
        with pytest.raises(Unsupported, match=r"holds Hydra\+\+ heads"):
            load(tmp_path)


def test_other_hydra_heads_are_named_whatever_their_tensors(tmp_path):
    torch.save({"lm_head.weight": torch.zeros(2, 2)}, tmp_path / "hydra_lm_head.pt")
    (tmp_path / "config.json").write_text('{"hydra_num_heads": 4, "hydra_head_arch": "cross-attn"}')
    with pytest.raises(Unsupported, match="'cross-attn'"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    torch.save({"hydra_attention.0.weight": torch.zeros(2, 2)}, tmp_path / "hydra_lm_head.pt")
    with pytest.raises(InvalidInput, match=r"'hydra_attention.0.weight' is not one of them"):
        load(tmp_path)


def test_drafters_of_another_model_are_refused(published, model):
    if PUBLISHED[published.name] == "eagle-1":
        for lm_head, said in (
            (torch.ones(VOCAB, 15), r"shape \(40, 15\)"),
            (torch.ones(39, WIDTH), r"shape \(39, 16\)"),
        ):
            with pytest.raises(InvalidInput, match=said):
                load(published, lm_head=lm_head)
        with pytest.raises(InvalidInput, match="pass model"):
            load_heads(str(published), Base())
        with pytest.raises(InvalidInput, match="share the base's lm_head: pass it with model"):
            convert(str(published), "eagle-1", published / "out")
    edit_json(published / "config.json", hidden_size=17)
    with pytest.raises(InvalidInput, match="hidden_size 17"):
        load(published)
