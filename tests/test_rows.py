"""Rows: the same prompts from every file format and dataset, and files that are broken."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treeopt.errors import InvalidInput
from treeopt.runtime.prompts.sets import load_prompts

from .helpers.prompt_files import PLAIN, TURNS, ids, load, messages, reasons, write


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "tsv", "parquet", "jsonl.gz", "json.gz", "ndjson"])
@pytest.mark.parametrize(
    "rows",
    [
        [{"turns": turns, "kind": f"k{i}"} for i, turns in enumerate(TURNS)],
        [{"prompt": turns[0] + "\n", "kind": f"k{i}"} for i, turns in enumerate(TURNS)],
        [{"messages": messages(("user", a), ("assistant", "ok"), ("user", b)), "kind": a} for a, b in TURNS],
    ],
)
def test_every_format_gives_the_same_conversations(tmp_path, kind, rows):
    same = load(tmp_path, rows, group_by="kind")
    path = write(tmp_path / f"p.{kind}".replace("ndjson", "jsonl"), rows)
    path = path.rename(tmp_path / f"p.{kind}")
    prompts = load_prompts(PLAIN, str(path), group_by="kind")
    assert prompts.conversations == same.conversations
    assert prompts.skipped == ()


def test_one_prompt_per_line_of_a_text_file(tmp_path):
    path = tmp_path / "p.txt"
    path.write_bytes("\ufeffüber\r\n\r\n  two\n".encode() + b"\xff\n")
    prompts = load_prompts(PLAIN, str(path))
    assert [(c.row, c.turns) for c in prompts.conversations] == [(1, ("über",)), (3, ("  two",))]
    assert prompts.conversations[0].first == ids(PLAIN, "über", bos=True)
    assert reasons(prompts) == [(4, "it is not UTF-8")]


@pytest.mark.parametrize(
    "document",
    [
        [{"prompt": "a"}, {"prompt": "b"}],
        ["a", "b"],
        {"data": [{"prompt": "a"}, {"prompt": "b"}], "version": 1},
        {"prompts": ["a", "b"]},
        {"prompt": ["a", "b"], "id": [1, 2]},
    ],
)
def test_a_json_document_may_be_rows_or_columns(tmp_path, document):
    path = tmp_path / "p.json"
    path.write_text(json.dumps(document, indent=1))
    assert [c.turns for c in load_prompts(PLAIN, str(path)).conversations] == [("a",), ("b",)]


def test_a_json_file_may_hold_one_row_or_json_lines(tmp_path):
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"messages": messages(("user", "a"))}))
    assert [c.turns for c in load_prompts(PLAIN, str(path)).conversations] == [("a",)]
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"pro')
    prompts = load_prompts(PLAIN, str(path))
    assert [c.turns for c in prompts.conversations] == [("a",), ("b",)]
    assert [row for row, _ in reasons(prompts)] == [3]


def test_datasets_in_folders_and_on_the_hub(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [{"turns": turns, "picture": b"\xff"} for turns in TURNS]
    data = datasets.Dataset.from_list(rows)
    (tmp_path / "files").mkdir()
    write(tmp_path / "files" / "train.parquet", rows)
    data.save_to_disk(tmp_path / "saved")
    both = datasets.DatasetDict({"one": data, "two": data})
    both.save_to_disk(tmp_path / "splits")
    same = load(tmp_path, [{"turns": turns} for turns in TURNS]).conversations
    found = [
        load_prompts(PLAIN, str(tmp_path / "files")),
        load_prompts(PLAIN, str(tmp_path / "files"), split="train"),
        load_prompts(PLAIN, str(tmp_path / "saved")),
        load_prompts(PLAIN, str(tmp_path / "splits"), split="two"),
    ]
    for name, wrong in (("splits", None), ("splits", "three"), ("saved", "two"), ("files", "two")):
        with pytest.raises(InvalidInput, match="one" if name == "splits" else "train"):
            load_prompts(PLAIN, str(tmp_path / name), split=wrong)
    asked = []

    def hub(*args, **options):
        asked.append((args, options))
        return data if options["split"] else {"train": data, "test": None}

    monkeypatch.setattr(datasets, "load_dataset", hub)
    found.append(load_prompts(PLAIN, "some/name:main"))
    found.append(load_prompts(PLAIN, "some/name", split="test"))
    assert asked == [(("some/name", "main"), {"split": None}), (("some/name", None), {"split": "test"})]
    for prompts in found:
        assert prompts.conversations == same
    names = ["saved (train)", "splits (two)", "some/name:main (train)", "some/name (test)"]
    assert [prompts.name for prompts in found[2:]] == names
    assert len({prompts.fingerprint for prompts in found}) == 1


@pytest.mark.parametrize(
    ("name", "data", "options", "words"),
    [
        ("p.jsonl", b"", {}, "p.jsonl is (it is empty)"),
        ("p.txt", b"\n \n", {}, "p.txt is (it is empty)"),
        ("p.csv", b"prompt\n", {}, "p.csv is (it is empty)"),
        ("p.json", b" ", {}, "p.json is (it is empty)"),
        ("p.json", b"[{", {}, "it is not JSON"),
        ("p.json", b"3", {}, "must be a list of objects or an object, but is a number"),
        ("p.json", b'{"prompt": ["a"], "id": [1, 2]}', {}, "columns have different lengths"),
        ("p.csv", b'prompt\n"a', {}, "it is not CSV"),
        ("p.csv", b"prompt,prompt\na,b\n", {}, "name every column once"),
        ("p.csv", b"prompt\na,b\n", {}, "row 1: it has more or fewer fields than the header"),
        ("p.parquet", b"PAR1", {}, "it is not a whole .parquet file"),
        ("p.jsonl.gz", b"\x1f\x8b", {}, "it is not a whole gzip file"),
        ("p.txt", "\ufeffa".encode("utf-16-le"), {}, "row 1: it is not UTF-8"),
        ("p.doc", b"a", {}, "must end in .jsonl, .json, .csv"),
        ("p.jsonl", b'{"own": "a", "b": 1}', {}, "but p.jsonl has own, b: name one with column"),
        ("p.jsonl", b'{"own": "a"}', {"column": "b"}, "column must be a column of p.jsonl: own, but got b"),
        (
            "p.jsonl",
            b'{"text": "a", "kind": 1}',
            {"group_by": "knid"},
            "group_by must be a column of p.jsonl: text, kind, but got knid. Did you mean 'kind'",
        ),
        ("p.jsonl", b'{"text": "a"}', {"responses": "b"}, "responses must be a column of p.jsonl: text"),
        ("p.jsonl", b'{"text": "a"}', {"split": "test"}, "split is for a dataset"),
        ("nowhere.txt", None, {}, "does not exist"),
    ],
)
def test_a_wrong_source_is_one_sentence(tmp_path, name, data, options, words):
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(InvalidInput) as error:
        load_prompts(PLAIN, str(tmp_path / name), **options)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "limit"), [("jsonl.gz", "MOST_UNPACKED_BYTES"), ("jsonl.gz", "MOST_RATIO"), ("parquet", "MOST_RATIO")]
)
def test_a_file_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch, kind, limit):
    path = write(tmp_path / f"p.{kind}", [{"prompt": "a" * 400}, {"prompt": "b"}])
    load_prompts(PLAIN, str(path))
    monkeypatch.setattr("treeopt.runtime.prompts.rows.SMALL_BYTES", 1)
    monkeypatch.setattr(f"treeopt.runtime.prompts.rows.{limit}", 0.1 if limit == "MOST_RATIO" else 1)
    with pytest.raises(InvalidInput, match="more than"):
        load_prompts(PLAIN, str(path))


@pytest.mark.parametrize("source", ["x", "no/such:config", "a b", "\0", "x" * 5000, "../no/way/here"])
def test_what_is_neither_here_nor_on_the_hub_is_one_sentence(source, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InvalidInput, match="must be a file, a folder or a hub dataset"):
        load_prompts(PLAIN, source)


texts = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1, max_size=20).filter(
    lambda text: text.strip() and not text.lstrip().startswith("[")
)
tables = st.lists(
    st.fixed_dictionaries({"turns": st.lists(texts, min_size=1, max_size=3), "kind": texts}), min_size=1, max_size=5
)
quick = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)


@quick
@given(rows=tables)
def test_random_rows_are_the_same_in_every_format(tmp_path, rows):
    same = load(tmp_path, rows, group_by="kind")
    for kind in ("json", "csv", "tsv", "parquet", "jsonl.gz"):
        prompts = load_prompts(PLAIN, str(write(tmp_path / f"p.{kind}", rows)), group_by="kind")
        assert prompts.conversations == same.conversations
