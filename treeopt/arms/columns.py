"""What the words of a table mean: headers, labels, headings and cells as people write them.

A text is read into what it measures ("tok/s"), the axes that it names ("batch size"), the axes that it sets ("K=2", "c=8",
"no spec"), and the words that are left, which may name a drafter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from treeopt.arms import lexicon


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
    for foreign, english in lexicon.ENGLISH:
        text = re.sub(rf" ?(?:{foreign}) ?", f" {english} ", text, flags=re.IGNORECASE)
    is_record = "{" in text
    text = re.sub(r"[\"{}]", " ", text)
    name = " ".join(re.sub(r"[\s_]+", " ", text).strip(" :-.").split())
    if name.replace(" ", "_") in lexicon.CANONICAL:
        return Words(original, (name.replace(" ", "_"),), said=name)
    whole = axis_of(name)
    names = [whole] if whole else [axis_of(part) for part in re.split(r" ?[\\/|↓→] ?| x | vs ", name)]
    if None not in names:
        return Words(original, names=tuple(name for name in names if name))
    axes, left = _set_axes(text.replace("_", " "))
    found: dict[int, str] = {}
    said: list[str] = []
    for meaning, pattern in lexicon.MEASURES:
        for measure in pattern.finditer(left):
            found.setdefault(measure.start(), meaning)
            said.append(measure[0].strip())
        left = pattern.sub(lambda measure: lexicon.BLANK * len(measure[0]), left)
    if (match := lexicon.PLAIN.search(left)) and "k" not in axes:
        axes["k"] = "0"
        left = _blanked(left, *match.span())
    elif match := lexicon.ADAPTIVE.search(left):
        axes["k"] = " ".join(match[0].split())
        left = _blanked(left, *match.span())
    rest = " ".join("".join(" " if new == lexicon.BLANK else old for old, new in zip(text, left, strict=True)).split())
    if axes.get("k") != "0" and (match := lexicon.DRAFTED.search(rest)):
        name = drafter_name(rest)
        axes["drafter"] = match[0] if is_record or len(name.split()) > lexicon.MOST_NAME else name
    measures = tuple(dict.fromkeys(found[place] for place in sorted(found)))
    measures = ("ignore",) if "ignore" in measures else measures
    return Words(original, measures, axes=axes, rest=rest, said=" ".join(said))


def _set_axes(text: str) -> tuple[dict[str, str], str]:
    """The axes that a text sets, and the text without them."""
    axes: dict[str, str] = {}
    if (match := lexicon.TREE.search(text)) and (tree := tree_axes(*map(int, match.groups()))):
        axes |= tree
        text = _blanked(text, *match.span())
    elif match := lexicon.SHORT_K.search(text):
        axes["k"] = match[1]
        text = _blanked(text, *match.span(1))
    for axis, pattern in lexicon.AXES:
        if match := pattern.search(text):
            axes.setdefault(axis, next(group for group in match.groups() if group))
            text = pattern.sub(lambda match: lexicon.BLANK * len(match[0]), text)
    if "block" in axes:
        block = int(axes.pop("block"))
        axes.setdefault("k", str(max(0, block - 1)))
    return axes, text


def _blanked(text: str, start: int, end: int) -> str:
    return text[:start] + lexicon.BLANK * (end - start) + text[end:]


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
    return next((axis for axis, pattern in lexicon.NAMES if pattern.fullmatch(name)), None)


def drafter_name(text: str) -> str:
    """The words without those that say only that it speculates.

    >>> drafter_name("speculative decoding with DSpark ( ):")
    'DSpark'
    """
    text = re.sub(r"\((w/o?|with|without) (\w+)\)", r"\1-\2", text)
    text = re.sub(
        r"\b(?:with|using|of|w/|spec(?:ulative)?|decoding|on|at|in|and|tokens?|values?|enabled|yes|true|method|name)(?=\s|$|=|:)",
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
    for match in lexicon.NUMBER.finditer(text):
        value = float(re.sub(r"[,'_\s]", "", match[1]))
        unit = (match[2] or "").lower().replace("×", "x")
        spread = float(match[3]) if match[3] else None
        if spread is not None and match[4]:
            spread *= value / 100
        numbers.append(Number(value * 1000, "", spread) if unit == "k" else Number(value, unit, spread))
    return tuple(numbers)


def has_figure(words: Words) -> bool:
    """Whether a phrase has a figure and says what it is: "accept 2.18"; of a speed or a time no percentage is one."""
    numbers = numbers_of(words.rest.replace(":", " "))
    if words.measures[:1] in (("tokens_per_s",), ("tpot_ms",)):
        numbers = tuple(number for number in numbers if number.unit != "%")
    return bool(words.measures and numbers) and words.measures != ("ignore",)


def figures_of(measures: tuple[str, ...], cell: str, comma: bool) -> tuple[Number, ...]:
    """The figures of a cell: one, or those that its column has. Raises ValueError with the rule for a cell that has others."""
    if lexicon.MISSING.fullmatch(cell) or lexicon.PLAIN.fullmatch(cell):
        return ()
    if measures == ("positions",):
        numbers = numbers_of(re.sub(r"[][();/|]+" if comma else r"[][();/|,]+", " ; ", cell), comma)
    elif measures[0] in ("acceptance_rate", "acceptance", "length") and (parts := lexicon.SHARE.fullmatch(cell)):
        if measures == ("length",) and "." in parts[2]:
            raise ValueError("a number")  # not two
        whole = 1 if measures == ("length",) else float(parts[2]) or 1
        numbers = (Number(float(parts[1]) / whole),)
    elif len(measures) > 1:
        numbers = numbers_of(cell, comma)
    else:
        around = re.sub(r"\([^()]*\)| of [\d.]+", "", cell)
        if re.search(r"\d ?[-–—] ?\d", around) and not measures[0].startswith("accept"):
            raise ValueError("a number")  # not a range
        outside = numbers_of(around, comma)
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
    if axis == "model" and (mark := re.search(r", | (?:\+|with|w/) ", cell)):
        model, setting = cell[: mark.start()], cell[mark.end() :]
        if mark[0] != ", " or "k" in words_of(setting).axes:
            return {axis: model, **axes_of("label", setting, name, has_k)}
    if axis == "switch":
        return {"drafter": drafter_name(name)} if lexicon.SWITCH.fullmatch(cell)[1] else {"k": "0"}  # type: ignore[index]
    if axis == "drafter" and has_k:
        return {"k": "0"} if lexicon.PLAIN.fullmatch(cell) else {"drafter": cell}
    if axis in ("label", "drafter"):
        drafter = drafter_name(words.rest) if words.axes.get("k") != "0" else ""
        return {**words.axes, **({"drafter": drafter} if drafter else {}), **({"?label": words.rest} if cell else {})}
    if axis == "concurrency" and axis in words.axes:
        return {axis: words.axes[axis]}
    if axis in ("k", "block") and "k" in words.axes:
        return dict(words.axes)
    if lexicon.MISSING.fullmatch(cell):
        return {}
    if axis not in ("k", "block", "concurrency"):
        return {axis: cell}
    if axis == "k" and (match := lexicon.DRAFTED.match(cell)):
        return {"drafter": match[0], **axes_of(axis, cell[match.end() :].strip(" ,"), name, has_k)}
    (number,) = figures_of((axis,), cell, False)
    least = int(axis == "concurrency")
    if not least <= number.value <= lexicon.MOST_COUNT or number.value % 1:
        raise ValueError(f"a whole number from {least} to {lexicon.MOST_COUNT:,}")
    value = int(number.value)
    if axis == "concurrency":
        return {axis: str(value)}
    guesses = max(0, value - (axis == "block"))
    match = lexicon.DRAFTED.match(name) if guesses else None
    return {"k": str(guesses), **({"drafter": match[0]} if match else {})}
