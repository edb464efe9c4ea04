"""Options of vLLM and SGLang by their names there, each with a remedy: the option of ours to give instead.
Torch-free."""

from collections.abc import Mapping

LEAVE_OUT = "Leave it out."
TARGET = "Write {call}."
DRAFT = "Give {draft}."
SHAPE = "Give {shape}, steps,topk,tokens: 4,1,5 drafts a chain of 4, and 5,4,16 a tree."
MAX_CONTEXT = "Give {max_context}."
POOL = "Give {kv_memory}, the size of the key-value pool, such as 4G."
FRACTION = "Give {gpu_memory_utilization}, the share of the GPU's memory that the process may take in all."
BATCH = "Give {max_batch_size}."
RANKS = "Give {tensor_parallel}."
PROMPT_PARTS = "Give {prefill_tokens}."
NO_PREFIX_CACHE = "Give {no_prefix_cache}."
NO_GRAPHS = "Give {no_graphs}."
GRAPHS = "Leave it out: what a batch needs is captured, and nothing with {no_graphs}."
LAYERS = "Leave it out: layers are not shared out among processes; {tensor_parallel} shares each of them."
REPLICAS = "Start several servers behind a router (docs/how-to/serve-a-fleet.md)."
ADAPTERS = "Merge the adapter into the target's weights."
HOST_MEMORY = "Leave it out: nothing is moved to the memory of the host."
TEXT_ALONE = "Leave it out: prompts are text."
GRAMMARS = "Leave it out: llguidance compiles all grammars."
CONFIG = "Write it into the target's config.json."
PROXY = "Put a proxy before the server, as in serve/haproxy.cfg."
OF_SERVER = "Leave it out: it is an option of eagle-kit serve."
NVTX = "Give {nvtx}: the parts of a step have ranges, and not the layers."
LOG_STATS = "Leave it out: eagle-kit serve has --log-stats-interval SECONDS, and 0 writes no lines."
PROFILES = "Leave it out: eagle-kit serve has --profile-dir DIR."

OPTIONS = {
    # The models.
    "model": TARGET,
    "model_path": TARGET,
    "speculative_config": "Write {call}, and give {shape}: 4,1,5 is num_speculative_tokens=4.",
    "speculative_model": DRAFT,
    "speculative_draft_model": DRAFT,
    "speculative_draft_model_path": DRAFT,
    "draft_model": DRAFT,
    "draft_model_path": DRAFT,
    "revision": "Name it with the target: org/model@revision.",
    "tokenizer_revision": "Name it with the target: org/model@revision.",
    "tokenizer_path": "Leave it out: the tokenizer is the target's.",
    "tokenizer_mode": LEAVE_OUT,
    "skip_tokenizer_init": "Leave it out; prompts may be token ids.",
    "trust_remote_code": "Leave it out: code in a model's folder is never run.",
    "load_format": LEAVE_OUT,
    "download_dir": "Set $HF_HOME.",
    "hf_overrides": CONFIG,
    "rope_scaling": CONFIG,
    "json_model_override_args": CONFIG,
    "enable_lora": ADAPTERS,
    "lora_modules": ADAPTERS,
    "lora_paths": ADAPTERS,
    "task": "Leave it out: a target generates text.",
    "runner": "Leave it out: a target generates text.",
    "limit_mm_per_prompt": TEXT_ALONE,
    "mm_processor_kwargs": TEXT_ALONE,
    # Speculation.
    "speculative_algorithm": "Give {algorithm}.",
    "num_speculative_tokens": SHAPE,
    "speculative_num_steps": SHAPE,
    "speculative_eagle_topk": SHAPE,
    "speculative_num_draft_tokens": SHAPE,
    # Batches and memory.
    "max_model_len": MAX_CONTEXT,
    "context_length": MAX_CONTEXT,
    "mem_fraction_static": FRACTION,
    "kv_cache_memory_bytes": POOL,
    "num_gpu_blocks_override": POOL,
    "max_total_tokens": POOL,
    "kv_cache_dtype": "Give {kv_dtype}.",
    "block_size": "Give {page_size}.",
    "max_num_seqs": BATCH,
    "max_running_requests": BATCH,
    "max_num_batched_tokens": PROMPT_PARTS,
    "max_prefill_tokens": PROMPT_PARTS,
    "chunked_prefill_size": PROMPT_PARTS,
    "enable_chunked_prefill": "Leave it out: prompts are computed in parts of {prefill_tokens}.",
    "enable_prefix_caching": "Leave it out: prefixes are cached, unless with {no_prefix_cache}.",
    "no_enable_prefix_caching": NO_PREFIX_CACHE,
    "disable_radix_cache": NO_PREFIX_CACHE,
    "swap_space": HOST_MEMORY,
    "cpu_offload_gb": HOST_MEMORY,
    "random_seed": "Give {seed}.",
    # Devices and kernels.
    "tensor_parallel_size": RANKS,
    "tp_size": RANKS,
    "tp": RANKS,
    "pipeline_parallel_size": LAYERS,
    "pp_size": LAYERS,
    "data_parallel_size": REPLICAS,
    "dp_size": REPLICAS,
    "async_scheduling": LEAVE_OUT,
    "distributed_executor_backend": LEAVE_OUT,
    "disable_custom_all_reduce": LEAVE_OUT,
    "enforce_eager": NO_GRAPHS,
    "disable_cuda_graph": NO_GRAPHS,
    "cuda_graph_max_bs": GRAPHS,
    "max_seq_len_to_capture": GRAPHS,
    "compilation_config": GRAPHS,
    "enable_torch_compile": GRAPHS,
    "attention_backend": "Give {prefill_backend}.",
    "enable_layerwise_nvtx_tracing": NVTX,
    "enable_layerwise_nvtx_marker": NVTX,
    # Requests and the server.
    "generation_config": "Leave it out: a request has OpenAI's defaults, or its own values.",
    "logits_processors": "Give requests logit_bias, bad_words, allowed_token_ids or structured_outputs.",
    "guided_decoding_backend": GRAMMARS,
    "structured_outputs_config": GRAMMARS,
    "grammar_backend": GRAMMARS,
    "enable_auto_tool_choice": "Leave it out: calls are read as the chat template writes them.",
    "enable_reasoning": "Leave it out: reasoning is read as the chat template writes it.",
    "served_model_name": OF_SERVER,
    "api_key": OF_SERVER,
    "enable_metrics": "Leave it out: /metrics is always there.",
    "disable_log_stats": LOG_STATS,
    "decode_log_interval": LOG_STATS,
    "profiler_config": PROFILES,
    "disable_log_requests": LEAVE_OUT,
    "log_level": LEAVE_OUT,
    "uvicorn_log_level": LEAVE_OUT,
    "root_path": PROXY,
    "ssl_certfile": PROXY,
    "ssl_keyfile": PROXY,
    "allowed_origins": PROXY,
}
"""Remedy by the name of an option. Names in braces are options of ours, which have other names in Python than
on the command line."""

PYTHON_NAMES = {
    "call": "LLM(TARGET, draft=DRAFT)",
    "draft": "draft=DRAFT",
    "no_prefix_cache": "prefix_cache=False",
    "no_graphs": 'graph_mode="off"',
    "algorithm": "algorithm",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "kv_dtype": "kv_dtype",
    "kv_memory": "kv_memory",
    "max_batch_size": "max_batch_size",
    "max_context": "max_context",
    "nvtx": "nvtx=True",
    "page_size": "page_size",
    "prefill_backend": "prefill_backend",
    "prefill_tokens": "prefill_tokens",
    "seed": "seed",
    "shape": "shape",
    "tensor_parallel": "tensor_parallel",
}
"""Names in the braces of :data:`OPTIONS`, as keywords of ``LLM``."""


def remedies_with(names: Mapping[str, str]) -> dict[str, str]:
    """Remedies by the names of options of vLLM and SGLang.

    Args:
        names: replacements of the names in braces, with the keys of :data:`PYTHON_NAMES`.
    """
    return {option: text.format_map(names) for option, text in OPTIONS.items()}
