"""Sessions of a run: a model is loaded by the options that are given, on top of those that the run was calibrated with."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from treeopt import demo
from treeopt.errors import InvalidInput
from treeopt.files.parameters import Parameter, parameters_of
from treeopt.files.places import located
from treeopt.files.storage import sha256_of
from treeopt.records.drafters import DRAFTERS
from treeopt.records.rundir import RunDirectory
from treeopt.report.terminal import note, progress
from treeopt.runtime.settings import RULE_OPTIONS, ModelOptions
from treeopt.runtime.waiting import import_torch

if TYPE_CHECKING:
    from treeopt.runtime.cluster import Cluster
    from treeopt.runtime.prompts.sets import PromptSet
    from treeopt.runtime.session import Session

T = TypeVar("T")
OF_MODEL = {"dtype", "device", "device_map", "revision", "trust_remote_code", "engine_python"}


def resolve(run: RunDirectory, source: Mapping[str, Any], *, overwrite: bool = False) -> dict[str, Any]:
    """The given model options on top of those that the run was calibrated with; paths are whole.

    Whether to trust a model's own code is asked anew every time.

    overwrite : whether the trace will be replaced: one that cannot be read is then as none
    """
    earlier: Mapping[str, Any] = {}
    try:
        earlier = (run.read_trace().meta.get("source") or {}) if run.trace.exists() else {}
    except InvalidInput as error:
        if not overwrite:
            raise
        note(f"{error} It is replaced, and nothing is taken from it.")
    given = located_source(source, earlier.get("model", demo.NAME))
    theirs = earlier.get("model")
    if given.get("model", theirs) not in (theirs, located(str(theirs))):  # once it was kept as it was given
        return given
    declared = {**parameters_of(ModelOptions), "model": Parameter("model", str)}
    del declared["trust_remote_code"], declared["engine_python"]  # a file of somebody's is not to say what is run
    known: dict[str, object] = {}
    for name in declared.keys() & earlier.keys():
        value, kind = earlier[name], declared[name].kind
        if type(value) is kind or (kind is float and type(value) is int):
            known[name] = value
            if (fault := declared[name].fault(value)) and name not in given:
                raise InvalidInput(f"{run.trace} is not as it should be: source.{name} {fault}.")
    gone: set[str] = set()
    if "prompts" in given:  # another file has columns of its own; temperature was that of the given answers
        gone |= {"responses", "column", "group_by", "split"}
        if known.get("responses") and known.get("temperature"):
            known.setdefault("acceptance", "sample")
    if "drafter" in given:
        gone.add("draft_depth")
    if "acceptance" in given or "responses" in given:  # another rule has options of its own
        gone |= {*RULE_OPTIONS} - {"draft_depth"}
    return {**{name: value for name, value in known.items() if name not in gone}, **given}


def located_source(source: Mapping[str, Any], model: str = demo.NAME) -> dict[str, Any]:
    """The options with whole paths, so that later commands find the same files wherever they are started.

    model : the target where the options do not name one
    """
    asked = {kind.argument for kind in DRAFTERS.values() if kind.argument}
    reserved = {None, demo.NAME, *asked, *demo.DRAFTERS.get(source.get("model", model), ())}
    paths = [name for name in ("model", "drafter", "prompts") if source.get(name) not in reserved]
    return {**source, **{name: located(source[name]) for name in paths}}


def session_of(
    run: RunDirectory,
    model: str | Path | Session | None,
    options: ModelOptions,
    *,
    overwrite: bool = False,
    cluster: Cluster | None = None,
) -> Session:
    """A loaded session as it is, or the session of a model and its options on top of those of the run.

    cluster : whose workers load it; here it is an outline then
    """
    if strange := sorted(options.keys() - ModelOptions.__annotations__.keys()):
        raise TypeError(f"unexpected keyword argument {strange[0]!r}")
    if model is not None and not isinstance(model, str | Path):
        if options:
            raise InvalidInput(f"A session is loaded with its options: pass {sorted(options)[0]} to treeopt.open.")
        if cluster is not None:
            raise InvalidInput("Workers load a model themselves: pass its name instead of a session.")
        return model
    given = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    source = {"model": str(model), **given} if model is not None else given
    source = resolve(run, source, overwrite=overwrite)
    return open_session(source) if cluster is None else open_by_workers(source, cluster)


def with_session(
    step: Callable[..., T],
    *,
    run: str | Path | RunDirectory,
    model: str | Path | Session | None,
    options: ModelOptions,
    **asked: Any,
) -> T:
    """The result of a step of the line on a run directory, as its only writer, and on the session of a model."""
    directory = RunDirectory.of(run)
    with directory.writing():
        if directory.requests.exists() and (model is None or isinstance(model, str | Path)):
            opened = open_logged(directory, model, options, asked["engine"])
        else:
            opened = session_of(directory, model, options)
        return step(directory, opened, **asked)


def open_logged(run: RunDirectory, model: str | Path | None, options: ModelOptions, engine: str | None) -> Session:
    """A session for the requests of the run's log: a model that is named, or lies where the log's tokenizer does."""
    if engine is None:
        raise InvalidInput(
            "`engine` must say which engine decodes, since the run is of a log, and treeopt's own decoder copies no text as engines do."
        )
    if strange := sorted(options.keys() - OF_MODEL):
        raise InvalidInput(f"`{strange[0]}` does not go with a run of a log, whose requests are decoded: leave it out.")
    log = run.read_requests()
    folder = str((log.meta.get("source") or {}).get("tokenizer"))
    if model is None and not (Path(folder) / "config.json").is_file():
        raise InvalidInput("`model` must say which model answers, since the run's log names none.")
    import_torch()
    from treeopt.runtime.prompts.sets import PromptSet

    prompts = PromptSet((), run.requests.name, sha256_of(run.requests), None)  # type: ignore[arg-type]  # no chat: they are ids
    source = {**options, "model": str(model or folder), "drafter": "ngram", "prompts": str(run.requests)}
    session = open_session(located_source(source), prompts)
    if (most := int(log.tokens.max())) >= session.target.vocab_size:
        raise InvalidInput(
            f"`model` must be that of the run's log, but the log has the token {most}, and {session.target.name} none."
        )
    return session


def open_session(source: Mapping[str, Any], prompts: PromptSet | None = None) -> Session:
    """Load a model, its drafter and prompts, where these are not given, and note what was found strange."""
    import_torch()
    from treeopt.runtime.session import open_session

    with progress("Loading", None):
        session = open_session(source, prompts)
    note(*session.notes)
    return session


def open_by_workers(source: Mapping[str, Any], cluster: Cluster) -> Session:
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
