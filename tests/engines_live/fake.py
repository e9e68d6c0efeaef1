"""A release that nobody made: a source that has every fact of vLLM; and releases in which a word is renamed."""

from __future__ import annotations

import io
import re
import tokenize
from functools import cache
from itertools import accumulate

from tests.engines_live.archives import Release
from tests.engines_live.readings import words_read
from tests.engines_live.written import words_of_engine

LOG = """
log_fn(
    "SpecDecoding metrics: "
    "Mean acceptance length: %.2f, "
    "Accepted throughput: %.2f tokens/s, "
    "Accepted: %d tokens, "
    "Drafted: %d tokens, "
    "Per-position acceptance rate: %s, "
    "Avg Draft acceptance rate: %.1f%%",
)
counters = ["vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens",
            "vllm:spec_decode_num_accepted_tokens_per_pos", labels + ["position"]]
"""


def vllm() -> dict[str, str]:
    """The texts of a vLLM that has all that is written for it and read of it, and no more."""
    words = {*words_of_engine("vllm"), *words_read("vllm")}
    flags = sorted({word.text for word in words if word.kind == "flag"})
    keys = sorted({word.text for word in words if word.kind == "key"})
    values = sorted({word.text for word in words if word.kind == "value" and word.of == "method"})
    read = sorted({word.text for word in words if word.kind == "read key" and not word.of})
    variables = sorted({word.text for word in words if word.kind == "variable"})
    return {
        "pyproject.toml": '[project.scripts]\nvllm = "vllm.entrypoints.cli.main:main"\n',
        "vllm/envs.py": f"environment = {dict.fromkeys(variables, 0)!r}\n",
        "vllm/entrypoints/cli/serve.py": 'name = "serve"\n',
        "vllm/engine/arg_utils.py": "".join(f'parser.add_argument("{flag}", type=int)\n' for flag in flags),
        "vllm/config/speculative.py": f"Inner = Literal[{values[1:]!r}]\nSpeculativeMethod = Literal[{values[0]!r}, Inner]\n"
        "DraftSampleMethod = Literal['probabilistic']\nRejectionSampleMethod = Literal['synthetic']\nclass SpeculativeConfig:\n"
        + "".join(f"    {key}: int = 0\n" for key in keys),
        "vllm/config/observability.py": "class C:\n    per_request_spec_decode_metrics: Literal['summary', 'detailed'] = 0\n",
        "vllm/entrypoints/openai/chat_completion/protocol.py": "class ChatCompletionResponse:\n    metrics: int\n    choices: int\n",
        "vllm/v1/spec_decode/metrics.py": LOG,
        "vllm/benchmarks/serve.py": f"""'''All of {" ".join(read)}.'''\n# {read}\nresult = {dict.fromkeys(read, 0)!r}\n"""
        f"said = 'old {' '.join(read)}_too'\n",
    }


QUOTED = re.compile(r"[bruBRU]*(\"{3}|'{3}|[\"'])(.*)\1", re.DOTALL)


def renamed(release: Release, where: str, word: str) -> Release:
    """The release with a word renamed in the code of some files, and in the name of a file that is a word of its own.

    Comments and docstrings stay, and so do texts with an identifier among other words, but for f-strings: what is renamed in code alone
    must be missed.
    """
    inner = "[-_./]".join(map(re.escape, re.split("[-_.]", word.strip("-"))))
    pattern = re.compile(rf"(?<!\w){inner}" + r"(?!\w)" * word[-1].isalnum())
    in_name = re.compile(rf"{inner}(?=(/__init__)?\.py$)")

    def changed(piece: str, is_code: bool) -> str:
        quoted = QUOTED.fullmatch(piece) if word.isidentifier() else None
        return (
            pattern.sub("gone", piece)
            if is_code and (not quoted or pattern.fullmatch(quoted[2].lstrip("-")))
            else piece
        )

    texts = dict(release.texts)
    for path, text in release.matching(where).items():
        if pattern.search(text):
            is_python = path.endswith((".py", ".pyi"))
            text = "".join(changed(*piece) for piece in pieces(text, is_python))
        del texts[path]
        texts[in_name.sub("gone", path)] = text
    return Release(release.version, texts)


@cache
def pieces(text: str, is_python: bool) -> list[tuple[str, bool]]:
    """A source in pieces, and which of them are code; of Python every string is one."""
    if not is_python:
        return [(line, not line.lstrip().startswith("//")) for line in text.splitlines(keepends=True)]
    lines = [0, *accumulate(map(len, io.StringIO(text)))]
    found, end, is_statement = [], 0, True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT):
            start, stop = (lines[row - 1] + column for row, column in (token.start, token.end))
            is_code = token.type == tokenize.STRING and not is_statement
            found += [(text[end:start], True), (text[start:stop], is_code)]
            end = stop
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            is_statement = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    return [*found, (text[end:], True)]
