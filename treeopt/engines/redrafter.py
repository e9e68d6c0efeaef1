"""ReDrafter on MLX: width and length of a beam. The first token of a beam is the target's own."""

from treeopt.engines.base import Method, ServingEngine
from treeopt.engines.templates import Templates

write = Templates(
    command="python3 -m recurrent_drafting.mlx.cmd.generate --hf_tokenizer=MODEL --hf_llm=MODEL --hf_drafter=DRAFTER",
    alone="python3 -m recurrent_drafting.mlx.cmd.generate --hf_tokenizer=MODEL --hf_llm=MODEL --hf_drafter=DRAFTER --autoregression=True",
    options={"redrafter": "--greedy_search=True --beam_width=1 --beam_length={rows}"},
    notes=("ReDrafter makes its tree of beams at run time; one beam is the chain of the plan.",),
)

ENGINE = ServingEngine(name="redrafter", title="ReDrafter (MLX)", methods=(
    Method(name="beam", checked="main bd8586b of 2024-12", drafters=tuple(write.options), max_batch_size=1,
           carrier="--beam_width, --beam_length",
           source="apple/ml-recurrent-drafter recurrent_drafting/mlx/modeling_drafter.py, recurrent_drafting/mlx/cmd/generate.py",
           write=write),
))  # fmt: skip
