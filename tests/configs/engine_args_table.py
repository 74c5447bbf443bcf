"""The fields of `EngineArgs` as the specification lists them, typed by hand: name -> default."""

from typing import Any

MODEL: dict[str, Any] = {
    "model": "smollm2-135m", "task": "auto", "tokenizer": None, "tokenizer_mode": "auto",
    "trust_remote_code": False, "dtype": "auto", "seed": None, "hf_config_path": None,
    "allowed_local_media_path": "", "revision": None, "code_revision": None,
    "tokenizer_revision": None, "rope_scaling": {}, "rope_theta": None, "max_model_len": None,
    "quantization": None, "enforce_eager": False, "max_seq_len_to_capture": 8192,
    "max_logprobs": 20, "disable_sliding_window": False, "disable_cascade_attn": False,
    "skip_tokenizer_init": False, "enable_prompt_embeds": False, "served_model_name": None,
    "disable_async_output_proc": False, "config_format": "auto", "hf_token": None,
    "hf_overrides": {}, "override_neuron_config": {}, "override_pooler_config": None,
    "logits_processor_pattern": None, "generation_config": "auto",
    "override_generation_config": {}, "enable_sleep_mode": False, "model_impl": "auto",
    "override_attention_dtype": None,
}  # fmt: skip
LOAD: dict[str, Any] = {
    "load_format": "auto", "download_dir": None, "model_loader_extra_config": {},
    "ignore_patterns": None, "use_tqdm_on_load": True, "pt_load_map_location": "cpu",
}  # fmt: skip
PARALLEL: dict[str, Any] = {
    "distributed_executor_backend": None, "pipeline_parallel_size": 1, "tensor_parallel_size": 1,
    "data_parallel_size": 1, "data_parallel_rank": None, "data_parallel_size_local": None,
    "data_parallel_address": None, "data_parallel_rpc_port": None, "data_parallel_backend": "mp",
    "enable_expert_parallel": False, "enable_eplb": False, "num_redundant_experts": 0,
    "eplb_window_size": 1000, "eplb_step_interval": 3000, "eplb_log_balancedness": False,
    "max_parallel_loading_workers": None, "ray_workers_use_nsight": False,
    "disable_custom_all_reduce": False, "worker_cls": "auto", "worker_extension_cls": "",
    "enable_multimodal_encoder_data_parallel": False,
}  # fmt: skip
CACHE: dict[str, Any] = {
    "block_size": None, "gpu_memory_utilization": 0.92, "swap_space": 4, "kv_cache_dtype": "auto",
    "num_gpu_blocks_override": None, "enable_prefix_caching": None,
    "prefix_caching_hash_algo": "sha256", "cpu_offload_gb": 0, "calculate_kv_scales": False,
}  # fmt: skip
SCHEDULER: dict[str, Any] = {
    "max_num_batched_tokens": None, "max_num_seqs": None, "max_num_partial_prefills": 1,
    "max_long_partial_prefills": 1, "long_prefill_token_threshold": 0, "cuda_graph_sizes": [],
    "num_lookahead_slots": 0, "scheduler_delay_factor": 0.0, "preemption_mode": None,
    "num_scheduler_steps": 1, "multi_step_stream_outputs": True, "scheduling_policy": "fcfs",
    "enable_chunked_prefill": None, "disable_chunked_mm_input": False, "scheduler_cls": None,
    "disable_hybrid_kv_cache_manager": False, "async_scheduling": None,
}  # fmt: skip
DECODING: dict[str, Any] = {
    "guided_decoding_backend": "auto", "guided_decoding_disable_fallback": False,
    "guided_decoding_disable_any_whitespace": False,
    "guided_decoding_disable_additional_properties": False, "reasoning_parser": "",
}  # fmt: skip
LORA: dict[str, Any] = {
    "enable_lora": False, "enable_lora_bias": False, "max_loras": 1, "max_lora_rank": 16,
    "lora_extra_vocab_size": 256, "lora_dtype": "auto", "long_lora_scaling_factors": None,
    "max_cpu_loras": None, "fully_sharded_loras": False, "default_mm_loras": None,
}  # fmt: skip
PROMPT_ADAPTER: dict[str, Any] = {
    "enable_prompt_adapter": False, "max_prompt_adapters": 1, "max_prompt_adapter_token": 0,
}  # fmt: skip
MULTIMODAL: dict[str, Any] = {
    "limit_mm_per_prompt": {}, "media_io_kwargs": {}, "mm_processor_kwargs": None,
    "disable_mm_preprocessor_cache": False, "interleave_mm_strings": False,
}  # fmt: skip
OBSERVABILITY: dict[str, Any] = {
    "show_hidden_metrics_for_version": None, "otlp_traces_endpoint": None,
    "collect_detailed_traces": None, "disable_log_stats": False,
}  # fmt: skip
GROUPS: dict[str, dict[str, Any]] = {
    "ModelConfig": MODEL,
    "LoadConfig": LOAD,
    "DecodingConfig": DECODING,
    "ParallelConfig": PARALLEL,
    "RecoveryConfig": {},
    "CacheConfig": CACHE,
    "MultiModalConfig": MULTIMODAL,
    "LoRAConfig": LORA,
    "PromptAdapterConfig": PROMPT_ADAPTER,
    "DeviceConfig": {"device": "auto"},
    "SpeculativeConfig": {"speculative_config": None},
    "ObservabilityConfig": OBSERVABILITY,
    "SchedulerConfig": SCHEDULER,
    "EngineConfig": {
        "kv_transfer_config": None, "kv_events_config": None, "compilation_config": None,
        "additional_config": {}, "use_v2_block_manager": True,
    },
}  # fmt: skip
SHORT_FLAGS = {
    "quantization": ["-q"], "pipeline_parallel_size": ["-pp"], "tensor_parallel_size": ["-tp"],
    "data_parallel_size": ["-dp"], "data_parallel_rank": ["-dpn"],
    "data_parallel_size_local": ["-dpl"], "data_parallel_address": ["-dpa"],
    "data_parallel_rpc_port": ["-dpp"], "data_parallel_backend": ["-dpb"],
    "data_parallel_start_rank": ["-dpr"], "data_parallel_external_lb": ["-dpe"],
    "data_parallel_hybrid_lb": ["-dph"],
    "enable_expert_parallel": ["-ep"], "compilation_config": ["-O", "-cc", "--optimization-level"],
    "speculative_config": ["-sc"], "async_scheduling": ["-asc"],
    "gpu_memory_utilization": ["--device-memory-utilization"],
    "kv_cache_memory_bytes": ["--kv-cache-memory"], "nnodes": ["-n"], "node_rank": ["-r"],
    "attention_backend": ["-ac"],
}  # fmt: skip
# Newer fields: name -> default.
NEWER: dict[str, Any] = {
    "max_restarts": 10, "restart_window": 600.0, "step_timeout": 300.0,
    "allow_replay_after_rpc": False, "data_parallel_start_rank": None,
    "data_parallel_external_lb": False, "data_parallel_hybrid_lb": False,
    "weight_update_root": None, "weight_transfer_config": None,
    "sleep_spill_dir": None,
    "logprobs_mode": "raw_logprobs", "kv_cache_memory_bytes": None, "runner": "auto",
    "convert": "auto", "renderer_num_workers": 1, "max_num_queued_reqs": None,
    "max_num_queued_tokens": None, "structured_outputs_config": {}, "attention_backend": None,
    "pp_layer_partition": None, "nnodes": 1, "node_rank": 0, "master_addr": "127.0.0.1",
    "master_port": 29501,
    "cluster_key_file": None, "profiler_config": None, "stream_interval": 1,
    "logits_processors": None,
}  # fmt: skip
# A value of each field without effect that is not its default.
LEGACY: dict[str, Any] = {
    "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 5.0,
    "max_seq_len_to_capture": 1, "disable_async_output_proc": True, "disable_cascade_attn": True,
    "override_neuron_config": {"a": 1}, "logits_processor_pattern": ".*",
    "override_attention_dtype": "float32", "swap_space": 8, "max_num_partial_prefills": 2,
    "max_long_partial_prefills": 2, "num_lookahead_slots": 1, "scheduler_delay_factor": 0.5,
    "preemption_mode": "swap", "num_scheduler_steps": 8, "multi_step_stream_outputs": False,
    "lora_extra_vocab_size": 512, "long_lora_scaling_factors": (1.0, 2.0),
    "enable_prompt_adapter": True, "max_prompt_adapters": 2, "max_prompt_adapter_token": 3,
    "device": "cuda", "use_v2_block_manager": False,
}  # fmt: skip
# A value of each known field that cannot do anything yet.
LATER: dict[str, Any] = {
    "task": "embed", "tokenizer_mode": "slow", "trust_remote_code": True,
    "allowed_local_media_path": "/media", "code_revision": "main", "tokenizer_revision": "main",
    "disable_sliding_window": True, "enable_prompt_embeds": True,
    "config_format": "mistral", "override_pooler_config": {"normalize": True},
    "model_impl": "transformers", "load_format": "pt",
    "model_loader_extra_config": {"a": 1}, "ignore_patterns": "*.bin",
    "pt_load_map_location": "cuda", "data_parallel_address": "10.0.0.1",
    "data_parallel_rpc_port": 1, "enable_expert_parallel": True,
    "enable_eplb": True, "num_redundant_experts": 1, "eplb_window_size": 1,
    "eplb_step_interval": 1, "eplb_log_balancedness": True, "max_parallel_loading_workers": 1,
    "ray_workers_use_nsight": True,
    "enable_multimodal_encoder_data_parallel": True, "kv_cache_dtype": "fp8",
    "prefix_caching_hash_algo": "xxhash", "cpu_offload_gb": 1, "calculate_kv_scales": True,
    "long_prefill_token_threshold": 100, "cuda_graph_sizes": [8],
    "disable_chunked_mm_input": True, "scheduler_cls": "a.B",
    "disable_hybrid_kv_cache_manager": True, "async_scheduling": True,
    "guided_decoding_backend": "xgrammar", "guided_decoding_disable_fallback": True,
    "guided_decoding_disable_any_whitespace": True,
    "guided_decoding_disable_additional_properties": True, "reasoning_parser": "deepseek_r1",
    "enable_lora": True, "enable_lora_bias": True, "max_loras": 2, "max_lora_rank": 8,
    "lora_dtype": "bfloat16", "max_cpu_loras": 2, "fully_sharded_loras": True,
    "default_mm_loras": {"image": "x"}, "limit_mm_per_prompt": {"image": 2},
    "media_io_kwargs": {"video": {}}, "mm_processor_kwargs": {"a": 1},
    "disable_mm_preprocessor_cache": True, "interleave_mm_strings": True,
    "show_hidden_metrics_for_version": "0.1", "otlp_traces_endpoint": "http://x",
    "collect_detailed_traces": ["all"], "speculative_config": {"method": "ngram"},
    "kv_transfer_config": {"kv_role": "kv_both"}, "kv_events_config": {"publisher": "zmq"},
    "compilation_config": 3, "additional_config": {"a": 1}, "runner": "pooling",
    "convert": "embed", "structured_outputs_config": {"backend": "guidance"},
    "attention_backend": "FLASH_ATTN",
    "stream_interval": 2, "logits_processors": ["a:B"],
}  # fmt: skip
# Values that ask for what is the case anyway.
HOLDS: dict[str, Any] = {
    "task": "generate", "tokenizer_mode": "hf", "enforce_eager": True, "config_format": "hf",
    "model_impl": "vllm", "load_format": "safetensors", "ignore_patterns": "original/**/*",
    "distributed_executor_backend": "uni", "disable_custom_all_reduce": True,
    "enable_chunked_prefill": True, "async_scheduling": False, "runner": "generate",
    "convert": "none", "attention_backend": "auto",
}  # fmt: skip
