"""TensorRT Edge-LLM: flags of its program ``llm_inference``, which runs engines that were built with room for as many tokens.

specDraftStep     forwards of the drafter: one for each guess, or one for a whole block
specVerifySize    rows that are verified, the root included
dflashBlockSize   rows of DFlash's block, the root included: with one likeliest token each, those that are verified
"""

from collections.abc import Sequence

from treeopt.engines.base import Method, Request, ServingEngine
from treeopt.engines.chains import Flags
from treeopt.errors import InvalidInput


def whole_block(request: Request, length: int) -> Sequence[str]:
    """No notes; InvalidInput for a part of DSpark's block, of which its chains always guess and verify the whole."""
    if request.kind == "dspark" and request.widest not in (None, length):
        raise InvalidInput(
            f"Edge-LLM proposes the whole block of a DSpark drafter, here {request.widest} guesses, but this chain has {length}: "
            f"calibrate with `draft_depth={request.widest}`, and export its chain."
        )
    return ()


STEPWISE = "--specDecode --specDraftTopK 1 --specDraftStep {length} --specVerifySize {rows}"
BLOCK = "--specDecode --specDraftTopK 1 --specDraftStep 1 --specVerifySize {rows}"
write = Flags(
    engine="TensorRT Edge-LLM",
    serve="llm_inference --engineDir ENGINES --inputFile INPUT --outputFile OUTPUT",
    slots=(1, " --batchSize {batch_size}"),
    options={"eagle3": STEPWISE, "mtp": STEPWISE, "dflash": f"{BLOCK} --dflashBlockSize {{rows}}", "dspark": BLOCK},
    notes=(
        "ENGINES must have been built by llm_build for it: of MODEL with --specBase --maxVerifyTreeSize {rows} or more, of DRAFTER "
        "with --specDraft.",
    ),
    also=whole_block,
)

ENGINE = ServingEngine(name="edge-llm", title="TensorRT Edge-LLM", methods=(
    Method(name="chain", checked="0.10.1", drafters=tuple(write.options),
           carrier="--specDraftStep, --specVerifySize, --dflashBlockSize",
           syntax="--specDecode --specDraftTopK 1 --specDraftStep 1 --specVerifySize 4 --dflashBlockSize 4",
           derived=("specVerifySize = length + 1", "specVerifySize <= maxVerifyTreeSize of the engine"),
           source="NVIDIA/TensorRT-Edge-LLM examples/llm/llm_inference.cpp", write=write),
))  # fmt: skip
