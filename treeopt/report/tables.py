"""What each command shows of its result, but of plans and benchmarks: these have a file each."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.text import Text

from treeopt.growth.score import Score
from treeopt.records.calibration import ENGINE_LOG, Calibration
from treeopt.records.drafters import depth_noun
from treeopt.records.estimate import Estimate
from treeopt.records.requestlog import RequestLog
from treeopt.report.status import OK, RunStatus
from treeopt.report.table import Column, Table, texts
from treeopt.report.terminal import together
from treeopt.report.wording import count, percent, pm

RANKS = 5  # of a table of accuracies


def calibration_table(calibration: Calibration) -> RenderableType:
    """Accuracy of each head, or at each depth, at the first ranks, with its standard error; then group by group."""
    info = calibration.meta
    if info.get("source") == ENGINE_LOG and info.get("survival"):
        return _survival_table(calibration)
    who, caption = depth_noun(info.get("drafter") or {"kind": "medusa"}), about_answers(info)
    title = "Head accuracy" if who == "head" else "Accuracy by depth"
    if (info.get("acceptance") or {}).get("rule") == "rejection":
        title = "Share accepted by depth"
    counts = (("positions", "states"), ("sequences", "answers"))
    if counted := [f"{info[key]:,} {noun}" for key, noun in counts if info.get(key)]:
        title += f" over {' of '.join(counted)}"

    def at_rank(r: int) -> Column:
        accept, error = calibration.accept[:, r], calibration.stderr[:, r]
        return Column(f"rank {r}", lambda k: pm(Estimate(accept[k], error[k]), 3), spare=max(r - 1, 0))

    columns = [
        Column(who, lambda k: str(k + 1), names=True),
        *map(at_rank, range(min(RANKS, calibration.top_k))),
        Column("trials", lambda k: str(calibration.trials[k])),
    ]
    table = Table(title, columns, range(calibration.num_heads), caption=" ".join(caption))
    return together(table, _group_table(info["groups"], calibration.num_heads) if info.get("groups") else None)


def _survival_table(calibration: Calibration) -> RenderableType:
    """Survival of a chain depth by depth, as an engine counted it."""
    info, accept = calibration.meta, calibration.accept[:, 0]
    title = "Survival of a chain"
    title += f": {info['drafts']:,} drafts" if info.get("drafts") else ""
    title += f" of {info['requests']:,} requests" if info.get("drafts") and info.get("requests") else ""
    columns = [
        Column("depth", lambda k: str(k + 1), names=True),
        Column("all right so far", lambda k: pm(info["survival"][k], 3)),
        Column("of those right before", lambda k: pm(accept[k] if calibration.trials[k] else None, 3)),
        Column("trials", lambda k: str(calibration.trials[k]) if info.get("drafts") else "–"),
    ]
    table = Table(title, columns, range(calibration.num_heads))
    return together(table, _survival_by_group(info["groups"]) if info.get("groups") else None)


def _survival_by_group(groups: Mapping[str, Mapping[str, Any]]) -> Table:
    """Tokens per step of the drafts on each group of prompts."""

    def rate(name: str) -> str:
        passed = Calibration(np.array(groups[name]["hits"]), np.array(groups[name]["trials"])).survival
        return f"{1 + passed.sum():.2f}"

    return Table("By group", [Column("group", str, names=True), Column("tokens/step", rate)], groups)


def _group_table(groups: Mapping[str, Mapping[str, Any]], num_heads: int) -> Table:
    """Top-1 accuracy of each head, and tokens per step, group by group."""

    def top1(name: str, k: int) -> str:
        hits, trials = groups[name]["hits"][k][0], groups[name]["trials"][k]
        return pm(hits / trials if trials else None, 3)

    columns = [
        Column("group", str, names=True),
        Column("answers", lambda name: str(groups[name]["sequences"])),
        *(Column(f"head {k + 1}", partial(top1, k=k), spare=k) for k in range(num_heads)),
        Column("tokens/step", lambda name: pm(groups[name].get("tokens_per_step"))),
    ]
    return Table("By group: accuracy at rank 0, held-out tokens per step with 64 rows", columns, groups)


def about_answers(info: Mapping[str, Any]) -> list[str]:
    """Sentences on how the answers of a calibration came about, and what was left out."""
    said, answers = [], info.get("answers") or {}
    if info.get("loop_share"):
        said.append(f"{info['loop_share']:.0%} of the answers ended in a loop and were cut there.")
    if answers.get("given"):
        kind = "An estimate for greedy decoding, from given answers"
        if not answers.get("is_estimate"):
            kind = f"From answers sampled by the target itself at temperature {answers['temperature']:g}"
        agreement = info.get("target_agreement", 0)
        said.append(f"{kind}: the target's own first choice is the given token in {agreement:.1%} of the states.")
    if info.get("skipped"):
        said.append(f"{len(info['skipped'])} prompts or turns left out (listed in calibration.json).")
    return said


def requests_table(log: RequestLog) -> Table:
    """Requests, conversations and tokens of a log, of all and group by group."""
    rows = [(name or "all", *(f"{n:,}" for n in counted.values())) for name, counted in log.counts().items()]
    skipped = (log.meta.get("counted") or {}).get("skipped", 0)
    return Table(
        "What was asked and answered",
        texts("group", "requests", "conversations", "prompt tokens", "answer tokens", names=1),
        rows,
        caption=f"{count(skipped, 'row')} left out.",
    )


def score_table(score: Score, name: str) -> RenderableType:
    """The tree, the best of its size and the smallest that reaches as much; what it comes to, in sentences."""
    held_out = " (held out)" if score.best.tokens_per_step.stderr is not None else ""
    labels = (name, f"best of its size{held_out}", f"smallest that reaches it{held_out}")
    columns = [
        Column("tree", lambda row: row[0], names=True),
        Column("rows", lambda row: str(row[1].size)),
        Column("depth", lambda row: str(row[1].depth)),
        Column("tokens/step", lambda row: pm(row[1].tokens_per_step, 3)),
    ]
    trees = zip(labels, (score.given, score.best, score.smallest), strict=True)
    return together(Table("Tokens per step", columns, [row for row in trees if row[1]]), score_words(score, name))


def score_words(score: Score, name: str) -> str:
    """How far a tree is below the best of its size, in a sentence or two."""
    error, size, best = score.distance.stderr, score.given.size, f"the best tree of {score.best.size} rows"
    share = percent(Estimate(min(1 - score.distance, 1.0), error), "below", "above", digits=1)
    if score.unknown_nodes:
        return f"{name} is at most {share} {best}."
    said = f"{name} is {share} {best}."
    if round(score.distance, 4) <= 2 * (error or 0.0):
        said = f"{name} is as good as {best}{f', within the noise ({share})' if error else ''}."
    if score.smallest and score.smallest.size < size:
        said += f" {score.smallest.size} rows reach what its {size} do."
    return said


def training_table(record: Mapping[str, Any], command: str) -> RenderableType:
    """Accuracy of each head on the held-out texts, before and after; then the line that uses them."""
    before, after = (record["held_out"][when] for when in ("before", "after"))

    def column(header: str, found: Mapping[str, Any], key: str) -> Column:
        return Column(header, lambda k: pm(found[key][k], 3))

    columns = [
        Column("head", lambda k: str(k + 1)),
        column("before", before, "accuracy"),
        column("after", after, "accuracy"),
        column("loss before [nats]", before, "head_loss_nats"),
        column("after", after, "head_loss_nats"),
        Column("states", lambda k: f"{after['trials'][k]:,}"),
    ]
    title = f"First choices that are right, on {record['texts']['held_out']} held-out texts"
    said = f"{record['steps']:,} steps in {record['seconds']:,.0f} s."
    advice = "Calibrate on prompts that the heads did not learn from:"
    table = Table(title, columns, range(len(after["trials"])))
    return together(table, said, advice, Text(command, no_wrap=True, overflow="ignore"))


def status_table(status: RunStatus) -> RenderableType:
    """A row for every file, and the command to give next."""
    columns = [
        Column("file", lambda row: row.name, names=True),
        Column("made [UTC]", lambda row: (row.made or "").replace("T", " ")[:16], names=True),
        Column("state", lambda row: f"{row.state}: {row.why}" if row.why else row.state, names=True),
        Column("holds", lambda row: row.holds, names=True),
    ]
    files = Table(f"Files of {status.run}", columns, status.files, bold=lambda row: row.state != OK)
    said = f"{status.why} Next:" if status.next else status.why
    return together(files if status.files else None, said, status.next)
