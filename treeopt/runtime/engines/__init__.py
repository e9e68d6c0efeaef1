"""Decoders: treeopt's own decoder, and other runtimes, each a `treeopt.runtime.stepper.Stepper`."""

from importlib import import_module

from treeopt.engines.registry import engine_named
from treeopt.errors import InvalidInput, Unsupported
from treeopt.records.rundir import ENGINES
from treeopt.runtime.decode import Decoder
from treeopt.runtime.setup import Setup
from treeopt.runtime.stepper import Stepper


def open_stepper(name: str | None, setup: Setup, python: str | None = None) -> Stepper:
    """treeopt's own decoder, or the engine of that name. Raises Unsupported where there is none, or not for the drafter.

    python : of the environment that has the engine, where that is a process of its own
    """
    if name is None:
        return Decoder(setup)
    name = engine_named(name, tuple(ENGINES))
    place, _, function = ENGINES[name].partition(":")
    module = import_module(f"{__name__}.{place}")
    assert setup.drafter is not None, "an engine guesses by a drafter"
    kind = setup.drafter.kind
    if kind not in module.DRAFTERS:
        raise Unsupported(
            f"`engine={name}` decodes with drafters of the kinds {', '.join(module.DRAFTERS)}, but this drafter is {kind}. "
            "It runs in treeopt itself: leave `engine` out."
        )
    apart = {"python": python} if python is not None else {}
    if apart and not hasattr(module, "WORKER"):
        raise InvalidInput(
            f"`engine_python` is for engines in a process of their own: leave it out with `engine={name}`."
        )
    stepper: Stepper = getattr(module, function)(setup, **apart)
    return stepper
