"""The words of this room: what every engine's file is made of.

engine   a serving engine, by the name that --to and --for take
method   one way in which an engine speculates: where the draft is written, and which drafts it takes
served   the draft of each range of batch sizes, as a method takes them · about: what else the engine's files say
written  the files, the launch command and what the user has to know
kind     a kind of files that are imported, of an engine or of another tool
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from treeopt.engines.measured.files import Measurement
from treeopt.engines.measured.rates import PrintedRates
from treeopt.engines.measured.survival import CountedDrafts
from treeopt.engines.speculation import Speculation
from treeopt.errors import InvalidInput
from treeopt.files.shell import shell_word
from treeopt.records.drafters import BLOCKS, DRAFTERS
from treeopt.records.origins import Runtime
from treeopt.records.plan import Ranges
from treeopt.records.rules import rule_of
from treeopt.trees.draft import Draft
from treeopt.trees.limits import EngineLimits

COMMANDS = "commands.sh"  # the file of the launch command
EARLIEST = "from the earliest place of the longest n-gram"
LAST = 4096  # a schedule ends there if it must end somewhere: no engine decodes more sequences at once
CHAINS = EngineLimits()
PLACE = re.compile(r"\b(MODEL|HEADS|DRAFTER)(\.gguf|)(?!\w)")  # of a name in commands, files and notes
READ_AS_IT_IS = re.compile(r"[\w./][\w./+=:,@-]*", re.ASCII)  # by shells, in JSON and in YAML


@dataclass(frozen=True)
class Names:
    """Paths or hub ids of the target and its drafter; None where they are not known."""

    model: str | None = None
    drafter: str | None = None

    def put_into(self, text: str, kept: Collection[str] = ()) -> str:
        """A text with the names in place of MODEL, HEADS and DRAFTER, where shells and files read them as they are.

        kept : words that stay

        >>> Names("org/model", "my heads").put_into("serve MODEL --heads HEADS --gguf MODEL.gguf")
        'serve org/model --heads HEADS --gguf MODEL.gguf'
        """

        def name_of(match: re.Match[str]) -> str:
            name = self.model if match[1] == "MODEL" else self.drafter
            fits = name is not None and READ_AS_IT_IS.fullmatch(name) and name.endswith(match[2])
            return str(name) if fits and match[1] not in kept else match[0]

        return PLACE.sub(name_of, text)


@dataclass(frozen=True, kw_only=True)
class About:
    """What an engine's files say beside the drafts.

    batch_size     largest batch size of the plan
    num_heads      guesses of the drafter; each of Medusa's heads makes one
    num_layers     residual blocks of a head
    widest         guesses of the widest block in the drafter's training; None for other drafters, or if it is not known
    drafter        kind of drafter; empty if it is not known, until `write_served` takes the method's usual one
    drafter_id     name of the drafter in records
    acceptance     record of the rule that the drafts were chosen for; None for greedy decoding
    runtime        runtime whose latencies the plan was made with
    names          of the target and the drafter
    """

    num_heads: int
    num_layers: int = 1
    widest: int | None = None
    drafter: str = ""
    drafter_id: str | None = None
    batch_size: int = 1
    acceptance: Mapping[str, Any] | None = None
    runtime: Runtime | None = None
    names: Names = Names()

    def __post_init__(self) -> None:
        for name in ("batch_size", "num_heads", "num_layers"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InvalidInput(f"{name} must be a whole number of at least 1 to be exported, but is {value!r}.")

    @property
    def rule(self) -> str:
        """The acceptance rule, by --rule's name."""
        return rule_of(self.acceptance)


@dataclass(frozen=True, kw_only=True)
class Written:
    """File name to text, the exact launch command with the flags that must match, and notes.

    options     : words of the command behind those that serve the base model, where it starts a server
    environment : assignments before the command
    """

    files: Mapping[str, str]
    command: str
    notes: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()

    def command_in(self, folder: Path) -> str:
        """The command, wherever it is started, once the files lie in a folder.

        >>> Written(files={"options.yml": ""}, command="serve --config options.yml").command_in(Path("my run"))
        "serve --config 'my run/options.yml'"
        """
        command = self.command
        for name in self.files:
            command = re.sub(
                rf"(?<![\w./-]){re.escape(name)}(?![\w.-])", lambda match: shell_word(folder / match[0]), command
            )
        return command


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way in which an engine speculates.

    engine         name of the engine, which `ServingEngine` fills in
    drafters       kinds of drafters that it runs, as `Calibration` and `Plan` name them, the usual one first
    limits         limits of the drafts that it takes
    rules          acceptance rules that its source has, by --rule's names. Rejection with guesses that are not drawn
                   is the rule ``sample``
    max_batch_size most sequences that it decodes at once; None for no limit
    carrier        the file, flag or field that the draft is written to
    by_batch_size  whether it takes a schedule
    looks_up       how it looks n-grams up, if that is known: "from the latest place"; `EARLIEST` as treeopt does
    wider          what it does with a chain longer than the block of the drafter's training; empty if it drafts the chain
    versions       releases that have it · status: whether the newest still has it · source: where that was read
    checked        the release or commit whose source the export was checked against
    write          writes the files, `COMMANDS` with the launch command among them
    refuses        says what the engine would refuse beyond ``limits``, as `fault` says it
    """

    engine: str = ""
    name: str
    drafters: tuple[str, ...]
    limits: EngineLimits = CHAINS
    rules: tuple[str, ...] = ("greedy",)
    max_batch_size: int | None = None
    carrier: str
    by_batch_size: bool = False
    looks_up: str = ""
    wider: str = ""
    versions: str = "current"
    status: str = "live"
    source: str
    checked: str
    write: Callable[[Ranges[Any], About], Written]
    refuses: Callable[[Ranges[Any], About], str | None] = lambda served, about: None

    @property
    def follows_schedule(self) -> bool:
        """Whether ranges that a plan's schedule merges get one draft: chains do."""
        return self.limits.only_chains

    def decodes(self, batch_size: int) -> bool:
        """Whether it decodes that many sequences at once."""
        return self.max_batch_size is None or batch_size <= self.max_batch_size

    def takes(self, draft: Draft, num_heads: int | None) -> bool:
        """Whether it takes drafts of this kind from a drafter of so many guesses."""
        return self.limits.takes(draft, num_heads)

    def fault(self, served: Ranges[Draft], about: About) -> str | None:
        """Why the engine would refuse the drafts or decode other ones; None if it takes them. The words follow the engine's name."""
        if len(served) > 1 and not self.by_batch_size:
            return f"takes one draft for all batch sizes, but the plan has {in_words(served)}"
        if served[-1][0] > LAST:
            return (
                f"takes schedules whose last range begins at {LAST} at most, but this one's begins at {served[-1][0]}"
            )
        for *_, draft in served:
            if fault := self.limits.fault(draft) or self._beyond_drafter(draft.depth, about):
                return fault
        return self.refuses(served, about)

    def _beyond_drafter(self, depth: int, about: About) -> str | None:
        """Why the drafter's heads or its block do not draft so deep; None if they do."""
        kind = about.drafter
        if kind in DRAFTERS and DRAFTERS[kind].is_heads and depth > about.num_heads:
            return (
                f"takes drafts up to {about.num_heads} deep, one guess per head, but this one is {depth} deep; keep within "
                f"`max_depth={about.num_heads}`"
            )
        if kind not in BLOCKS:
            return None
        if depth > about.num_heads:
            return (
                f"takes the length as the width of the block, and with {depth} guesses all would be others than those of the "
                f"{about.num_heads} that this drafter was calibrated with"
            )
        if not self.wider or not about.widest or depth <= about.widest:
            return None
        return (
            f"takes chains of up to {about.widest} guesses from this drafter, which was trained for blocks of no more, but this "
            f"one has {depth}, and it {self.wider}"
        )


def in_words(served: Ranges[Draft]) -> str:
    """The ranges of batch sizes with the name of each draft.

    >>> from treeopt.trees.tree import Tree
    >>> in_words(((1, 8, Tree.chain(4)), (9, None, Tree.chain(0))))
    '1-8: chain of 4, from 9 on: no guesses'
    """
    parts = []
    for first, last, draft in served:
        batch_sizes = f"from {first} on" if last is None else f"{first}-{last}"
        parts.append(f"{batch_sizes}: {draft.name}")
    return ", ".join(parts)


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    needed       : what it must hold, in words · matches: whether a file's content does
    read         : reads a file; the kinds of engines read all files of an import together
    options      : options that ``read`` takes
    takes_others : whether it also matches files of other kinds, which then come first
    """

    needed: str
    matches: Callable[[Any], bool]
    read: Callable[..., Measurement | CountedDrafts | PrintedRates]
    options: tuple[str, ...] = ()
    takes_others: bool = False


@dataclass(frozen=True, kw_only=True)
class ServingEngine:
    """A serving engine and its methods, the usual one first.

    package   its name on the Python package index; None if its source is not there
    imports   kinds of files with its counts of drafts, by --from's names
    server    the command that starts its HTTP server, for bench --launch; empty for none
    options   the options of that server that speculate; None where they are not known
    """

    name: str
    title: str
    package: str | None = None
    server: str = ""
    options: Speculation | None = None
    methods: tuple[Method, ...] = ()
    imports: Mapping[str, Kind] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "methods", tuple(replace(method, engine=self.name) for method in self.methods))
