"""The steps of the line by keywords: each goes to the class of options that has it."""

from dataclasses import fields

import treeopt
import treeopt.pipeline.bench
import treeopt.pipeline.calibrate
import treeopt.pipeline.profile.timed
import treeopt.pipeline.search
from treeopt.pipeline.importing import import_accuracies
from treeopt.pipeline.proof import bench_run
from treeopt.pipeline.search import request_of as request_of_options
from treeopt.pipeline.session import source_of
from treeopt.records.exchange import ImportOptions
from treeopt.records.options import (
    BenchOptions,
    CalibrateOptions,
    Model,
    ProfileOptions,
    Prompts,
    SearchOptions,
    Server,
    TreeLimits,
)


def parted(options, *kinds):
    """An instance of each class, made of the keywords that are its fields; those of none are refused."""
    instances = []
    for kind in kinds:
        names = {field.name for field in fields(kind)}
        instances.append(kind(**{name: options.pop(name) for name in list(options) if name in names}))
    assert not options, f"no option: {[*options]}"
    return instances


def calibrate(run, session, *, counts=None, probe_rounds=2, **options):
    calibration, _ = treeopt.pipeline.calibrate.calibrate(
        run, session, *parted(options, CalibrateOptions), counts=counts, probe_rounds=probe_rounds
    )
    return calibration


def profile(run, session, *, max_new_tokens=128, **options):
    return treeopt.pipeline.profile.timed.profile(
        run, session, *parted(options, ProfileOptions), max_new_tokens=max_new_tokens
    )


def search(run, **options):
    run = treeopt.RunDirectory.of(run)
    with run.writing():
        return treeopt.pipeline.search.search(run, *parted(options, SearchOptions, TreeLimits))


def request_of(record, latencies, **options):
    return request_of_options(record, latencies, *parted(options, SearchOptions, TreeLimits))


def bench(run, session, **options):
    return treeopt.pipeline.bench.bench(run, session, *parted(options, BenchOptions))


def api_bench(plan=None, session=None, *, run=treeopt.RUN, **options):
    """`treeopt.bench` with the options of a server, a model and prompts too."""
    wanted, server, model, prompts = parted(options, BenchOptions, Server, Model, Prompts)
    model = session if session is not None else model
    if server.given:
        source = source_of(model, None, prompts)
        return bench_run(treeopt.RunDirectory.of(run), source, wanted, server)
    return treeopt.bench(plan, model, prompts=prompts if prompts.given else None, run=run, options=wanted)


def import_file(run, paths, **options):
    paths = paths if isinstance(paths, list) else [paths]
    return import_accuracies(run, paths, ImportOptions(**options))
