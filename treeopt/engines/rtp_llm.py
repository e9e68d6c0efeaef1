"""RTP-LLM: the length of a chain as a flag. Its --tree_decode_config constrains the output and is no speculation tree."""

from treeopt.engines.base import Method, ServingEngine
from treeopt.engines.templates import Templates

GROUP = "alibaba/rtp-llm rtp_llm/server/server_args/speculative_decoding_group_args.py"
SAMPLER = "rtp_llm/cpp/normal_engine/speculative/SpeculativeSampler.cc"
write = Templates(
    command="python3 -m rtp_llm.start_server --checkpoint_path MODEL --model_type MODEL_TYPE",
    options={
        kind: f"--sp_type {name} --sp_model_type DRAFTER_TYPE --sp_checkpoint_path DRAFTER --gen_num_per_cycle {{length}}"
        for kind, name in (("mtp", "mtp"), ("eagle", "eagle"), ("eagle3", "eagle"), ("dspark", "dspark"))
    },
    notes=(
        "MODEL_TYPE and DRAFTER_TYPE are names of RTP-LLM's own list of models, such as deepseek3 and deepseek-v3-mtp. "
        "It does not start without the drafter's.",
    ),
    notes_of={"mtp": ("--sp_type mtp takes a module for every token; a single one that is used again is eagle.",)},
)


ENGINE = ServingEngine(name="rtp-llm", title="RTP-LLM", methods=(
    Method(name="number", checked="main 4b8d39c of 2026-08", drafters=("mtp", "eagle", "eagle3"), rules=("greedy", "sample"),
           carrier="--gen_num_per_cycle",
           versions="current; older ones took medusa_choices up to depth 3",
           source=f"{GROUP}, rtp_llm/model_factory.py, {SAMPLER}", write=write),
    Method(name="block", checked="main 4b8d39c of 2026-08", drafters=("dspark",), carrier="--gen_num_per_cycle",
           source=f"{GROUP}, {SAMPLER}", write=write),
))  # fmt: skip
