"""mlx-lm: the length of a draft model's chain as a flag of its server; one sequence at a time."""

from treeopt.engines.base import Method, ServingEngine
from treeopt.engines.templates import Templates

write = Templates(
    command="mlx_lm.server --model MODEL",
    options={"draft-model": "--draft-model DRAFTER --num-draft-tokens {length}"},
    notes=("A request's own num_draft_tokens goes before the flag. mlx_lm.generate takes the same flags.",),
)

ENGINE = ServingEngine(name="mlx-lm", title="mlx-lm", package="mlx-lm", server="mlx_lm.server", methods=(
    Method(name="number", checked="0.32.2", drafters=tuple(write.options), max_batch_size=1,
           carrier="--num-draft-tokens", source="ml-explore/mlx-lm mlx_lm/generate.py, mlx_lm/server.py", write=write),
))  # fmt: skip
