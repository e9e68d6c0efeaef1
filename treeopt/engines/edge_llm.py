"""TensorRT Edge-LLM: flags of its program ``llm_inference``. The engine that it runs must have been built with room for the draft.

specDraftStep     forwards of the drafter: one for each guess, or one for a whole block
specVerifySize    rows that are verified, the root included; DSpark drafts a block of as many
dflashBlockSize   rows of DFlash's block, the root included; a chain verifies all of them
specDraftTopK     ranks of each depth. Above 1 a tree over DFlash's marginals is built, of specVerifySize nodes. It is DDTree, but
                  if two nodes have the same score, the one with the older parent comes first

treeopt does not plan for DSpark's schedulers, which cut a block, nor for its trees, which take DSpark's guesses as independent.
"""

from dataclasses import replace

from treeopt.engines.base import About, Method, ServingEngine, Written
from treeopt.engines.templates import Templates
from treeopt.records.plan import Ranges, only
from treeopt.trees.draft import DDTree
from treeopt.trees.limits import EngineLimits

STEPWISE = "--specDecode --specDraftTopK 1 --specDraftStep {length} --specVerifySize {rows}"
BLOCK = "--specDecode --specDraftTopK 1 --specDraftStep 1 --specVerifySize {rows}"
BUILT = (
    "ENGINES must have been built by llm_build for it: of MODEL with --specBase --maxVerifyTreeSize {rows} or more, of DRAFTER "
    "with --specDraft."
)
flags = Templates(
    command="llm_inference --engineDir ENGINES --inputFile INPUT --outputFile OUTPUT",
    slots=(1, " --batchSize {batch_size}"),
    options={"eagle3": STEPWISE, "mtp": STEPWISE, "dflash": f"{BLOCK} --dflashBlockSize {{rows}}", "dspark": BLOCK},
    notes=(BUILT,),
)


def write(served: Ranges[DDTree], about: About) -> Written:
    """A chain, or the tree over marginals that DFlash's block is verified as."""
    tree = only(served)
    if tree.rows == tree.depth + 1:
        return flags(served, about)
    options = f"--specDecode --specDraftTopK {tree.ranks} --specDraftStep 1 --specVerifySize {tree.rows} --dflashBlockSize {{rows}}"
    note = "The block must be as wide as that which the drafter was calibrated with: --draft-depth."
    return replace(flags, options={"dflash": options}, notes=(BUILT.format(rows=tree.rows), note))(served, about)


SOURCE = "NVIDIA/TensorRT-Edge-LLM examples/llm/llm_inference.cpp"
ENGINE = ServingEngine(name="edge-llm", title="TensorRT Edge-LLM", methods=(
    Method(name="chain", checked="0.10.1", drafters=("eagle3", "mtp"), carrier="--specDraftStep, --specVerifySize",
           source=SOURCE, write=write),
    Method(name="dflash", checked="0.10.1", drafters=("dflash",), limits=EngineLimits(max_depth=31, marginals=8),
           carrier="--dflashBlockSize, --specDraftTopK, --specVerifySize",
           source=f"{SOURCE}, cpp/runtime/config/deploymentConfig.cpp, cpp/kernels/speculative/ddtreeKernels.cu", write=write),
    Method(name="dspark", checked="0.10.1", drafters=("dspark",), limits=EngineLimits(max_depth=16), carrier="--specVerifySize",
           wider="does not start with more", source=f"{SOURCE}, cpp/runtime/config/deploymentConfig.cpp", write=write),
))  # fmt: skip
