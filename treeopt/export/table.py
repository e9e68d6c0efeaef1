"""Every serving engine: what it can take, how it is told, and where that was read.

A new engine is a row here and, where it reads a file, a module with ``write`` and ``parse``.
"""

from __future__ import annotations

from treeopt.export import draft_len, numbers, sglang, tgi, vllm
from treeopt.export.engine import Engine, Method

AUTOREGRESSIVE = ("eagle3", "eagle", "mtp", "draft-model", "ngram")

_ROWS = (
    Engine(
        name="tensorrt-llm",
        title="TensorRT-LLM",
        methods=(
            Method(
                name="draft-len",
                drafters=AUTOREGRESSIVE,
                shape="chain",
                carrier="speculative_config in the YAML of trtllm-serve --config",
                syntax="draft_len_schedule: {4: 4, 8: 2}",
                derived=("max_draft_len = length at the smallest key",),
                by_batch_size=True,
                versions="PR #8194 on; keys are upper bounds since PR #10860, lower bounds before",
                source="NVIDIA/TensorRT-LLM tensorrt_llm/llmapi/llm_args.py, PRs #8194, #10860, #12262",
                write=draft_len.write,
                parse=draft_len.parse,
            ),
        ),
    ),
    Engine(
        name="tgi",
        title="text-generation-inference",
        methods=(
            Method(
                name="speculate",
                drafters=("medusa", "ngram"),
                shape="chain",
                carrier="--speculate",
                syntax="--speculate 3",
                derived=("--speculate <= heads", "batch x (1 + length) <= 128 rows"),
                versions="current; the project is in maintenance mode",
                source="huggingface/text-generation-inference server/text_generation_server/models/__init__.py, "
                "layers/medusa.py",
                write=tgi.write_chain,
                parse=tgi.parse,
            ),
        ),
    ),
    Engine(
        name="vllm",
        title="vLLM",
        methods=(
            Method(
                name="batch-size",
                drafters=AUTOREGRESSIVE,
                shape="chain",
                carrier="num_speculative_tokens_per_batch_size in --speculative-config",
                syntax="[[1, 16, 3], [17, 4096, 0]]",
                derived=("num_speculative_tokens = longest length",),
                by_batch_size=True,
                versions="PR #32374 on; with full CUDA graphs 0.25.0 on (PR #45953)",
                source="vllm-project/vllm vllm/v1/spec_decode/dynamic/utils.py",
                write=vllm.write_chain,
                parse=vllm.parse,
            ),
            Method(
                name="medusa",
                drafters=("medusa",),
                shape="chain",
                carrier="num_speculative_tokens in --speculative-config",
                syntax='{"method": "medusa", "model": "HEADS", "num_speculative_tokens": 3}',
                derived=("num_speculative_tokens <= heads",),
                versions="current",
                source="vllm-project/vllm vllm/v1/spec_decode/medusa.py",
                write=vllm.write_medusa,
                parse=vllm.parse,
            ),
            Method(
                name="token-tree",
                drafters=("eagle", "eagle3"),
                shape="level-uniform",
                carrier="speculative_token_tree in --speculative-config",
                syntax='"[(0,), (1,), (0, 0), (1, 0)]"',
                derived=("num_speculative_tokens = choices",),
                versions="about 0.10 to May 2026",
                status="removed upstream in PR #42121",
                source="vllm-project/vllm vllm/v1/attention/backends/tree_attn.py, vllm/v1/spec_decode/eagle.py",
                write=vllm.write_tree,
                parse=vllm.parse_tree,
            ),
        ),
    ),
    Engine(
        name="sglang",
        title="SGLang",
        methods=(
            Method(
                name="adaptive",
                drafters=sglang.ADAPTIVE,
                shape="chain",
                carrier="--speculative-adaptive-config",
                syntax='{"1": {"candidate_steps": [5]}, "8": {"candidate_steps": [3]}}',
                derived=("eagle-topk = 1", "num-draft-tokens = steps + 1"),
                by_batch_size=True,
                versions="current",
                source="sgl-project/sglang python/sglang/srt/speculative/adaptive_spec_params.py",
                write=sglang.write_adaptive,
                parse=sglang.parse,
            ),
            Method(
                name="steps",
                drafters=AUTOREGRESSIVE,
                shape="chain",
                carrier="--speculative-num-steps, -eagle-topk, -num-draft-tokens",
                syntax="--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4",
                derived=("eagle-topk = 1", "num-draft-tokens = steps + 1"),
                versions="current",
                source="sgl-project/sglang python/sglang/srt/arg_groups/speculative_hook.py",
                write=sglang.write,
                parse=sglang.parse,
            ),
        ),
    ),
    Engine(
        name="lmdeploy",
        title="LMDeploy",
        methods=(
            Method(
                name="number",
                drafters=tuple(numbers.LMDEPLOY),
                shape="chain",
                carrier="--speculative-num-draft-tokens",
                syntax="--speculative-num-draft-tokens 3",
                versions="current",
                source="InternLM/lmdeploy lmdeploy/messages.py, lmdeploy/cli/utils.py",
                write=numbers.lmdeploy,
            ),
        ),
    ),
    Engine(
        name="llama-cpp",
        title="llama.cpp",
        methods=(
            Method(
                name="number",
                drafters=("draft-model",),
                shape="chain",
                carrier="--draft-max (newer: --spec-draft-n-max)",
                syntax="--draft-max 3 --draft-min 0 --draft-p-min 0",
                versions="current",
                source="ggml-org/llama.cpp examples/speculative/speculative.cpp, PRs #10455, #23269",
                write=numbers.llama_cpp,
            ),
        ),
    ),
    Engine(
        name="redrafter",
        title="ReDrafter (MLX)",
        methods=(
            Method(
                name="beam",
                drafters=("redrafter",),
                shape="chain",
                carrier="--beam_width, --beam_length",
                syntax="--beam_width 1 --beam_length 4",
                derived=("beam_length = length + 1",),
                versions="current",
                source="apple/ml-recurrent-drafter recurrent_drafting/mlx/modeling_drafter.py",
                write=numbers.redrafter,
            ),
        ),
    ),
    Engine(
        name="rtp-llm",
        title="RTP-LLM",
        methods=(
            Method(
                name="number",
                drafters=tuple(numbers.RTP_LLM),
                shape="chain",
                carrier="--gen_num_per_cycle",
                syntax="--sp_type mtp --gen_num_per_cycle 3",
                versions="current; older ones took medusa_choices up to depth 3",
                source="alibaba/rtp-llm docs/backend/speculative_decoding.md, docs/backend/logits_processor.md",
                write=numbers.rtp_llm,
            ),
        ),
    ),
)

ENGINES: dict[str, Engine] = {engine.name: engine for engine in _ROWS}
