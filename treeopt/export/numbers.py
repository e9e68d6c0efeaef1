"""Engines that take a number or two on their command line, and no file beside it.

LMDeploy, RTP-LLM   the length of a chain; RTP-LLM's --tree_decode_config constrains the output and is no tree
llama.cpp           the longest chain; it stops earlier where its drafter is unsure, and takes no tree from outside
ReDrafter           width and length of a beam, whose first token is the target's own
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from treeopt.errors import InvalidInput
from treeopt.export.chains import LOOKED_UP, NO_SPECULATION, drafter_of, flags, launch, only_length, plain, whole
from treeopt.export.engine import Lengths, Request, Written


@dataclass(frozen=True, kw_only=True)
class Options:
    """A launch command, what ends it where no chain pays, and the options that it takes for a chain.

    options : kind of drafter to its options; {length} is the chain's, {rows} one more, {looked_up} an n-gram's
    slots   : sequences that it decodes at once unless told otherwise, and what tells it
    """

    engine: str
    serve: str
    alone: str = ""
    options: Mapping[str, str]
    slots: tuple[int, str] = (0, "")
    notes: tuple[str, ...] = ()
    notes_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by the kind of drafter

    def __call__(self, request: Request) -> Written:
        kind = drafter_of(request, self.options, self.engine)
        length = only_length(request, self.engine)
        slots, more = self.slots
        serve = self.serve + (more.format(batch_size=request.batch_size) if request.batch_size > slots else "")
        if length == 0:
            return plain(f"{serve}{self.alone}")
        options = self.options[kind].format(length=length, rows=length + 1, looked_up=min(length, LOOKED_UP))
        return launch(f"{serve} {options}", self.notes + self.notes_of.get(kind, ()))


lmdeploy = Options(
    engine="LMDeploy",
    serve="lmdeploy serve api_server MODEL --backend pytorch",
    options={
        kind: f"--speculative-algorithm {name}{own} --speculative-num-draft-tokens {{length}}"
        for kind, name, own in (
            ("eagle3", "eagle3", " --speculative-draft-model DRAFTER"),
            ("eagle", "eagle", " --speculative-draft-model DRAFTER"),
            ("mtp", "deepseek_mtp", ""),
            ("dflash", "dflash", " --speculative-draft-model DRAFTER"),
        )
    },
    notes=("Without --backend pytorch it may take TurboMind, which only warns and does not speculate.",),
    notes_of={
        "mtp": (
            "DeepSeek's own layer is deepseek_mtp; hy3_mtp and qwen3_5_mtp are other models'. The layer is read from "
            "MODEL unless --speculative-draft-model names another folder.",
        )
    },
)
ALGORITHMS = ("eagle", "eagle3", "deepseek_mtp", "hy3_mtp", "qwen3_5_mtp", "dflash")

DRAFT = "--spec-draft-n-max {length} --spec-draft-n-min 0 --spec-draft-p-min 0"
llama_cpp = Options(
    engine="llama.cpp",
    serve="llama-server --model MODEL.gguf",
    slots=(4, " --parallel {batch_size} --kv-unified"),  # one context for all, as where it is not told
    options={
        "draft-model": f"--spec-type draft-simple --spec-draft-model DRAFTER.gguf {DRAFT}",
        "eagle3": f"--spec-type draft-eagle3 --spec-draft-model DRAFTER.gguf {DRAFT}",
        "mtp": f"--spec-type draft-mtp {DRAFT}",
        "dflash": f"--spec-type draft-dflash --spec-draft-model DRAFTER.gguf {DRAFT}",
        "dspark": f"--spec-type draft-dspark --spec-draft-model DRAFTER.gguf {DRAFT}",
        "ngram": "--spec-type ngram-simple --spec-ngram-simple-size-n {looked_up} --spec-ngram-simple-size-m {length}",
    },
    notes_of={
        **dict.fromkeys(
            ("draft-model", "eagle3"),
            (
                "--spec-draft-p-min 0 lets llama.cpp draft to the end, as the plan counts; with more it stops where its "
                "drafter is unsure.",
                "Builds that do not know --spec-type have other names for these options: treeopt list engines llama-cpp",
            ),
        ),
        "mtp": (
            "It drafts with MODEL's own layers; --spec-draft-model names them where they are a file of their own. From a "
            "model of several such layers it silently drafts no more tokens than it has layers.",
        ),
        "ngram": ("It looks up that number of tokens and no fewer, and drafts only where as many follow in the text.",),
    },
)
TYPES = ("draft-simple", "draft-eagle3", "draft-mtp", "draft-dflash", "draft-dspark", "ngram-simple")
REMOVED = {
    *("--draft", "--draft-n", "--draft-max", "--draft-min", "--draft-n-min"),
    *("--spec-ngram-size-n", "--spec-ngram-size-m", "--spec-ngram-min-hits"),
}  # llama.cpp throws

redrafter = Options(
    engine="ReDrafter",
    serve="python3 -m recurrent_drafting.mlx.cmd.generate --hf_tokenizer=MODEL --hf_llm=MODEL --hf_drafter=DRAFTER",
    alone=" --autoregression=True",
    options={"redrafter": "--greedy_search=True --beam_width=1 --beam_length={rows}"},
    notes=("ReDrafter makes its tree of beams at run time; one beam is the chain of the plan.",),
)
rtp_llm = Options(
    engine="RTP-LLM",
    serve="python3 -m rtp_llm.start_server --checkpoint_path MODEL --model_type MODEL_TYPE",
    options={
        kind: f"--sp_type {name} --sp_model_type DRAFTER_TYPE --sp_checkpoint_path DRAFTER "
        "--gen_num_per_cycle {length}"
        for kind, name in (("mtp", "mtp"), ("eagle", "eagle"), ("eagle3", "eagle"), ("dspark", "dspark"))
    },
    notes=(
        "MODEL_TYPE and DRAFTER_TYPE are names of RTP-LLM's own list of models, such as deepseek3 and deepseek-v3-mtp. "
        "It does not start without the drafter's.",
    ),
    notes_of={"mtp": ("--sp_type mtp takes a module for every token; a single one that is used again is eagle.",)},
)


def parse_lmdeploy(files: Mapping[str, str]) -> Lengths:
    """The length; none for another backend than PyTorch's, which silently does not speculate."""
    given = flags(files)
    algorithm = given.get("--speculative-algorithm")
    if algorithm is None or given.get("--backend") != "pytorch":
        return NO_SPECULATION
    if algorithm not in ALGORITHMS:
        raise InvalidInput(f"--speculative-algorithm must be one of {', '.join(ALGORITHMS)}, but got {algorithm!r}.")
    name = "--speculative-num-draft-tokens"
    return ((1, None, whole(given.get(name, "1"), name)),)


def parse_llama_cpp(files: Mapping[str, str]) -> Lengths:
    """The longest chain; InvalidInput where llama.cpp ends with an error, none where nothing is drafted."""
    given = flags(files)
    if gone := sorted(REMOVED & given.keys()):
        raise InvalidInput(
            f"llama.cpp has no {', '.join(gone)} any more: use --spec-type, and "
            "--spec-draft-n-max or --spec-ngram-simple-size-m."
        )
    kind = given.get("--spec-type")
    if kind is None:
        return NO_SPECULATION
    if kind not in TYPES:
        raise InvalidInput(f"--spec-type must be one of {', '.join(TYPES)}, but got {kind!r}.")
    if kind == "ngram-simple":
        name = "--spec-ngram-simple-size-m"
        length = whole(given.get(name, "48"), name)
        looked_up = whole(given.get("--spec-ngram-simple-size-n", "12"), "--spec-ngram-simple-size-n")
        return ((1, None, length if length >= looked_up else 0),)
    if kind != "draft-mtp" and "--spec-draft-model" not in given:
        return NO_SPECULATION  # a line in the log, and the server goes on
    name = "--spec-draft-n-max"
    # The limit is looked at after a token was drafted, so 0 drafts one as well.
    return ((1, None, max(1, whole(given.get(name, "3"), name))),)


def parse_redrafter(files: Mapping[str, str]) -> Lengths:
    """The beam's length without the target's own token; InvalidInput for several beams, which make a tree."""
    given = flags(files)
    if given.get("--autoregression") == "True":
        return NO_SPECULATION
    if given.get("--beam_width") != "1":
        raise InvalidInput(f"A chain needs --beam_width 1, but got {given.get('--beam_width', '10, the default')}.")
    rows = whole(given.get("--beam_length", ""), "--beam_length")
    if rows < 2:
        raise InvalidInput(f"--beam_length must be more than 1, but is {rows}.")
    return ((1, None, rows - 1),)


def parse_rtp_llm(files: Mapping[str, str]) -> Lengths:
    """The length; InvalidInput where RTP-LLM ends with an error."""
    given = flags(files)
    kind = given.get("--sp_type")
    if kind is None:
        return NO_SPECULATION
    if kind not in ("mtp", "eagle", "dspark"):
        raise InvalidInput(f"RTP-LLM speculates with --sp_type mtp, eagle or dspark, but got {kind!r}.")
    for name in ("--sp_model_type", "--sp_checkpoint_path"):
        if not given.get(name):
            raise InvalidInput(f"--sp_type {kind} needs {name}.")
    return ((1, None, whole(given.get("--gen_num_per_cycle", "1"), "--gen_num_per_cycle")),)
