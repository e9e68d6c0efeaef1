"""Plans of drafters that copy text, on their way into engines: what each is told, and what is refused before the engine would."""

import pytest

from tests.helpers.engine_rows import COPIED, READERS, export_plan
from tests.helpers.engine_rows import export as export_draft
from treeopt.engines.copied import KIND
from treeopt.engines.registry import method_of, runners
from treeopt.errors import InvalidInput
from treeopt.pipeline.export import export, export_all
from treeopt.records.exchange import ExportOptions
from treeopt.records.figure import Figure
from treeopt.records.plan import ROOT, Plan, PlanEntry
from treeopt.records.rundir import RunDirectory
from treeopt.text.engines import KINDS, text_drafter
from treeopt.trees.draft import CopiedText

SUFFIX = CopiedText.of("vllm:suffix", {"num_speculative_tokens": 12}, 13, 12)


def plan_of(*drafts, drafter="vllm:suffix"):
    """A plan with these drafts at batch sizes 1, 2, ..."""
    rates = [1.5 if draft.rows > 1 else 1.0 for draft in drafts]
    figures = (
        Figure(draft=d, batch_size=n, tokens_per_step=r) for n, (d, r) in enumerate(zip(drafts, rates, strict=True), 1)
    )
    entries = tuple(PlanEntry(**vars(figure)) for figure in figures)
    return Plan(entries=entries, drafter={"kind": KIND, "id": drafter})


def told(draft, engine=None, **others):
    """What an engine is told of a draft."""
    own = draft.drafter.partition(":")[0]
    return export_draft(engine or own, draft, drafter=KIND, **others)


def test_every_drafter_of_every_engine_and_each_of_its_options_is_in_the_examples():
    drafts = [draft for drafts in COPIED.values() for draft in drafts]
    names = {f"{d.drafter.partition(':')[0]}:{kind}" for d in drafts for kind in d.drafter.partition(":")[2].split(",")}
    assert names == set(KINDS)
    assert runners(KIND) == sorted(COPIED)
    options = {option for kind in KINDS.values() for option in kind.options}
    assert options - {"eos_token_id"} == {option for draft in drafts for option in draft.options}


def test_end_tokens_of_the_replay_are_not_written():
    with_ends = CopiedText.of(
        "transformers:prompt-lookup", {"prompt_lookup_num_tokens": 8, "eos_token_id": [0, 2]}, 9, 8
    )
    assert "eos" not in told(with_ends).files["generation_config.json"]  # the model's own


WRONG = [
    ("vllm:ngram-v1", {"prompt_lookup_max": 4}, "drafts nothing without num_speculative_tokens"),
    ("vllm:ngram-v1", {"num_speculative_tokens": 0}, "num_speculative_tokens of vllm:ngram-v1 must be at least 1, but got 0"),
    ("vllm:ngram-v2", {"num_speculative_tokens": 4, "prompt_lookup_max": 2, "prompt_lookup_min": 3}, "n-grams"),
    ("vllm:suffix", {"suffix_decoding_max_tree_depth": 1}, "depth 2 or more"),
    ("vllm:suffix", {"suffix_decoding_max_cached_requests": -1}, "must be at least 0, but got -1"),
    ("vllm:suffix", {"suffix_decoding_min_token_prob": 1.5}, "must be at most 1, but got 1.5"),
    ("vllm:suffix", {"suffix_decoding_max_spec_factor": float("nan")}, "must be a number, but got nan"),
    ("vllm:suffix", {"suffix_max_spec_offset": 0.0}, "vllm:suffix takes the options .*, but got suffix_max_spec_offset"),
    ("vllm:suffix", {"num_speculative_tokens": "8; touch x"}, "must be a whole number, but got '8; touch x'"),
    ("arctic:suffix", {"suffix_max_spec_offset": True}, "must be a number, but got True"),
    ("transformers:prompt-lookup", {"max_matching_ngram_size": 2}, "drafts nothing without prompt_lookup_num_tokens"),
    ("openvino:prompt-lookup", {"num_assistant_tokens": 4}, "drafts nothing without max_ngram_size"),
    ("exllamav3:ngram", {"num_draft_tokens": 4}, "drafts nothing without ngram_match_min"),
    ("llama.cpp:ngram-simple", {"spec_ngram_simple_size_n": 1025}, "must be at most 1,024, but got 1025"),
    ("llama.cpp:ngram-mod", {"spec_ngram_mod_n_match": 0}, "must be at least 1, but got 0"),
    ("llama.cpp:ngram-map-k", {"spec_ngram_map_k_min_hits": 2}, "takes the options .*size_m.*, but got"),
    ("llama.cpp:ngram-lookup", {}, "Drafters that copy text are"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "said"), WRONG, ids=[f"{name} {options}" for name, options, _ in WRONG])
def test_what_an_engine_would_refuse_or_not_draft_with_is_refused(name, options, said):
    with pytest.raises(InvalidInput, match=said):
        told(CopiedText.of(name, options, 9, 8))


@pytest.mark.parametrize("engine", sorted(COPIED))
def test_a_drafter_of_another_engine_is_refused_with_the_engine_that_has_it(engine):
    for other, drafts in COPIED.items():
        for draft in drafts:
            if other != engine:
                own = draft.drafter.partition(":")[0]
                with pytest.raises(
                    InvalidInput, match=f"has no {draft.drafter}.* do not hold there; export --to {own}"
                ):
                    told(draft, engine)
            else:
                text_drafter(draft.drafter, draft.options)  # the example is one


def test_engines_without_such_drafters_name_those_that_have_them():
    with pytest.raises(InvalidInput, match=r"this drafter is copied-text\. It runs in exllamav3, llama-cpp"):
        told(SUFFIX, "tgi")
    with pytest.raises(InvalidInput, match="vllm with batch-size runs drafters of the kinds"):
        export_plan(plan_of(SUFFIX), "vllm", ExportOptions(method="batch-size"))


@pytest.mark.parametrize(
    ("draft", "kept"),
    [
        (SUFFIX, "the answers of the latest requests"),
        (COPIED["llama-cpp"][0], "the text of each slot"),
        (COPIED["vllm"][2], None),
        (COPIED["transformers"][0], None),
    ],
    ids=lambda draft: getattr(draft, "drafter", ""),
)
def test_what_is_kept_between_requests_is_said(draft, kept):
    said = [note for note in told(draft).notes if "that were replayed before" in note]
    assert len(said) == (kept is not None)
    assert not said or said[0].startswith(f"It keeps {kept}")


def test_more_sequences_than_slots_get_theirs():
    assert "--parallel 8 --kv-unified --spec-type ngram-map-k " in told(COPIED["llama-cpp"][1], batch_size=8).command


@pytest.mark.parametrize("engine", sorted(COPIED))
def test_a_plan_on_its_whole_way(engine, tmp_path):
    """Of one draft at each batch size, the last of which is plain: each is read back from its files."""
    drafts = [*COPIED[engine], ROOT]
    run = RunDirectory(tmp_path / "run")
    plan_of(*drafts, drafter=drafts[0].drafter).save(run.plan)
    way = method_of(engine, KIND)
    paths, written = export(run, engine)
    assert export_all(run, run.read_plan(), [engine]) == [engine]
    read = {folder.name: None for folder in {path.parent for path in paths}}
    for folder in {path.parent for path in paths}:
        files = {file.name: file.read_text() for file in folder.iterdir() if file.name != ".written"}
        read[folder.name] = READERS[engine, KIND](files)
    if way.max_batch_size == 1:
        assert [one.drafter for one in read.values()] == [drafts[0].drafter]
        return
    for size, draft in enumerate(drafts, 1):
        found = read[f"batch-size-{size}"]
        assert (found.drafter if found else "") == draft.drafter
    assert any("serves the base model" in note for note in written.notes)


def test_one_setting_for_all_batch_sizes_is_written_once(tmp_path):
    run = RunDirectory(tmp_path / "run")
    plan_of(SUFFIX, SUFFIX).save(run.plan)
    paths, _ = export(run, "vllm")
    assert {path.parent for path in paths} == {run.export / "vllm"}
