"""DSpark and DFlash2: each form against a forward that is written out token by token, and every layout of their files."""

import functools
import itertools
import re
from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import load_file, save_file

from treeopt.errors import InvalidInput, Unsupported
from treeopt.runtime.checkpoints import save_heads
from treeopt.runtime.drafters.paths import DFlash2Heads, DSparkHeads

from .conftest import VOCABULARY
from .helpers.slow_drafters import TREES, check_proposals, check_ranks, in_order, slow_norm
from .helpers.synthetic import check_damage
from .test_dflash import CAUSAL, LAYOUTS, SOME, WINDOWS, config_in, load, random_dflash, slow_dflash, slow_rows, write

RANK, WIDTH, KEPT, GROUP = 5, 32, 6, 8


def slow_path(heads, hidden, root, path, around=None) -> list[tuple[torch.Tensor, int]]:
    """The normed row of each guess as far as that behind ``path``, and the token before it."""
    rows = slow_rows(heads, hidden, root, *([around] if around else []))
    normed = [slow_norm(heads, row, heads.weights["norm.weight"]) for row in rows]
    return list(zip(normed[not heads.form.from_anchor :], [root, *path], strict=False))


def slow_guesses(heads, hidden, root, path) -> Iterator[torch.Tensor]:
    """Logits of each guess as far as that behind ``path``."""
    w = heads.weights
    state = torch.zeros(RANK, dtype=torch.float64)
    for row, token in slow_path(heads, hidden, root, path):
        latent = known = w["markov_head.markov_w1.weight"][token]
        if "markov_head.gate_proj.weight" in w:
            gate = w["markov_head.gate_proj.weight"] @ torch.cat([row, known]) + w["markov_head.gate_proj.bias"]
            latent = known / (1 + (-gate).exp())
        if "markov_head.joint_proj.weight" in w:
            joint = (
                w["markov_head.joint_proj.weight"] @ torch.cat([state, known, row]) + w["markov_head.joint_proj.bias"]
            )
            stays = 1 / (1 + (-joint[:RANK]).exp())
            state = stays * state + (1 - stays) * joint[RANK : 2 * RANK].tanh()
            latent = joint[2 * RANK :].tanh()
        yield heads.lm_head @ row + w["markov_head.markov_w2.weight"] @ latent


def slow_dspark(heads, text, hidden, root, path) -> list[int]:
    *_, logits = slow_guesses(heads, hidden, root, path)
    order = in_order(logits)
    return order if heads.token_ids is None else [int(heads.token_ids[i]) for i in order]


def slow_taps(heads, i, name, reads):
    """The two convolutions around a layer's attention or MLP, whose kernels come of what the first one reads."""
    base, projection = (
        heads.weights[f"layers.{i}.{name}.{part}"] for part in ("base_kernel", "kernel_projection.weight")
    )
    taps, group = base.shape[1], torch.arange(WIDTH) // GROUP
    changes = [(projection @ v).view(2, taps, -1) for v in reads]

    def convolved(side, rows):
        return [
            sum((base[side, o] + changes[t][side, o][group]) * rows[t - o] for o in range(min(taps, t + 1)))
            for t in range(len(rows))
        ]

    return convolved(0, reads), functools.partial(convolved, 1)


def slow_dflash2(heads, text, hidden, root, path) -> list[int]:
    w = {name.removeprefix("candidate_selector."): weight for name, weight in heads.weights.items()}
    row, token = slow_path(heads, hidden, root, path, slow_taps)[len(path)]
    own = heads.lm_head @ row
    gate = w["predecessor_codebook"][token] * (w["hidden_projection.weight"] @ row)
    scores = {b: float(own[b] + gate @ w["successor_codebook"][b]) for b in in_order(own)[: heads.kept]}
    return sorted(scores, key=lambda b: (-scores[b], b))


BLOCKS = list(itertools.product(CAUSAL[:2], WINDOWS, (True, False)))
GUESSES, IDS = itertools.cycle([3, 1, 4]), itertools.cycle([None, SOME, None])
MARKOV = itertools.cycle(["vanilla", "gated", "rnn"])
DSPARK = [
    dict(zip(("causal", "windows", "from_anchor", "guesses", "ids", "markov"), (*block, *rest), strict=True))
    for block, *rest in zip(BLOCKS, GUESSES, IDS, MARKOV, strict=False)
]
DFLASH2 = [
    dict(zip(("causal", "windows", "from_anchor", "guesses", "taps", "kept"), (*block, *rest), strict=True))
    for block, *rest in zip(BLOCKS, GUESSES, itertools.cycle([2, 3]), itertools.cycle([KEPT, 16, 1, 20]), strict=False)
]
DSPARK += [{"guesses": 4, "markov": markov, "ids": SOME} for markov in ("gated", "rnn")]


def random_dspark(**form):
    heads = random_dflash(made=DSparkHeads, rank=RANK, **form)
    for name, weight in heads.markov_head.named_parameters():
        weight *= 8 if "w2" in name else 3 if "joint" in name else 1  # so that the path decides
    return heads


def random_dflash2(*, kept=KEPT, **form):
    heads = random_dflash(made=DFlash2Heads, rank=RANK, kept=kept, group=GROUP, **form)
    heads.candidate_selector.successor_codebook *= 8  # so that it decides
    return heads


@pytest.mark.parametrize("number", range(len(DSPARK) + len(DFLASH2)))
def test_ranks_and_guesses_are_those_of_a_forward_that_is_written_out(number):
    form = [*DSPARK, *DFLASH2][number]
    heads, slow = (random_dspark, slow_dspark) if number < len(DSPARK) else (random_dflash2, slow_dflash2)
    made = heads(**form, seed=number)
    with torch.inference_mode():
        check_ranks(made, slow, seed=number, top_k=min(20, made.draft_vocab_size), enough=-1)
        trees = [tree for tree in TREES if tree.max_rank < made.draft_vocab_size]
        check_proposals(made, slow, seed=number + 4, steps=3, trees=trees)


def test_a_guess_depends_on_the_one_before_and_rnn_on_all():
    """Else the forward above would compare what no path changes."""
    hidden = torch.randn(6, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for heads, slow in [(random_dspark(markov=kind), slow_dspark) for kind in ("vanilla", "gated", "rnn")] + [
        (random_dflash2(), slow_dflash2)
    ]:
        orders = {path: tuple(slow(heads, [], hidden, 7, path)) for path in itertools.product([3, 4, 5], repeat=2)}
        far = len({orders[first, 3] for first in (3, 4, 5)})
        assert len(set(orders.values())) >= 3
        assert (far > 1) == ("markov_head.joint_proj.weight" in heads.weights)


# Files.

SLOW = {"dflash": slow_dflash, "dspark": slow_dspark, "dflash2": slow_dflash2}
SELECTOR = {"conv_kernel_size": 2, "conv_group_size": GROUP, "selector_rank": RANK, "selector_top_k": KEPT}
FORM_OF = {
    **{("dflash", layout): form for layout, form in LAYOUTS.items()},
    ("dspark", "z-lab"): {"markov": "vanilla"},
    ("dspark", "nested"): {"markov": "gated", "causal": (True, True), "windows": (4, None)},
    ("dspark", "speculators"): {"markov": "vanilla", "ids": SOME},
    ("dspark", "deepspec"): {"markov": "rnn"},
    ("dflash2", "z-lab"): {},
    ("dflash2", "nested"): {"causal": (True, True), "windows": (4, None)},
}


def written(folder, kind, layout, **changes):
    """A random drafter, and its files."""
    form = FORM_OF[kind, layout]
    if kind == "dflash":
        own, keys = random_dflash(**form, guesses=5 if layout == "deepspec" else 4), {}
    elif kind == "dspark":
        own = random_dspark(**form, from_anchor=True, guesses=5)
        keys = {"markov_rank": RANK, "markov_head_type": form["markov"]}
    else:
        own, keys = random_dflash2(**form, guesses=4), SELECTOR
    config = config_in(layout, own)
    if keys and layout == "speculators":
        keys = keys | {"speculators_model_type": kind, "sample_from_anchor": None}
    if "dflash_config" in config:
        keys = {"dflash_config": config["dflash_config"] | keys | changes}
    return own, write(folder, layout, own, **(keys | {} if "dflash_config" in config else keys | changes))


@pytest.mark.parametrize(("kind", "layout"), FORM_OF)
def test_a_layout_is_read_as_it_was_meant_and_written_again(tmp_path, kind, layout):
    own, folder = written(tmp_path / "its", kind, layout)
    found = load(folder)
    assert (found.layout, found.heads.kind, found.heads.num_heads) == (kind, kind, own.form.most_guesses)
    read, hidden, slow = [found.heads], torch.randn(6, 96, dtype=torch.float64), SLOW[kind]
    if kind == "dflash":
        save_heads(found.heads, kind, tmp_path / "ours", base="someone/a-model")
        read.append(load(tmp_path / "ours").heads)
    for one in read:
        assert (one.form, one.kind) == (own.form, kind)
        assert {name: weight.tolist() for name, weight in one.weights.items()} == {
            name: weight.tolist() for name, weight in own.weights.items()
        }
        assert slow(one, [], hidden, 7, [3, 4]) == slow(own, [], hidden, 7, [3, 4])


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("dspark", {"markov_rank": None}, "markov_rank must be a whole number"),
        ("dspark", {"markov_rank": RANK + 1}, "markov_head.markov_w1.weight' must have the shape"),
        ("dspark", {"markov_head_type": "rnn"}, "markov_head_type must be vanilla, as its tensors are"),
        ("dspark", {"target_layer_ids": [0, -2]}, "a list of layers from -1 to"),
        (
            "dspark",
            {"sample_from_anchor": False, "block_size": 1},
            "block_size must be 5, as config.json says beside dflash_config",
        ),
        ("dflash2", {"selector_top_k": None}, "selector_top_k must be a whole number"),
        ("dflash2", {"selector_top_k": VOCABULARY + 1}, "selector_top_k must be a whole number"),
        ("dflash2", {"selector_rank": RANK + 1}, "candidate_selector.predecessor_codebook' must have the shape"),
        ("dflash2", {"conv_kernel_size": 3}, "base_kernel' must have the shape"),
        ("dflash2", {"conv_group_size": 5}, "conv_group_size must be a divisor of the width 32"),
        ("dflash2", {"conv_group_size": 16}, "kernel_projection.weight' must have the shape"),
        ("dflash2", {"target_layer_ids": [0, -1]}, "a list of layers from 0 to"),
    ],
)
def test_what_config_json_says_wrongly_or_does_not_say_is_asked_for(tmp_path, kind, changes, said):
    _, folder = written(tmp_path, kind, "z-lab", **changes)
    with pytest.raises(InvalidInput, match=said) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_a_confidence_head_is_not_read(tmp_path):
    own, folder = written(tmp_path, "dspark", "z-lab")
    file, more = folder / "model.safetensors", {"confidence_head.proj.weight": torch.zeros(1, WIDTH)}
    save_file(load_file(file) | more, file)
    assert load(folder).heads.weights.keys() == own.weights.keys()


def test_the_embeddings_may_be_among_what_dspark_reads(tmp_path):
    _, folder = written(tmp_path, "dspark", "z-lab", target_layer_ids=[-1, 2])
    assert load(folder).heads.form.layers == (0, 3)
    _, folder = written(tmp_path, "dspark", "speculators", aux_hidden_state_layer_ids=[-1, 2])
    with pytest.raises(InvalidInput, match="a list of layers from 0 to"):
        load(folder)


def test_a_dflash2_that_guesses_some_tokens_alone_is_refused(tmp_path):
    own, folder = written(tmp_path, "dflash2", "z-lab")
    tensors = load_file(folder / "model.safetensors")
    save_file(
        tensors | {"d2t": SOME - torch.arange(len(SOME)), "lm_head.weight": own.lm_head[SOME]},
        folder / "model.safetensors",
    )
    with pytest.raises(Unsupported, match="d2t"):
        load(folder)


@pytest.mark.parametrize("kind", SLOW)
def test_damaged_files_are_refused_by_the_tensors_name(tmp_path, kind):
    """All tensors of DFlash but a second layer's, and what the others have beside it."""
    _, folder = written(tmp_path, kind, "nested")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    own = "_head." if kind == "dspark" else "selector|0.attention_conv" if kind == "dflash2" else r"^(?!layers\.1)"
    names = [name for name in tensors if re.search(own, name)]
    check_damage(functools.partial(load, folder), file, tensors, lambda name: False, itertools.count(), 1, names)
