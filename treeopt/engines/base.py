"""The words of this room: what every engine's file is made of.

engine   a serving engine, by the name that --to and --for take
method   one way in which it speculates: a carrier for the tree, the chain length or the schedule, and its limits
request  what is to be written · written  the files, the launch command and what the user has to know
kind     a kind of files that are imported, of an engine or of another tool
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from treeopt.engines.measured.files import Found
from treeopt.engines.measured.survival import CountedDrafts
from treeopt.errors import InvalidInput
from treeopt.records.origins import Runtime
from treeopt.records.rules import rule_of
from treeopt.trees.draft import CopiedText, DDTree, DynamicLimits, DynamicTree
from treeopt.trees.tree import Tree

COMMANDS = "commands.sh"  # the file of the launch command
EARLIEST = "from the earliest place of the longest n-gram"
Lengths = tuple[tuple[int, int | None, int], ...]  # (from, to, chain length): from 1 on, the last without end
Settings = tuple[tuple[int, int | None, DynamicTree | None], ...]  # dynamic trees likewise; None: do not speculate


@dataclass(frozen=True, kw_only=True)
class Request:
    """The drafts to write for an engine. ``tree`` for methods of trees, ``lengths`` for methods of chains (0: do not speculate).

    For methods of dynamic trees it is ``dynamic`` for every batch size, ``settings`` by batch size, or lengths of chains; for
    those of drafters that copy text it is ``copied``, None where the plan is not to speculate.

    widest         guesses of the widest block that the drafter was trained for; None where it has no such, or it is not known
    max_draft_len  of an engine that has been built already; None where it is built for this tree
    acceptance     record of the rule that the tree was chosen for; None for greedy decoding
    drafter_id     which drafter of its kind, as records name it
    runtime        whose latencies it was planned with
    groups         by group of prompts, what differs there, for methods that take settings by request
    marginals      a tree over marginals, for methods of chains that build such; its depth is the length
    """

    tree: Tree | None = None
    lengths: Lengths = ()
    dynamic: DynamicTree | None = None
    settings: Settings = ()
    copied: CopiedText | None = None
    batch_size: int = 1
    num_heads: int
    num_layers: int = 1
    widest: int | None = None
    drafter: str | None = None
    drafter_id: str | None = None
    version: str | None = None
    max_draft_len: int | None = None
    acceptance: Mapping[str, Any] | None = None
    runtime: Runtime | None = None
    groups: Mapping[str, "Request"] = field(default_factory=dict)
    marginals: DDTree | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "num_heads", "num_layers", "max_draft_len"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise InvalidInput(f"{name} must be a whole number of at least 1 to be exported, but is {value!r}.")

    @property
    def kind(self) -> str:
        """The kind of drafter, which a method's own writer always gets."""
        assert self.drafter is not None
        return self.drafter

    @property
    def rule(self) -> str:
        """The acceptance rule, by --acceptance's name."""
        return rule_of(self.acceptance)

    @property
    def dynamics(self) -> Settings:
        """The settings of dynamic trees by batch size; a chain is one of topk 1."""
        chains = tuple((a, b, DynamicTree(k, 1, k + 1) if k else None) for a, b, k in self.lengths)
        return self.settings or chains or ((1, None, self.dynamic),)

    @property
    def paying_tree(self) -> Tree | None:
        """The tree; None where the plan is not to speculate."""
        return self.tree if self.tree is not None and len(self.tree) > 1 else None

    def tree_of(self, engine: str) -> Tree:
        """The tree; InvalidInput where there is none to speculate with."""
        if self.paying_tree is None:
            raise InvalidInput(f"{engine} needs a tree, but the plan is not to speculate here: serve the model alone.")
        return self.paying_tree


@dataclass(frozen=True, kw_only=True)
class Written:
    """File name to text, the exact launch command with the flags that must match, and notes."""

    files: Mapping[str, str]
    command: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way in which an engine speculates.

    drafters       kinds of drafters that it runs, as `Calibration` and `Plan` name them
    shape          one of `treeopt.trees.shapes.SHAPES`, of the fixed trees that it takes; "copied" of drafters that copy text
    marginals      most ranks of a depth of the trees over marginals that it builds; 0 for none
    dynamic        whether it takes the three numbers of a dynamic tree, of which a chain is one
    within_levels, redrafts, fills_levels  as `DynamicLimits` has them; dynamic trees with a row for each level: all, chains, none
    rules          acceptance rules, by --acceptance's names, that its source was seen to have, where need be by a flag
                   that is written; rejection's law with guesses that are not drawn is that of ``sample``
    max_rank, max_depth, max_nodes, max_batch_size   None for no limit; nodes are choices, the root left out
    carrier        where the tree goes: a file, a flag, a field · syntax  how it is written, by example
    derived        fields that follow from the tree, "max_draft_len = choices"
    first_depth_closed  whether ranks must have no gap at depth 1, though they may further down
    by_version     whether its files differ by release · by_batch_size  whether it takes a schedule
    built_for_size whether another size needs another engine build · by_request  whether every request has settings of its own
    looks_up       how it looks n-grams up, where that is known: "from the latest place"; `EARLIEST` as ngram:earliest does
    wider          what it does with a chain that is longer than the block that a drafter was trained for; empty where it drafts it
    versions, status, source   which releases have it, whether they still do, and where that was read
    checked        the release or commit whose source its export was checked against
    write          the files; the launch command is added to them as `COMMANDS` where it is not among them
    """

    name: str
    drafters: tuple[str, ...]
    shape: str = "chain"
    marginals: int = 0
    dynamic: bool = False
    within_levels: bool = False
    redrafts: bool = False
    fills_levels: str = "chains"
    rules: tuple[str, ...] = ("greedy",)
    max_rank: int | None = None
    max_depth: int | None = None
    max_nodes: int | None = None
    max_batch_size: int | None = None
    carrier: str
    syntax: str
    derived: tuple[str, ...] = ()
    first_depth_closed: bool = False
    by_version: bool = False
    by_batch_size: bool = False
    built_for_size: bool = False
    by_request: bool = False
    looks_up: str = ""
    wider: str = ""
    versions: str = "current"
    status: str = "live"
    source: str
    checked: str
    write: Callable[[Request], Written]

    @property
    def dynamic_limits(self) -> DynamicLimits | None:
        """The limits of its dynamic trees, or of trees over marginals; None where it takes none."""
        if self.dynamic:
            return DynamicLimits(within_levels=self.within_levels, redrafts=self.redrafts, chains=True)
        return DynamicLimits(levels=0, marginals=True, width=self.marginals) if self.marginals else None

    def decodes(self, batch_size: int) -> bool:
        """Whether it decodes that many sequences at once."""
        return self.max_batch_size is None or batch_size <= self.max_batch_size


@dataclass(frozen=True)
class Kind:
    """A kind of file: what it must hold, how that is recognised and read, and the options that reading takes.

    read         : of a file alone; where an engine counted drafts, of all files together
    takes_others : whether another kind's files are read too, so that it is asked last
    """

    needed: str
    matches: Callable[[Any], bool]
    read: Callable[..., Found | CountedDrafts]
    options: tuple[str, ...] = ()
    takes_others: bool = False


@dataclass(frozen=True, kw_only=True)
class ServingEngine:
    """A serving engine and its methods, the usual one first.

    package  its name on the Python package index; None where its source is not there
    imports  kinds of files in which it says what it counted of its drafts, by --from's names
    server   what starts its HTTP server, which bench --launch starts; empty for none
    unplanned other ways in which it speculates, known and not planned for: name to how it is asked for
    """

    name: str
    title: str
    package: str | None = None
    server: str = ""
    methods: tuple[Method, ...] = ()
    imports: Mapping[str, Kind] = field(default_factory=dict)
    unplanned: Mapping[str, str] = field(default_factory=dict)
