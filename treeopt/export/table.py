"""Every serving engine: what it can take, how it is told, and where that was read.

A new engine is a row here and, where it reads a file, a module with ``write`` and ``parse``.
"""

from __future__ import annotations

from treeopt.export import (
    draft_len,
    eagle1,
    hydra,
    medusa,
    modelopt,
    neuron,
    numbers,
    sglang,
    tensorrt_llm,
    tgi,
    triton,
    vllm,
)
from treeopt.export.engine import Engine, Method
from treeopt.trees.tree import MAX_RANK

AUTOREGRESSIVE = ("eagle3", "eagle", "mtp", "draft-model", "ngram")

# TensorRT-LLM packs a rank into four bits; `MAX_RANK` is of those that look at ten candidates a head.
FOUR_BITS = 15

ENGINES: dict[str, Engine] = {engine.name: engine for engine in (
    Engine(name="medusa", title="Medusa", methods=(
        Method(name="choices", checked="main e2a5d20 of 2024-04",
               drafters=("medusa",), shape="any", rules=("greedy", "typical"), max_rank=MAX_RANK,
               max_batch_size=1,
               carrier="medusa/model/medusa_choices.py, medusa_generate(medusa_choices=...), --medusa-choices",
               syntax="[[0], [1], [0, 0]]",
               source="FasterDecoding/Medusa medusa/model/utils.py, llm_judge/gen_model_answer_medusa.py",
               write=medusa.write, parse=medusa.parse),
    )),
    Engine(name="hydra", title="Hydra", methods=(
        Method(name="choices", checked="main 3f39fbd of 2024-02",
               drafters=("hydra", "hydra++"), shape="low-rank-expands", rules=("greedy", "typical"),
               max_rank=MAX_RANK, max_batch_size=1,
               carrier="hydra/model/hydra_choices.py, hydra_generate(hydra_choices=...), --hydra-choices",
               syntax="[[0], [1], [0, 0]]", source="zankner/Hydra hydra/model/utils.py",
               write=hydra.write, parse=hydra.parse),
    )),
    Engine(name="eagle1", title="EAGLE-1", methods=(
        Method(name="choices", checked="08dc06c, before EAGLE-2",
               drafters=("eagle",), shape="any", max_rank=MAX_RANK, max_batch_size=1,
               carrier="eagle/model/choices.py, --tree-choices", syntax="[[0], [1], [0, 0]]", derived=("depth >= 2",),
               versions="branch v1; main ignores the tree",
               source="SafeAILab/EAGLE eagle/model/utils_c.py, eagle/model/utils.py",
               write=eagle1.write, parse=eagle1.parse),
    )),
    Engine(name="neuron-medusa", title="AWS Neuron, Medusa", methods=(
        Method(name="medusa-tree", checked="main 4bcdc54 of 2026-07",
               drafters=("medusa",), shape="any", max_rank=MAX_RANK, max_batch_size=1,
               carrier="--medusa-tree-json, NeuronConfig(medusa_tree=...)", syntax="[[0], [1], [0, 0]]",
               derived=("medusa_speculation_length = choices + 1", "global_topk = 10"),
               source="aws-neuron/neuronx-distributed-inference models/config.py, inference_demo.py",
               write=neuron.write_medusa, parse=neuron.parse_medusa),
    )),
    Engine(name="neuron-token-tree", title="AWS Neuron, EAGLE", methods=(
        Method(name="token-tree", checked="main 4bcdc54 of 2026-07",
               drafters=("eagle",), shape="sibling-closed", max_batch_size=1,
               carrier="--token-tree-json, NeuronConfig(token_tree_config=...)", syntax='{"0": ["1", "2"], "1": ["3"]}',
               derived=("speculation_length = choices + 1",), versions="current; not with EAGLE-3",
               source="aws-neuron/neuronx-distributed-inference modules/eagle/token_tree.py",
               write=neuron.write_tree, parse=neuron.parse_tree),
    )),
    Engine(name="tensorrt-llm", title="TensorRT-LLM", methods=(
        Method(name="medusa", checked="main before PR #15918",
               drafters=("medusa",), shape="any", max_rank=FOUR_BITS, max_depth=tensorrt_llm.SAFE_DEPTH,
               first_depth_closed=True,
               carrier="medusa_choices: YAML of the LLM API, list of trtllm-bench, --medusa_choices",
               syntax="[[0], [1], [0, 0]]", derived=("max_draft_len = choices",), built_for_size=True,
               versions="TensorRT engines, up to 1.2", status="removed upstream in PR #15918",
               source="NVIDIA/TensorRT-LLM tensorrt_llm/runtime/medusa_utils.py, "
                      "cpp/tensorrt_llm/runtime/utils/speculativeChoicesUtils.cpp",
               write=tensorrt_llm.write, parse=tensorrt_llm.parse),
        Method(name="draft-len", checked="main 0004396, reference of 1.4.0rc1",
               drafters=tuple(draft_len.TYPES), shape="chain", rules=("greedy", "sample", "reject"),
               carrier="speculative_config in the YAML of trtllm-serve --config",
               syntax="draft_len_schedule: {4: 4, 8: 2}", derived=("max_draft_len = length at the smallest key",),
               by_version=True, by_batch_size=True,
               versions="PR #8194 on; keys are upper bounds since PR #10860, lower bounds before",
               source="NVIDIA/TensorRT-LLM tensorrt_llm/llmapi/llm_args.py, PRs #8194, #10860, #12262, #12588",
               write=draft_len.write, parse=draft_len.parse),
        Method(name="eagle", checked="main before PR #18210",
               drafters=("eagle",), shape="sibling-closed", max_rank=FOUR_BITS,
               max_depth=tensorrt_llm.SAFE_DEPTH, max_nodes=63,
               carrier="eagle_choices: YAML of the LLM API, --eagle_choices", syntax="[[0], [1], [0, 0]]",
               derived=("max_draft_len = depth", "max_total_draft_tokens = choices"),
               versions="two-model EAGLE, before 1.4", status="removed upstream in PR #18210",
               source="NVIDIA/TensorRT-LLM tensorrt_llm/llmapi/llm_args.py, "
                      "tensorrt_llm/_torch/speculative/spec_tree_manager.py",
               write=tensorrt_llm.write_eagle, parse=tensorrt_llm.parse),
    )),
    Engine(name="triton", title="Triton, TensorRT-LLM backend", methods=(
        Method(name="medusa", checked="main before PR #858",
               drafters=("medusa",), shape="any", max_rank=FOUR_BITS, max_depth=tensorrt_llm.SAFE_DEPTH,
               carrier="medusa_choices in tensorrt_llm/config.pbtxt", syntax="{0},{1},{0, 0}",
               derived=("max_draft_len = choices",), built_for_size=True, versions="TensorRT engines, up to 1.2",
               status="removed upstream in PR #858",
               source="triton-inference-server/tensorrtllm_backend inflight_batcher_llm/src/utils.cc, "
                      "docs/model_config.md",
               write=triton.write, parse=triton.parse),
    )),
    Engine(name="modelopt", title="Model Optimizer, specdec_bench", package="nvidia-modelopt", methods=(
        Method(name="specbench-medusa", checked="0.47.0, benchmark a2fbac7 of 2026-08",
               drafters=("medusa",), shape="any", max_rank=MAX_RANK, max_batch_size=1,
               carrier="engine_args in the YAML of --runtime_params", syntax="medusa_choices: [[0], [1], [0, 0]]",
               derived=("medusa_num_heads = heads",),
               source="NVIDIA/Model-Optimizer examples/specdec_bench/specdec_bench/models/specbench_medusa.py, "
                      "modelopt/torch/speculative/utils.py",
               write=modelopt.write, parse=modelopt.parse),
    )),
    Engine(name="tgi", title="text-generation-inference", methods=(
        Method(name="speculate", checked="main db931fc of 2026-01",
               drafters=("medusa", "ngram"), shape="chain", rules=("greedy", "sample"),
               carrier="--speculate", syntax="--speculate 3",
               derived=("--speculate <= heads", "batch x (1 + length) <= 128 rows"),
               versions="current; the project is in maintenance mode",
               source="huggingface/text-generation-inference server/text_generation_server/models/__init__.py, "
                      "layers/medusa.py",
               write=tgi.write_chain, parse=tgi.parse),
    )),
    Engine(name="vllm", title="vLLM", package="vllm", methods=(
        Method(name="batch-size", checked="0.33.0",
               drafters=AUTOREGRESSIVE, shape="chain", rules=("greedy", "sample", "reject"),
               carrier="num_speculative_tokens_per_batch_size in --speculative-config",
               syntax="[[1, 16, 3], [17, 4096, 0]]", derived=("num_speculative_tokens = longest length", "of MTP ≤ its layers or = a multiple of them"),
               by_batch_size=True, versions="PR #32374 on; not with data parallelism",
               source="vllm-project/vllm vllm/v1/spec_decode/dynamic/utils.py, vllm/config/speculative.py, vllm/config/vllm.py",
               write=vllm.write_chain, parse=vllm.parse),
        Method(name="medusa", checked="0.32.0",
               drafters=("medusa",), shape="chain", rules=("greedy", "sample"),
               carrier="num_speculative_tokens in --speculative-config",
               syntax='{"method": "medusa", "model": "HEADS", "num_speculative_tokens": 3}',
               derived=("num_speculative_tokens <= heads",), versions=f"releases up to {vllm.MEDUSA_UNTIL}",
               status="removed upstream in 0.33.0", source="vllm-project/vllm vllm/v1/spec_decode/medusa.py",
               write=vllm.write_medusa, parse=vllm.parse),
    )),
    Engine(name="sglang", title="SGLang", package="sglang", methods=(
        Method(name="adaptive", checked="0.5.23",
               drafters=sglang.ADAPTIVE, shape="chain", rules=("greedy", "sample", "reject"),
               carrier="--speculative-adaptive-config",
               syntax='{"1": {"candidate_steps": [5]}, "8": {"candidate_steps": [3]}}',
               derived=("eagle-topk = 1", "num-draft-tokens = steps + 1"), by_batch_size=True,
               source="sgl-project/sglang python/sglang/srt/speculative/adaptive_spec_params.py, "
                      "python/sglang/srt/speculative/eagle_utils.py",
               write=sglang.write_adaptive, parse=sglang.parse),
        Method(name="steps", checked="0.5.23",
               drafters=AUTOREGRESSIVE, shape="chain", rules=("greedy", "sample"),
               carrier="--speculative-num-steps, -eagle-topk, -num-draft-tokens",
               syntax="--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4",
               derived=("eagle-topk = 1", "num-draft-tokens = steps + 1"),
               source="sgl-project/sglang python/sglang/srt/arg_groups/speculative_hook.py",
               write=sglang.write, parse=sglang.parse),
    )),
    Engine(name="lmdeploy", title="LMDeploy", package="lmdeploy", methods=(
        Method(name="number", checked="0.18.0",
               drafters=tuple(numbers.lmdeploy.options), shape="chain", rules=("greedy", "sample"),
               carrier="--speculative-num-draft-tokens",
               syntax="--backend pytorch --speculative-algorithm eagle3 --speculative-num-draft-tokens 3",
               derived=("backend = pytorch",), versions="current, PyTorch backend only",
               source="InternLM/lmdeploy lmdeploy/messages.py, lmdeploy/cli/utils.py, "
                      "lmdeploy/pytorch/spec_decode/spec_agent.py",
               write=numbers.lmdeploy, parse=numbers.parse_lmdeploy),
    )),
    Engine(name="llama-cpp", title="llama.cpp", package="llama-cpp-python", methods=(
        Method(name="number", checked="llama-cpp-python 0.3.36 (0c1e570)",
               drafters=tuple(numbers.llama_cpp.options), shape="chain", rules=("greedy", "sample"),
               carrier="--spec-type, --spec-draft-n-max",
               syntax="--spec-type draft-simple --spec-draft-n-max 3 --spec-draft-n-min 0 --spec-draft-p-min 0",
               derived=("rows of a step = n-max + 1",),
               versions="current; older builds have --model-draft, --draft-max and --draft-min for them",
               source="ggml-org/llama.cpp common/arg.cpp, common/speculative.cpp, common/ngram-map.cpp",
               write=numbers.llama_cpp, parse=numbers.parse_llama_cpp),
    )),
    Engine(name="redrafter", title="ReDrafter (MLX)", methods=(
        Method(name="beam", checked="main bd8586b of 2024-12",
               drafters=tuple(numbers.redrafter.options), shape="chain", max_batch_size=1,
               carrier="--beam_width, --beam_length", syntax="--greedy_search=True --beam_width=1 --beam_length=4",
               derived=("beam_length = length + 1",),
               source="apple/ml-recurrent-drafter recurrent_drafting/mlx/modeling_drafter.py, "
                      "recurrent_drafting/mlx/cmd/generate.py",
               write=numbers.redrafter, parse=numbers.parse_redrafter),
    )),
    Engine(name="rtp-llm", title="RTP-LLM", methods=(
        Method(name="number", checked="main 4b8d39c of 2026-08",
               drafters=tuple(numbers.rtp_llm.options), shape="chain", rules=("greedy", "sample"),
               carrier="--gen_num_per_cycle",
               syntax="--sp_type mtp --sp_model_type DRAFTER_TYPE --sp_checkpoint_path DRAFTER --gen_num_per_cycle 3",
               versions="current; older ones took medusa_choices up to depth 3",
               source="alibaba/rtp-llm rtp_llm/server/server_args/speculative_decoding_group_args.py, "
                      "rtp_llm/model_factory.py, rtp_llm/cpp/normal_engine/speculative/SpeculativeSampler.cc",
               write=numbers.rtp_llm, parse=numbers.parse_rtp_llm),
    )),
)}  # fmt: skip
