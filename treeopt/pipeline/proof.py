"""What proves a plan: decoding here, an engine, or servers that a command starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treeopt.engines.registry import with_engine
from treeopt.errors import InvalidInput
from treeopt.pipeline.bench import bench
from treeopt.pipeline.launched import bench_plan
from treeopt.pipeline.lengths import bench_lengths
from treeopt.pipeline.session import session_of_run
from treeopt.records.options import BenchOptions, Server, Source
from treeopt.records.rundir import ENGINES, RunDirectory

if TYPE_CHECKING:
    from treeopt.arms.arm import Arms
    from treeopt.records.benchmark import Benchmark
    from treeopt.runtime.session import Session


def bench_run(run: RunDirectory, source: Source | Session, options: BenchOptions, server: Server) -> Benchmark | Arms:
    """Decode by a model that is loaded here, by an engine, or by servers that a command starts."""
    with run.writing():
        if server.launch is None:
            if server.given:
                raise InvalidInput(
                    f"`{next(iter(server.given))}` is of a server that `launch` starts: pass its command."
                )
            options = with_engine(options, tuple(ENGINES))
            return bench(run, session_of_run(run, source, options.engine), options)
        if not isinstance(source, Source):
            raise InvalidInput("A server that is launched loads its model itself: pass no session.")
        return (bench_lengths if server.lengths else bench_plan)(run, source, options, server)
