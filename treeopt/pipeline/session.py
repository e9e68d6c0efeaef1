"""Sessions of a run: a model is loaded by the options that are given, on top of those that the run was calibrated with."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from treeopt import demo
from treeopt.errors import InvalidInput
from treeopt.files.notes import note
from treeopt.files.options import options_of, with_given
from treeopt.files.places import located
from treeopt.files.storage import sha256_of
from treeopt.records.drafters import DRAFTERS
from treeopt.records.options import Model, Prompts, Source
from treeopt.records.rules import Rule
from treeopt.records.rundir import RunDirectory
from treeopt.report.terminal import progress
from treeopt.runtime.waiting import import_torch

if TYPE_CHECKING:
    from treeopt.runtime.cluster import Cluster
    from treeopt.runtime.prompts.sets import PromptSet
    from treeopt.runtime.session import Session

ASKED_ANEW = {"trust_remote_code", "engine_python"}  # a file of somebody's is not to say what is run
OF_PROMPTS = {"responses", "column", "group_by", "split"}  # another file has others


def source_of(
    model: str | Path | Model | Session | None = None,
    drafter: str | Path | None = None,
    prompts: str | Path | Prompts | None = None,
    rule: str | Rule | None = None,
) -> Source | Session:
    """What a session is opened with; a session that is given is loaded already."""
    if not isinstance(model, str | Path | Model | None):
        given = {"drafter": drafter, "prompts": prompts, "rule": rule}
        if strange := [name for name, value in given.items() if value is not None]:
            raise InvalidInput(f"A session is loaded with its options: pass {strange[0]} to treeopt.open.")
        return model
    parts = model.given if isinstance(model, Model) else {"model": None if model is None else str(model)}
    columns = prompts.given if isinstance(prompts, Prompts) else {"prompts": None if prompts is None else str(prompts)}
    source = Source(**parts, **columns)
    return with_given(source, drafter=drafter and str(drafter), rule=rule and str(Rule.parse(str(rule))))


def resolve(run: RunDirectory, source: Source, *, overwrite: bool = False) -> Source:
    """The given options on top of those that the run was calibrated with; paths are whole.

    overwrite : whether the trace will be replaced: one that cannot be read is then as none
    """
    try:
        earlier = source_of_trace(run)
    except InvalidInput as error:
        if not overwrite:
            raise
        note(f"{error} It is replaced, and nothing is taken from it.")
        earlier = Source()
    given = located_source(source, earlier.model or demo.NAME)
    if given.model not in (None, earlier.model, located(str(earlier.model))):  # once it was kept as it was given
        return given
    gone = set(ASKED_ANEW)
    if given.prompts:
        gone |= OF_PROMPTS
    if given.drafter:
        gone.add("draft_depth")
    if given.rule or given.responses:
        gone.add("rule")
    return Source(**{name: value for name, value in earlier.given.items() if name not in gone} | given.given)


def source_of_trace(run: RunDirectory) -> Source:
    """The options that the run was calibrated with; none without a trace. InvalidInput where the trace's are damaged."""
    kept = (run.read_trace().meta.get("source") or {}) if run.trace.exists() else {}
    known = {name: kept[name] for name, option in options_of(Source).items() if type(kept.get(name)) is option.kind}
    for name, value in known.items():
        if fault := options_of(Source)[name].fault(value):
            raise InvalidInput(f"{run.trace} is not as it should be: source.{name} {fault}.")
    return Source(**known)


def located_source(source: Source, model: str = demo.NAME) -> Source:
    """The options with whole paths, so that later commands find the same files wherever they are started.

    model : the target where the options do not name one
    """
    arguments = {kind.argument for kind in DRAFTERS.values() if kind.argument}
    reserved = {None, demo.NAME, *arguments, *demo.DRAFTERS.get(source.model or model, ())}
    paths = [name for name in ("model", "drafter", "prompts") if getattr(source, name) not in reserved]
    return with_given(source, **{name: located(getattr(source, name)) for name in paths})


def session_of(
    run: RunDirectory, source: Source | Session, *, overwrite: bool = False, cluster: Cluster | None = None
) -> Session:
    """A loaded session as it is, or the session of a model and its options on top of those of the run.

    cluster : whose workers load it; here it is an outline then
    """
    if not isinstance(source, Source):
        if cluster is not None:
            raise InvalidInput("Workers load a model themselves: pass its name instead of a session.")
        return source
    source = resolve(run, source, overwrite=overwrite)
    return open_session(source) if cluster is None else open_by_workers(source, cluster)


def session_of_run(run: RunDirectory, source: Source | Session, engine: str | None) -> Session:
    """The session of a step that decodes with the run's model, or for the requests of its log."""
    if run.requests.exists() and isinstance(source, Source):
        return open_logged(run, source, engine)
    return session_of(run, source)


def open_logged(run: RunDirectory, source: Source, engine: str | None) -> Session:
    """A session for the requests of the run's log: a model that is named, or lies where the log's tokenizer does."""
    if engine is None:
        raise InvalidInput(
            "`engine` must say which engine decodes, since the run is of a log, and treeopt's own decoder copies no text as engines do."
        )
    if strange := [name for name in source.given if name in {*options_of(Prompts), "rule", "drafter", "draft_depth"}]:
        raise InvalidInput(f"`{strange[0]}` does not go with a run of a log, whose requests are decoded: leave it out.")
    log = run.read_requests()
    folder = str((log.meta.get("source") or {}).get("tokenizer"))
    if source.model is None and not (Path(folder) / "config.json").is_file():
        raise InvalidInput("`model` must say which model answers, since the run's log names none.")
    import_torch()
    from treeopt.runtime.prompts.sets import PromptSet

    prompts = PromptSet((), run.requests.name, sha256_of(run.requests), None)  # type: ignore[arg-type]  # no chat: they are ids
    source = replace(source, model=source.model or folder, drafter="ngram", prompts=str(run.requests))
    session = open_session(located_source(source), prompts)
    if (most := int(log.tokens.max())) >= session.target.vocab_size:
        raise InvalidInput(
            f"`model` must be that of the run's log, but the log has the token {most}, and {session.target.name} none."
        )
    return session


def open_session(source: Source, prompts: PromptSet | None = None) -> Session:
    """Load a model, its drafter and prompts, where these are not given, and note what was found strange."""
    import_torch()
    from treeopt.runtime.session import open_session

    with progress("Loading", None):
        session = open_session(source, prompts)
    note(*session.notes)
    return session


def open_random(config: str, source: Source, num_heads: int | None) -> Session:
    """A model of a config.json's shape with random weights; its source says dtype and device, and nothing else."""
    if others := [name for name in source.given if name not in ("dtype", "device")]:
        raise InvalidInput(f"`random_weights` loads nothing: leave out `{others[0]}`.")
    import_torch()
    from treeopt.runtime.random_weights import NUM_HEADS, open_random_session

    with progress("Making random weights", None):
        return open_random_session(config, num_heads=num_heads or NUM_HEADS, dtype=source.dtype, device=source.device)


def open_by_workers(source: Source, cluster: Cluster) -> Session:
    """The outline of the session that the workers of a cluster open, each with OMP_NUM_THREADS threads, or with one."""
    import_torch()
    import torch

    from treeopt.runtime.session import open_outline

    threads = torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else 1
    with progress("Starting workers", None):
        cluster.start(1 if cluster.gpus else threads)
        session: Session = replace(cluster.call(open_outline, source, threads), cluster=cluster)
    note(*session.notes)
    return session
