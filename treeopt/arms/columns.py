"""What the words of a table mean: headers, labels, headings and cells as people write them.

A text is read into what it measures ("tok/s"), the axes that it names ("batch size"), the axes that it sets ("K=2", "c=8",
"no spec"), and the words that are left, which may name a drafter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

DRAFTER = (
    r"(?:p-?)?eagle(?:[- ]?[123](?:\.\d)?\b|(?![- ]?[123]\b))|mtp|nextn|medusa|hydra|d-?flash(?:2(?!\d)|(?!2(?!\d)))|dspark|domino|jacobi|ddtree|"
    r"n-?gram(?:[-_ ]mod)?|prompt[- ]?lookup|lookahead|suffix(?: decoding)?|pard|pearl|draft[- ]model|re-?drafter|"
    r"mlp[- ]speculator|self[- ]spec\w*"
)
SPECULATION = rf"(?:spec(?:ulation|ulative)?(?:[- ]?dec(?:oding|ode)?)?|sd|draft(?:ing|er)?|{DRAFTER})"
PER_REQUEST = r"(?:/|\bper|\bsingle|\beach)[- ]?(?:user|req(?:uest)?|stream|client|seq(?:uence)?)\b"
SPEED = (
    r"(?:(?:output|generation|gen|decode|decoding|eval|mean|avg|average|median|total|aggregate|system)[ -])*"
    r"(?:\b(?:token )?(?:throughput|thru?put|tput|speed)\b|\bto?k(?:en)?s? ?(?:/|\\|per) ?s(?:ec(?:ond)?s?)?\b|\bt/s\b|\btps\b|\btok s\b|"
    r"\btg ?\d*\b)"
)
TPOT = r"\btpot\b|time per (?:output )?tok(?:en)?\b|\bm?s(?:ec)? ?(?:/|per) ?tok(?:en)?\b|per-?token latency|latency per token"
LENGTH = r"(?:len(?:gths?)?|tokens?|tok)\b"
# In this order; what one has read the later ones do not see. "acceptance" is a length or a rate: its values decide.
MEASURES = (
    ("ignore", r"\bttft\b|\bitl\b|inter-?token|first token|\be2el?\b|(?<!token )\blatency\b(?! per tok)|(?:"
               + SPEED + r")[^a-z]*(?:/|\bper)[- ]?(?:gpu|card|device|chip)\b|req(?:uest)?s? ?(?:/|per) ?s\w*|requests? throughput|"
               r"total token throughput|peak (?:output )?(?:token )?throughput|\b(?:prompt|prefill|pp|input)\b.*(?:"
               + SPEED + r")|\bpp ?\d+\b|goodput|(?:draft|accepted) throughput|std ?(?:dev)? ?tpot"),
    ("tpot_p99_ms", rf"\bp99\b.*(?:{TPOT})|(?:{TPOT}).*\bp99\b"),
    ("ignore", r"\bp(?!50)\d\d\b.*|" + rf"(?:{TPOT}).*\bp(?!50)\d\d\b"),
    ("tokens_per_step", r"\btokens? ?(?:/|per) ?(?:step|pass|iteration|forward|round|verify)\w*|\bblock efficiency\b"),
    ("accepted_per_step", r"\baccepted (?:draft|drafted|guesses)[a-z ]* ?(?:/|per) ?(?:step|draft|round)|\b(?:avg|mean|average) accepted draft\w* tokens?"),
    ("positions", r"\bpositions?\b(?! ?\d)|(?:rates? )?(?:by|per)[- ]position(?: accept\w*)?(?: rates?)?"),
    ("acceptance_rate", r"\baccepted ?/ ?(?:drafted|generated|proposed|total)\b|\baccept\w*[- ]?(?:rate|%|percent\w*|ratio|prob\w*)|\bar ?\(?%\)?|\bhit rate|\baccept\w* ?\(%\)|"
                        r"% accepted|\balpha\b|α"),
    ("length", rf"(?:mean |avg |average )?(?:\baccept\w*|\bacc) ?{LENGTH}(?: ?(?:/|per) ?(?:step|draft|pass))?|\bal\b|\btau\b|τ|"
               r"mean accept\w*|avg accept\w*|accepted ?(?:/|per) ?(?:step|draft|pass)"),
    ("acceptance", r"\baccept(?:ance|ed)?\b|\bacc\b"),
    ("tokens_per_s_per_request", rf"(?:{SPEED})[^a-z]*{PER_REQUEST}|{PER_REQUEST} (?:{SPEED})|tokens per s per request"),
    ("tpot_s", rf"(?:{TPOT})[^a-z]*\bs(?:ec\w*)?\b|\bs(?:ec)? ?(?:/|per) ?tok(?:en)?\b"),
    ("tpot_ms", rf"(?:mean |median |avg |\bp50 )?(?:{TPOT})(?: p50\b)?"),
    ("speedup", rf"(?:{SPEED})? ?\bspeed-?ups?\b(?: (?:vs|over|to|wrt)\b.*)?|\brelative(?: speed)?\b|\bratio\b"),
    ("gain", rf"(?:{SPEED}) (?:delta|gain|improvement|change)\b|Δ ?%?|\bdelta\b|\bvs\.? .*|\bgain\b|\bimprovement\b|% ?change|(?:% ?)?\bdiff(?:erence)?\b|\buplift\b|\bover (?:off|baseline)"),
    ("spread", r"(?:±|\+/-) ?(?:std|sd)?|\bstd(?: ?dev)?\b|\bstdev\b|\bsd\b"),
    ("stderr", r"\bstderr\b|\bstandard error\b|\bsem\b"),
    ("tokens_per_s", SPEED),
    ("prompts", r"\bnum prompts\b|#? ?(?:questions|prompts|samples)\b|\b(?:successful|completed|n) requests\b"),
    ("seconds", r"\bduration\b|\bseconds\b|\belapsed\b|\bwall ?(?:time|clock)\b"),
    ("repeats", r"\brepeats\b|\bn ?runs\b|\bruns\b|\brepetitions\b"),
)  # fmt: skip
K = (
    r"(?:speculative[ -])?(?:(?:num[ -]|n[ -]|max[ -])?(?:spec(?:ulative)?|draft(?:ed)?)[ -](?:n[ -])?"
    r"(?:tokens?|len(?:gth)?|steps?|depth|max|n)|num[ -]steps)|(?:spec[ -]draft[ -])?n[ -]max|depth|gamma|γ"
)
BLOCK = r"block(?: size)?|(?:speculative[ -])?num[ -]draft[ -]tokens"  # the last verified token is among them
CONCURRENCY = (
    r"(?:max[ -])?(?:conc(?:urren(?:cy|t))?|batch(?:[ -]?size)?|bsz?|clients?|users?|streams?|parallel|slots|np)"
)
AXES = (
    ("block", rf"\b(?:{BLOCK}) ?[=:]? ?(\d+)\b|(?:(?<=(?:flash|lash2|spark|omino)[ -])|(?<=mtp[ -]))b ?=? ?(\d+)\b"),
    ("k", rf"(?<![a-z])(?:{K}|k|steps|spec|fixed|static)(?: ?[=:] ?| )(\d+)\b|\bdraft(?: ?= ?|[ -])(\d{{1,2}})\b(?!\.\d)|(?<!@ )\b[dn] ?=? ?(\d{{1,2}})\b|\bk(\d+)\b|\b(\d+) (?:(?:spec\w*|draft\w*) tokens?|(?:(?:spec\w*|draft\w*) )?steps?)\b|\((\d+) (?:tokens?|steps?|drafts?)\)"),
    ("concurrency", rf"\b{CONCURRENCY} ?[=:@-]? ?(\d+)\b|\b(?:c|b(?! ?[123]00\b)) ?(\d{{1,3}})\b|\b[cb] ?= ?(\d+)\b|@ ?(\d+)\b|\b(\d+) (?:users?|clients?|streams?|parallel|"
                    r"concurrent|reqs?|requests|slots)\b(?: \w+)?"),
    ("temperature", r"\btemp(?:erature)? ?[=:]? ?(\d+(?:\.\d+)?)|\bt ?= ?(\d+(?:\.\d+)?)"),
    ("context", r"@ d(\d+)\b|\b(\d+ ?k?) (?:ctx|context)\b|\b(?:ctx|context)(?: len\w*)? ?[=:]? ?(\d+ ?k?)\b"),
    ("run", r"\b(?:run|rep(?:eat)?|trial|seed|iter(?:ation)?)[ #]*(\d+)\b"),
    ("position", r"\bpos(?:ition)?[ #=]*(\d+)\b"),
)  # fmt: skip
PLAIN = re.compile(
    rf"\b(?:no|non|without|w/o)[- ]?{SPECULATION}(?: decoding)?|\b{SPECULATION}[ :=]*(?:off|disabled|none)\b|"
    r"\b(?:off|baseline|base|vanilla|none|autoregressive|plain|disabled|ar|target[- ]only)\b(?: decoding)?",
    re.IGNORECASE,
)
ADAPTIVE = re.compile(
    r"\b(?:adaptive|dynamic|auto)\b(?: ?\(?(?:<=|≤|up to |max )? ?\d+(?:[-–]\d+)?\)?)?", re.IGNORECASE
)
SHORT_K = re.compile(
    rf"\b(?:{DRAFTER})(?: chain| tree| head| draft)?(?:[-x×=]|(?<=mtp)| ?\(?(?=\d{{1,2}}\)? *(?:[:;)(|/+]|,(?!\d)|$)))(\d{{1,2}})\b",
    re.IGNORECASE,
)
TREE = re.compile(
    r"(?<![\w.,-])\(?(\d{1,2})(?:-|, ?)(\d{1,2})(?:-|, ?)(\d{1,3})\)?(?![\w.-]|, ?\d)"
)  # SGLang's steps, topk and rows
DRAFTED = re.compile(rf"\b(?:{DRAFTER})", re.IGNORECASE)
NAMES = (
    ("block", BLOCK),
    ("k", rf"(?:(?:{DRAFTER}) )?(?:{K})|k|n|steps|num spec(?:ulative)?|spec|lookahead|speculation length"),
    ("concurrency", rf"{CONCURRENCY}(?: level)?|c|concurrent \w+|requests in[ -]flight|reqs|load|b"),
    ("drafter", r"drafter|draft(?: model)?|spec(?:ulative)? (?:method|algorithm|type)|speculator|algorithm|head"),
    ("label", r"|config\w*|set(?:ting|up)s?|method|mode|arm|variant|run|case|name|speculation|spec(?:ulative)?[ -]?dec\w*|decoding|type"),
    ("model", r"(?:target |base )?model(?: name)?|target|llm"),
    ("dataset", r"data ?sets?|data|benchmarks?|tasks?|workload|prompts?|category|subset|domain|suite"),
    ("note", r"notes?|remarks?|comments?|status|verdict|result|why|source|link|url|author|date|day"),
    ("ignore", r"#|id|idx|index|row|seed|rep(?:eat|etition)?|trial|iter(?:ation)?|run (?:id|#|no\.?)|rank"),
    ("option", r"(?:speculative[ -])?(?:eagle[ -])?top[ -]?k"),
    ("positions", r"pos|rates"),
    ("speedup", r"x|×|speed ?up \(?x\)?"),
    ("prompts", r"n prompts|requests"),
    ("tokens_per_s", r"t|toks|tok|tokens|decode|generation|output"),
    ("temperature", r"temp(?:erature)?"),
    ("context", r"\D*context\D*|ctx|depth of context"),
    ("input_tokens", r"isl|(?:input|prompt|prefill)[ -]?(?:len\w*|tok\w*)"),
    ("output_tokens", r"osl|(?:output|max|max new|gen\w*)[ -]?(?:len\w*|tok\w*)"),
    ("kv_type", r"kv.*|cache.*"),
    ("quantization", r"quant\w*|dtype|precision|weights"),
    ("version", r"version|commit|build|image|branch"),
    ("engine", r"engine|framework|server"),
    ("hardware", r"hardware|backend|gpus?|device|gpu type|[tpde]p|tp size"),
    ("setting", r"qps|request rate|top[ -]?p|isl ?/ ?osl|table|thinking|attention|cuda ?graphs?|eager|sampling|greedy"),
)  # fmt: skip
ENGLISH = (
    (r"(?:最大)?并发(?:请求)?[数度]?|gleichzeitige \w+|anfragen parallel|parallele anfragen", "concurrency"),
    (r"批(?:处理)?大小|batch-?größe", "batch size"),
    (r"(?:投机|推测)(?:解码)?(?:长度|步数)", "k"),
    (r"(?:关闭|无|不开|未开启)(?:投机|推测)(?:解码|采样)?|基线|ohne spek\w*", "no spec"),
    (r"なし", " no spec"),
    (r"\b(?:ohne|sans|sin)\b", "no"),
    (r"(?:输出|生成|解码)?(?:吞吐量?|速度)|durchsatz", "throughput"),
    (r"(?:平均)?接受长度|(?:akzeptanz|annahme)länge", "accept length"),
    (r"接受率|(?:akzeptanz|annahme)rate", "acceptance rate"),
    (r"加速比?|beschleunigung", "speedup"),
    (r"模型|modell\b", "model"),
    (r"数据集|datensatz", "dataset"),
    (r"配置|方法|konfiguration|methode", "config"),
)
CANONICAL = {meaning for meaning, _ in MEASURES if meaning != "prompts"}  # figures under their own names
UNNAMED = "draft"  # drafter of an arm whose source names none
MOST_NAME = 5  # words
MOST_COUNT = 2**16
SHARE = re.compile(r"([\d.]+) ?/ ?([\d.]+)", re.ASCII)
SWITCH = re.compile(r"(on|yes|true|enabled|✓|✅)|off|no|false|disabled|✗|❌|-|–|—", re.IGNORECASE)
BLANK = "\x1f"  # in place of what was read
TAKEN = tuple((meaning, re.compile(pattern, re.IGNORECASE)) for meaning, pattern in MEASURES)
SET = tuple((axis, re.compile(pattern, re.IGNORECASE)) for axis, pattern in AXES)
NAMED = tuple((axis, re.compile(rf"(?:{pattern})", re.IGNORECASE)) for axis, pattern in NAMES)
MODEL = re.compile(
    r"[\w./-]*(?:qwen|llama(?![-.]?(?:server|cpp|bench|cli))|gemma|deepseek|glm|mi[sx]tral|phi-?\d|gpt|kimi|nemotron|apertus|vicuna|minimax|\d+b\b)[\w./-]*"
    r"(?: \d[\w.-]*| flash\b| coder\b| nvfp4\b| fp8\b| bf16\b)*",
    re.IGNORECASE,
)
DATASET = re.compile(
    r"gsm-?8k|math-?\d*|human-?eval\+?|mbpp\+?|mt-?bench|alpaca|share-?gpt|spec-?bench|livecodebench|aime\S*|gpqa|mmlu\S*|"
    r"swe-?(?!ep)\w*|cnn\S*|summari[sz]ation|translation|\brag\b|\bcod(?:e|ing)\b|\bchat\b|\bqa\b",
    re.IGNORECASE,
)
QUANTIZATION = re.compile(r"\b(?:bf16|fp16|fp8|(?:nv|mx)?fp4|int[48]|awq|gptq|q[2-8]_\w+)\b", re.IGNORECASE)
CANNOT = re.compile(r"oom\b|out of memory|unsupported|not supported|cannot|crash|fail|err(?:or)?\b|✗|❌", re.IGNORECASE)
MISSING = re.compile(
    rf"[-–—−?/.\s]*|n/?a|nan|null|none|tbd|todo|time-?out|skip\w*|not run|dnf|dnr|pending|(?:{CANNOT.pattern}).*",
    re.IGNORECASE,
)
SUMMARY = re.compile(
    r"avg\.?|average|(?:geo(?:metric)?\.?[- ]?)?mean|gmean|overall|total|sum|median|min|max|std", re.IGNORECASE
)
NUMBER = re.compile(
    r"(?<![\w.])(?<![A-Za-z]-)([+-]?(?:[0-9]{1,3}(?:[,'_\u202f\u00a0 ][0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?|[+-]?(?:\.[0-9]+|inf(?:inity)?))"
    r"(?: ?(%|x\b|×|k\b|[a-zµ/]+))?(?!\w|\.\d)(?: ?(?:±|\+/-|\+-) ?([0-9]*\.?[0-9]+) ?(%)?)?",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Words:
    """What a text says.

    text     : without marks
    measures : meanings of its figures, in its order
    said     : their words in the text
    names    : axes that it names ("K \\ concurrency"); of a column "?name" where it may be no setting
    axes     : axes that it sets
    rest     : other words
    """

    text: str
    measures: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    axes: Mapping[str, str] = field(default_factory=dict)
    rest: str = ""
    said: str = ""

    @property
    def axis(self) -> str:
        return self.names[0] if self.names else ""


@dataclass(frozen=True)
class Number:
    """A figure of a cell, its unit as it stands, and the spread behind its "±"."""

    value: float
    unit: str = ""
    spread: float | None = None


def bare(text: str) -> str:
    """The text without the marks of Markdown and HTML.

    >>> bare("**28.5**<br>`MTP`  [K=2](https://x)")
    '28.5 MTP K=2'
    """
    text = re.sub(r"<[^<>]{0,80}>|&nbsp;|[*`🏆🥇⭐✅🔥†‡]|(?<=\.\d)[¹²³]|\[\^\w+\]|\\(?=[|_*])", " ", text)
    return " ".join(re.sub(r"!?\[([^][]{0,200})\]\([^()]{0,500}\)", r"\1", text).split())


@lru_cache(maxsize=4096)
def words_of(text: str) -> Words:
    r"""What a header, a label or a heading says.

    >>> words_of("accept MTP K=1").measures, dict(words_of("accept MTP K=1").axes)
    (('acceptance',), {'k': '1', 'drafter': 'MTP'})
    >>> words_of("no spec").axes, words_of("Output token throughput (tok/s)").measures, words_of("K \\ batch size").names
    ({'k': '0'}, ('tokens_per_s',), ('k', 'concurrency'))
    """
    original = bare(text)
    text = re.sub(r"(?i)\bsingle[- ](?=user|stream|client)", "1 ", original[:400])
    for foreign, english in ENGLISH:
        text = re.sub(rf" ?(?:{foreign}) ?", f" {english} ", text, flags=re.IGNORECASE)
    is_record = "{" in text
    text = re.sub(r"[\"{}]", " ", text)
    name = " ".join(re.sub(r"[\s_]+", " ", text).strip(" :-.").split())
    if name.replace(" ", "_") in CANONICAL:
        return Words(original, (name.replace(" ", "_"),), said=name)
    whole = axis_of(name)
    names = [whole] if whole else [axis_of(part) for part in re.split(r" ?[\\/|↓→] ?| x | vs ", name)]
    if None not in names:
        return Words(original, names=tuple(name for name in names if name))
    axes, left = _set_axes(text.replace("_", " "))
    found: dict[int, str] = {}
    said: list[str] = []
    for meaning, pattern in TAKEN:
        for match in pattern.finditer(left):
            found.setdefault(match.start(), meaning)
            said.append(match[0].strip())
        left = pattern.sub(lambda match: BLANK * len(match[0]), left)
    if (match := PLAIN.search(left)) and "k" not in axes:
        axes["k"] = "0"
        left = _blanked(left, *match.span())
    elif match := ADAPTIVE.search(left):
        axes["k"] = " ".join(match[0].split())
        left = _blanked(left, *match.span())
    rest = " ".join("".join(" " if new == BLANK else old for old, new in zip(text, left, strict=True)).split())
    if axes.get("k") != "0" and (match := DRAFTED.search(rest)):
        name = drafter_name(rest)
        axes["drafter"] = match[0] if is_record or len(name.split()) > MOST_NAME else name
    measures = tuple(dict.fromkeys(found[place] for place in sorted(found)))
    measures = ("ignore",) if "ignore" in measures else measures
    return Words(original, measures, axes=axes, rest=rest, said=" ".join(said))


def _set_axes(text: str) -> tuple[dict[str, str], str]:
    """The axes that a text sets, and the text without them."""
    axes: dict[str, str] = {}
    if (match := TREE.search(text)) and (tree := tree_axes(*map(int, match.groups()))):
        axes |= tree
        text = _blanked(text, *match.span())
    elif match := SHORT_K.search(text):
        axes["k"] = match[1]
        text = _blanked(text, *match.span(1))
    for axis, pattern in SET:
        if match := pattern.search(text):
            axes.setdefault(axis, next(group for group in match.groups() if group))
            text = _blanked(text, *match.span())
    if "block" in axes:
        block = int(axes.pop("block"))
        axes.setdefault("k", str(max(0, block - 1)))
    return axes, text


def _blanked(text: str, start: int, end: int) -> str:
    return text[:start] + BLANK * (end - start) + text[end:]


def tree_axes(steps: int, topk: int, rows: int) -> dict[str, str]:
    """What SGLang's three flags set; nothing where they fit no tree.

    >>> tree_axes(3, 1, 4), tree_axes(5, 8, 64), tree_axes(1, 8, 32)
    ({'k': '3'}, {'k': '5', 'tree': 'tree (topk 8, 64 tokens)'}, {})
    """
    if topk == 1 and rows == steps + 1:
        return {"k": str(steps)}
    if topk > 1 and steps < rows <= 1 + topk + (steps - 1) * topk**2:
        return {"k": str(steps), "tree": f"tree (topk {topk}, {rows} tokens)"}
    return {}


def axis_of(name: str) -> str | None:
    """The axis of which this is the whole name; "setting" for a known setting of how it was run."""
    return next((axis for axis, pattern in NAMED if pattern.fullmatch(name)), None)


def drafter_name(text: str) -> str:
    """The words without those that say only that it speculates.

    >>> drafter_name("speculative decoding with DSpark ( ):")
    'DSpark'
    """
    text = re.sub(r"\((w/o?|with|without) (\w+)\)", r"\1-\2", text)
    text = re.sub(
        r"\b(?:with|using|w/|spec(?:ulative)?|decoding|on|at|in|and|tokens?|values?|enabled|yes|true|method|name)(?=\s|$|=|:)",
        " ",
        text,
        flags=re.IGNORECASE,
    )
    text = re.sub(r"\(\s*\W*\s*\)|\[\s*\]", " ", text)
    return re.sub(r"\s*\([^()]*$", "", " ".join(text.split()).strip(" _:,;=@|+/()–—-"))


@lru_cache(maxsize=65536)
def numbers_of(text: str, comma: bool = False) -> tuple[Number, ...]:
    """The figures of a cell.

    comma : whether a comma is always that of a decimal, as in a table with semicolons

    >>> [number.value for number in numbers_of("~1,234.5 (+67%)")], numbers_of("12.3 ± 0.4 ms")[0].spread
    ([1234.5, 67.0], 0.4)
    """
    text = text.replace("−", "-")
    if comma and "," in text:
        text = text.replace(".", "")
    pattern = r"(?<![\d,.])(\d+),(\d+)(?![\d,])" if comma else r"(?<![\d,.])(\d+),(\d{1,2}|\d{4,})(?![\d,])"
    text = re.sub(pattern, r"\1.\2", text)
    numbers = []
    for match in NUMBER.finditer(text):
        value = float(re.sub(r"[,'_\s]", "", match[1]))
        unit = (match[2] or "").lower().replace("×", "x")
        spread = float(match[3]) if match[3] else None
        if spread is not None and match[4]:
            spread *= value / 100
        numbers.append(Number(value * 1000, "", spread) if unit == "k" else Number(value, unit, spread))
    return tuple(numbers)


def has_figure(words: Words) -> bool:
    """Whether a phrase has a figure and says what it is: "accept 2.18"."""
    return bool(words.measures) and words.measures != ("ignore",) and bool(numbers_of(words.rest.replace(":", " ")))


def figures_of(measures: tuple[str, ...], cell: str, comma: bool) -> tuple[Number, ...]:
    """The figures of a cell: one, or those that its column has. Raises ValueError with the rule for a cell that has others."""
    if MISSING.fullmatch(cell) or PLAIN.fullmatch(cell):
        return ()
    if measures == ("positions",):
        numbers = numbers_of(re.sub(r"[][();/|]+" if comma else r"[][();/|,]+", " ; ", cell), comma)
    elif measures[0] in ("acceptance_rate", "acceptance", "length") and (parts := SHARE.fullmatch(cell)):
        if measures == ("length",) and "." in parts[2]:
            raise ValueError("a number")  # not two
        whole = 1 if measures == ("length",) else float(parts[2]) or 1
        numbers = (Number(float(parts[1]) / whole),)
    elif len(measures) > 1:
        numbers = numbers_of(cell, comma)
    else:
        outside = numbers_of(re.sub(r"\([^()]*\)| of [\d.]+", "", cell), comma)
        speeds = [number for number in numbers_of(cell, comma) if number.unit.startswith("t")]
        plain = [number for number in outside if number.unit not in ("%", "x")]
        numbers = tuple(speeds[:1] or plain or [number for number in outside if number.unit == "x"] or outside)
    if not numbers or (len(numbers) > 1 and len(measures) == 1 and measures != ("positions",)):
        raise ValueError("a number")
    return numbers


def axes_of(axis: str, cell: str, name: str, has_k: bool) -> dict[str, str]:
    """What a cell says of an axis, and of others. Raises ValueError with the rule where it must be a number and is none.

    name  : of the column
    has_k : whether another column has K, so that a number in a drafter's name is part of it
    """
    words = words_of(cell)
    if axis in ("", "ignore", "summary"):
        return {}
    if axis == "model" and len(parts := re.split(r" (?:\+|with|w/) ", cell, maxsplit=1)) == 2:
        return {axis: parts[0], **axes_of("label", parts[1], name, has_k)}
    if axis == "switch":
        return {"drafter": drafter_name(name)} if SWITCH.fullmatch(cell)[1] else {"k": "0"}  # type: ignore[index]
    if axis == "drafter" and has_k:
        return {"k": "0"} if PLAIN.fullmatch(cell) else {"drafter": cell}
    if axis in ("label", "drafter"):
        drafter = drafter_name(words.rest) if words.axes.get("k") != "0" else ""
        return {**words.axes, **({"drafter": drafter} if drafter else {}), **({"?label": words.rest} if cell else {})}
    if axis == "concurrency" and axis in words.axes:
        return {axis: words.axes[axis]}
    if axis in ("k", "block") and "k" in words.axes:
        return dict(words.axes)
    if MISSING.fullmatch(cell):
        return {}
    if axis not in ("k", "block", "concurrency"):
        return {axis: cell}
    if axis == "k" and (match := DRAFTED.match(cell)):
        return {"drafter": match[0], **axes_of(axis, cell[match.end() :].strip(" ,"), name, has_k)}
    if axis == "k" and not numbers_of(cell) and re.fullmatch(r"[a-z][\w .+-]*", cell, re.IGNORECASE):
        return axes_of("label", cell, name, has_k)
    (number,) = figures_of((axis,), cell, False)
    least = int(axis == "concurrency")
    if not least <= number.value <= MOST_COUNT or number.value % 1:
        raise ValueError(f"a whole number from {least} to {MOST_COUNT:,}")
    return {"k": str(max(0, int(number.value) - 1))} if axis == "block" else {axis: str(int(number.value))}
