"""Where each engine's source defines the words that exports write and imports read.

An entry is for a kind of words ("flag") or for those of one place ("key of --speculative-config"), which comes first;
in it, files by pattern and what finds the words in them. Engines move their files: a place may have several.
"""

from __future__ import annotations

from tests.engines_live.finders import (
    Finder,
    always,
    argparse_choices,
    argparse_flags,
    attributes,
    binary_names,
    binary_strings,
    cmake_targets,
    console_scripts,
    cpp_strings,
    fields_of,
    imported,
    literal,
    llama_flags,
    llama_spec_types,
    names,
    options_of_fields,
    parameters_of,
    strings,
    switched_on,
)

Place = dict[str, Finder]
NOT_THERE: dict[str, str] = {  # engines of whose exports the archive says nothing, and why
    "modelopt": "examples/specdec_bench is in its repository alone"
}

TRANSFORMERS = "src/transformers/"
PLACES: dict[str, dict[str, Place]] = {
    "vllm": {
        "program": {"pyproject.toml": console_scripts, "vllm/entrypoints/cli/*.py": strings},
        "flag": {
            "vllm/engine/arg_utils.py vllm/entrypoints/openai/cli_args.py vllm/benchmarks/serve.py": argparse_flags
        },
        "key": {"vllm/config/speculative.py": fields_of("SpeculativeConfig")},
        "variable": {"vllm/envs.py": strings},
        "value of method": {"vllm/config/speculative.py": literal("SpeculativeMethod")},
        "value of rejection_sample_method": {"vllm/config/speculative.py": literal("RejectionSampleMethod")},
        "value of --per-request-spec-decode-metrics": {
            "vllm/config/observability.py": literal("per_request_spec_decode_metrics")
        },
        "value of draft_sample_method": {"vllm/config/speculative.py": literal("DraftSampleMethod")},
        "read key": {
            "vllm/benchmarks/serve.py vllm/v1/metrics/stats.py vllm/v1/spec_decode/metrics.py": strings,
            "vllm/entrypoints/*/protocol.py": strings,
        },
        "read key of a response": {
            "vllm/entrypoints/openai/chat_completion/protocol.py": fields_of("ChatCompletionResponse")
        },
    },
    "sglang": {
        "program": {"sglang/launch_server.py": always("sglang.launch_server")},
        "flag": {"sglang/srt/arg_groups/fields/*.py sglang/srt/server_args.py": options_of_fields},
        "key": {"sglang/srt/speculative/adaptive_spec_params.py": strings},
        "variable": {"sglang/srt/environ.py": fields_of("Envs")},
        "value of --speculative-algorithm": {
            "sglang/srt/speculative/spec_info.py": fields_of("SpeculativeAlgorithm"),
            "sglang/srt/speculative/spec_registry.py": strings,
        },
        "read key": {
            "sglang/srt/managers/tokenizer_manager.py sglang/srt/entrypoints/openai/protocol.py": strings,
            "sglang/benchmark/*.py sglang/bench_*.py sglang/srt/observability/*.py": strings,
        },
        "read key of a response": {"sglang/srt/entrypoints/openai/protocol.py": fields_of("ChatCompletionResponse")},
        "read text": {
            "sglang/srt/observability/*.py sglang/srt/managers/scheduler_components/metrics_reporter.py": strings
        },
    },
    "lmdeploy": {
        "program": {"*/entry_points.txt": console_scripts, "lmdeploy/cli/*.py": strings},
        "flag": {"lmdeploy/cli/utils.py lmdeploy/cli/serve.py": argparse_flags},
        "value of --speculative-algorithm": {"lmdeploy/cli/utils.py": argparse_choices("--speculative-algorithm")},
        "value of --backend": {"lmdeploy/cli/utils.py": argparse_choices("--backend")},
    },
    "llama-cpp": {
        "program": {"vendor/llama.cpp/tools/server/CMakeLists.txt": cmake_targets},
        "flag": {"vendor/llama.cpp/common/arg.cpp": llama_flags},
        "value of --spec-type": {"vendor/llama.cpp/common/speculative.cpp": llama_spec_types},
        "variable": {"vendor/llama.cpp/common/arg.cpp": cpp_strings},
        "read key": {"vendor/llama.cpp/tools/server/*.cpp vendor/llama.cpp/common/speculative.cpp": cpp_strings},
    },
    "transformers": {
        "name": {f"{TRANSFORMERS}models/auto/*.py {TRANSFORMERS}generation/configuration_utils.py": names},
        "method": {
            f"{TRANSFORMERS}generation/utils.py {TRANSFORMERS}configuration_utils.py": names,
            f"{TRANSFORMERS}models/auto/auto_factory.py {TRANSFORMERS}tokenization_utils_base.py": names,
        },
        "key": {f"{TRANSFORMERS}generation/configuration_utils.py": fields_of("GenerationConfig")},
        "value": {f"{TRANSFORMERS}generation/configuration_utils.py": strings},
        "value of dtype": {f"{TRANSFORMERS}modeling_utils.py": strings},
        "value of return_tensors": {f"{TRANSFORMERS}utils/generic.py": strings},
        "parameter of generate": {
            f"{TRANSFORMERS}generation/utils.py": parameters_of("generate"),
            f"{TRANSFORMERS}generation/configuration_utils.py": fields_of("GenerationConfig"),
        },
        "parameter of from_pretrained": {f"{TRANSFORMERS}modeling_utils.py": strings},
        "parameter": {f"{TRANSFORMERS}tokenization_utils_base.py": parameters_of()},
        "parameter of GenerationConfig": {
            f"{TRANSFORMERS}generation/configuration_utils.py": fields_of("GenerationConfig")
        },
        "attribute": {f"{TRANSFORMERS}generation/utils.py {TRANSFORMERS}tokenization_utils_base.py": attributes},
    },
    "openvino": {
        "module": {"openvino_genai/__init__.py": always("openvino_genai")},
        "method": {"openvino_genai/py_openvino_genai.pyi": names},
        "key": {"openvino_genai/py_openvino_genai.pyi": fields_of("GenerationConfig")},
        "parameter of GenerationConfig": {"openvino_genai/py_openvino_genai.pyi": fields_of("GenerationConfig")},
        # The length of "draft_model" lets compilers keep it out of the strings; it is a function as well.
        "parameter of LLMPipeline": {
            "openvino_genai/libopenvino_genai.so*": binary_strings,
            "openvino_genai/py_openvino_genai.pyi": names,
        },
    },
    "onnx-genai": {
        "module": {"onnxruntime_genai/__init__.py": always("onnxruntime_genai")},
        # The length of "Generator" lets compilers keep it out of the strings.
        "method": {
            "onnxruntime_genai/onnxruntime_genai*.so": binary_names,
            "onnxruntime_genai/__init__.py": always("Generator"),
        },
        "key": {"onnxruntime_genai/libonnxruntime-genai.so": binary_names},
        "parameter": {"onnxruntime_genai/libonnxruntime-genai.so": binary_names},
        "program": {"onnxruntime_genai/models/builder.py": always("onnxruntime_genai.models.builder")},
        "flag of onnxruntime_genai.models.builder": {"onnxruntime_genai/models/builder.py": argparse_flags},
        "value of --precision": {"onnxruntime_genai/models/builder.py": strings},
        "value of --execution_provider": {
            "onnxruntime_genai/models/builder.py": argparse_choices("--execution_provider")
        },
        "value of --extra_options": {"onnxruntime_genai/models/builders/base.py": switched_on},
    },
    "mlx-lm": {
        "program": {"pyproject.toml": console_scripts},
        "flag of mlx_lm.server": {"mlx_lm/server.py": argparse_flags},
        "flag": {"mlx_lm/server.py mlx_lm/generate.py": argparse_flags},
    },
    "exllamav3": {
        "name": {"exllamav3/__init__.py": imported, "exllamav3/model_init.py": always("model_init")},
        "flag": {"exllamav3/model_init.py": argparse_flags},
        "method": {"exllamav3/model_init.py exllamav3/generator/generator.py exllamav3/tokenizer/*.py": names},
        "parameter of Generator": {"exllamav3/generator/generator.py": parameters_of("Generator")},
        "parameter of generate": {"exllamav3/generator/generator.py": parameters_of("generate")},
        "parameter": {"exllamav3/model_init.py": parameters_of()},
        "attribute of parse_args": {"exllamav3/model_init.py": attributes},
        "attribute": {"exllamav3/model/*.py": attributes},
    },
}
