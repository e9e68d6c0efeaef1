"""Targets as far as prompts need them, and rows written to files of every format."""

import csv
import gzip
import json
from types import SimpleNamespace

from treeopt.runtime.prompts.sets import load_prompts

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Writes BOS itself, and refuses a system role and turns that do not alternate.
BRACKETS = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if m.role == 'user' %}"
    "{{ bos_token }}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }} {{ eos_token }}{% endif %}"
    "{% endfor %}"
)
TURNS = [["What is 1 + 1?", "And doubled?"], ["Name a colour.", "Another one, über-rare.\nNow."]]


def byte_tokenizer(template=None):
    """One token a byte, and a BOS that the tokenizer adds by itself."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(special + letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", extra_special_tokens=special[2:]
    )
    fast.chat_template = template
    return fast


def target_of(tokenizer, eos="</s>", context=512):
    """As much of a target as prompts need."""
    ids = frozenset(tokenizer.convert_tokens_to_ids([eos])) if eos else frozenset()
    return SimpleNamespace(tokenizer=tokenizer, eos_ids=ids, vocab_size=len(tokenizer), context=context)


PLAIN = target_of(byte_tokenizer())
CHAT = target_of(byte_tokenizer(CHATML), eos="<|im_end|>")
BRACKET = target_of(byte_tokenizer(BRACKETS))


def ids(target, text, *, bos=False):
    return tuple(target.tokenizer(text, add_special_tokens=bos)["input_ids"])


def load(folder, rows, target=PLAIN, **options):
    """Prompts of a .jsonl file with these rows; texts stand for whole lines."""
    path = folder / "rows.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return load_prompts(target, str(path), **options)


def reasons(prompts):
    return [(skipped.row, skipped.reason) for skipped in prompts.skipped]


def messages(*said, keys=("role", "content")):
    return [dict(zip(keys, message, strict=True)) for message in said]


def write(path, rows):
    """Rows in the format that the file's ending names."""
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    if kind == "jsonl":
        text = "\n".join(map(json.dumps, rows))
    elif kind == "json":
        text = json.dumps(rows)
    elif kind == "txt":
        text = "\n".join(row["prompt"] for row in rows)
    elif kind in ("csv", "tsv"):
        with path.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream, delimiter="," if kind == "csv" else "\t")
            writer.writerow(rows[0])
            cells = [[row[column] for column in rows[0]] for row in rows]
            writer.writerows([c if isinstance(c, str) else json.dumps(c) for c in row] for row in cells)
        return path
    else:
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.Table.from_pylist(rows), path)
        return path
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path
