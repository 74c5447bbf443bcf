"""The API contract: the Python API, sections 3 and 4, the engines. Which tests show which row."""

from tests.compat.rows import (
    ARGS,
    ASYNC,
    CACHE,
    ENGINE,
    ENGINES,
    FRONT,
    LLM,
    MAINTENANCE,
    SIGNATURES,
    TYPES,
    UPDATES,
    Row,
    at,
)

ASYNC_RULES = "tests/compat/test_async.py"

PARAMETERS = at(SIGNATURES, "test_parameters")
CONSTRUCTORS = at(SIGNATURES, "test_constructors")
STATE = at(ENGINE, "test_configuration_and_state")
LATER = PARAMETERS + at(ENGINE, "test_features_of_later_versions")
LATER_FLAGS = at(ARGS, "test_later_fields_are_refused_by_name")
REFUSED = at(ENGINE, "test_refused_requests")
LOGGERS = at(ENGINE, "test_loggers", "test_in_this_process")
VALIDATION = at(ENGINE, "test_validation_of_outputs")
STATES = at(ASYNC, "test_states")
ERRORED = at(ASYNC, "test_a_recorded_error_ends_everything")
DEAD = at(ASYNC, "test_a_dead_engine_core_and_a_collected_engine")
COROUTINES = (
    PARAMETERS
    + at(SIGNATURES, "test_what_is_awaited")
    + at(ASYNC, "test_coroutines_and_properties")
)
NO_INNER_PARTS = at(ENGINES, "test_inner_parts_are_not_offered")
NO_INNER_STEPS = at(ENGINES, "test_inner_steps_of_the_loop_are_not_offered")
SLEEP = at(
    UPDATES,
    "test_sleep_and_wake",
    "test_requests_wait_for_a_sleeping_engine",
) + at(MAINTENANCE, "test_sleep_and_wake", "test_waking_partly")

ROWS: list[Row] = [
    # 3.1 construction
    Row("3.1 constructor", "a configuration; executor classes, media, reuse are refused by name",
        CONSTRUCTORS + at(ENGINE, "test_features_of_later_versions")
        + at(ENGINES, "test_attributes_beside_the_configuration")),
    Row("3.1 one generation", "of engines: any may be made directly",
        at(ENGINE, "test_in_this_process")),
    Row("3.1 from_engine_args", "resolves, starts, keeps statistics unless they are disabled",
        PARAMETERS + at(ENGINE, "test_in_this_process")
        + at(ENGINES, "test_statistics_are_kept_but_not_logged")),
    Row("3.1 from_vllm_config", "starts from a configuration, with loggers of the caller's",
        PARAMETERS + at(ENGINE, "test_in_this_process")),
    Row("3.1 start", "says what ends a text and where defaults come from",
        at(ENGINES, "test_the_start_says_what_ends_a_text_and_where_defaults_come_from")),
    Row("3.1 pickling", "is a RuntimeError", at(ENGINE, "test_an_engine_cannot_be_pickled")),
    Row("3.1 end", "with the object, also after a start that failed",
        at(ENGINE, "test_a_start_that_fails_leaves_nothing") + at(LLM, "test_special_starts")),
    # 3.2 attributes
    Row("3.2 configurations", "vllm_config and its parts; None for what is not there", STATE),
    Row("3.2 decoding and observability", "are defaults if nothing was set", STATE),
    Row("3.2 log_stats, use_cached_outputs", "whether statistics are kept; False",
        at(ENGINES, "test_attributes_beside_the_configuration")),
    Row("3.2 tokenizer", "the tokenizer", STATE),
    Row("3.2 input_preprocessor", "the renderer",
        at(ENGINES, "test_attributes_beside_the_configuration")),
    Row("3.2 inner parts", "of an engine in one process are not offered", NO_INNER_PARTS),
    Row("3.2 stat_loggers", "by name; none without statistics",
        STATE + at(ASYNC, "test_a_servers_engine_without_statistics")),
    # 3.3 tokenizer
    Row("3.3 get_tokenizer_group", "the tokenizer; ValueError without one",
        PARAMETERS + STATE + at(LLM, "test_special_starts")),
    Row("3.3 get_tokenizer", "the tokenizer; adapters are refused by name", LATER + STATE),
    # 3.4 validation
    Row("3.4 enable_output_validation", "is off, on in a block, off after it",
        VALIDATION + at(SIGNATURES, "test_class_attributes")),
    Row("3.4 off", "what comes in goes out, unchecked and not copied", VALIDATION),
    Row("3.4 on", "a TypeError with both types; lists are new", VALIDATION),
    # 3.5 add_request
    Row("3.5 request_id", "a str that no request in flight has",
        PARAMETERS + REFUSED + at(ENGINE, "test_an_id_in_use")),
    Row("3.5 prompt", "any form; what can never work is refused", PARAMETERS + REFUSED),
    Row("3.5 params", "SamplingParams; later changes have no effect",
        PARAMETERS + REFUSED + at(TYPES, "test_params_of_another_type_are_refused")
        + at(ENGINE, "test_later_changes_of_parameters_have_no_effect")),
    Row("3.5 arrival_time", "wall clock; None is now",
        PARAMETERS + at(ENGINE, "test_later_changes_of_parameters_have_no_effect")
        + at(ENGINES, "test_requests_arrive_now")),
    Row("3.5 lora_request", "refused by name", PARAMETERS + REFUSED),
    Row("3.5 tokenization_kwargs", "cut, pad, special tokens, as tokenizers name them",
        PARAMETERS + at(ENGINE, "test_options_of_tokenization")),
    Row("3.5 trace_headers", "refused by name", PARAMETERS + REFUSED),
    Row("3.5 prompt_adapter_request", "refused by name", PARAMETERS + REFUSED),
    Row("3.5 priority", "needs the policy", PARAMETERS + REFUSED),
    Row("3.5 order", "of the checks is the documented one", REFUSED),
    Row("3.5 queue", "nothing comes out before step()",
        at(ENGINES, "test_requests_arrive_now")),
    # 3.6 abort_request
    Row("3.6 ids", "one or any iterable",
        PARAMETERS + at(ENGINE, "test_aborted_requests_give_nothing_more")),
    Row("3.6 unknown ids", "are ignored, and those that have ended",
        at(ENGINE, "test_aborted_requests_give_nothing_more")),
    Row("3.6 effect", "no more outputs, and everything is given back",
        at(ENGINE, "test_aborted_requests_give_nothing_more")),
    # 3.7 stepping
    Row("3.7 step", "outputs that are new; none when there is nothing to do",
        PARAMETERS + at(ENGINE, "test_steps_until_everything_is_finished",
                        "test_a_failed_request_is_raised_by_step_and_others_are_kept")),
    Row("3.7 get_num_unfinished_requests", "requests, not sequences",
        PARAMETERS + at(ENGINE, "test_steps_until_everything_is_finished")),
    Row("3.7 has_unfinished_requests", "whether step() has more to give",
        PARAMETERS + at(ENGINE, "test_steps_until_everything_is_finished")),
    Row("3.7 has_unfinished_requests_for_virtual_engine", "the same for the one scheduler",
        PARAMETERS + at(ENGINES, "test_there_is_one_scheduler")),
    Row("3.7 stop_remote_worker_execution_loop", "may be called; workers wait anyway",
        PARAMETERS + at(ENGINES, "test_there_is_one_scheduler")),
    # 3.8 getters, caches, loggers, adapters
    Row("3.8 configuration getters", "give the live objects", PARAMETERS + STATE),
    Row("3.8 reset_mm_cache", "True: there is none", PARAMETERS + STATE),
    Row("3.8 reset_prefix_cache", "True; nothing of before is found",
        PARAMETERS + STATE + at(LLM, "test_prefix_cache_reset_and_salt")
        + at(CACHE, "test_a_reset_keeps_what_is_in_progress_out_of_the_cache")),
    Row("3.8 add_logger", "RuntimeError without statistics, KeyError for a name in use",
        PARAMETERS + LOGGERS),
    Row("3.8 remove_logger", "RuntimeError without statistics, KeyError for an unknown name",
        PARAMETERS + LOGGERS),
    Row("3.8 do_log_stats", "hands a record to every logger, also while idle",
        PARAMETERS + LOGGERS),
    Row("3.8 adapters", "add, remove, pin, list: refused by name", LATER),
    Row("3.8 prompt adapters", "add, remove, list: refused by name", LATER),
    Row("3.8 start_profile, stop_profile", "need a folder for traces",
        LATER + at(LLM, "test_special_starts")),
    Row("3.8 check_health", "None, or the error of a dead engine core",
        PARAMETERS + STATE + at(ENGINE, "test_in_this_process")),
    Row("3.8 is_tracing_enabled", "False", PARAMETERS + STATE),
    Row("3.8 do_tracing, create_trace_span", "refused by name", LATER),
    Row("3.8 collective_rpc", "as that of LLM",
        PARAMETERS + at(LLM, "test_collective_rpc_and_apply_model")),
    # 3.9 sleep
    Row("3.9 sleep, wake_up", "an AssertionError: sleep mode is not enabled", LATER),
    Row("3.9 is_sleeping", "False", PARAMETERS + STATE),
    Row("3.9 level 1", "weights come back from their files or from disk, the cache is lost", SLEEP),
    Row("3.9 level 2", "both are lost; weights have to be loaded", SLEEP),
    Row("3.9 while asleep", "new requests wait; LLM.generate is an EngineNotReadyError", SLEEP),
    Row("3.9 tags", "weights, kv_cache, scheduling; others are a ValueError", SLEEP),
    Row("3.9 caches", "nothing of before is found", SLEEP),
    # 4 construction
    Row("4 constructor", "that of LLMEngine, with log_requests and start_engine_loop",
        CONSTRUCTORS + at(ASYNC_RULES, "test_plain_attributes")),
    Row("4 from_engine_args", "resolves and starts; nothing is left of a failed start",
        PARAMETERS + at(ASYNC, "test_a_start_that_fails", "test_coroutines_and_properties")),
    Row("4 from_vllm_config", "starts from a configuration",
        PARAMETERS + at(ASYNC_RULES, "test_plain_attributes") + DEAD),
    Row("4 flags", "statistics and the log of requests, as the arguments say",
        DEAD + at(ASYNC, "test_coroutines_and_properties",
                  "test_a_servers_engine_without_statistics")),
    Row("4 log_requests", "a line when a request comes, ends, or is aborted",
        at(ASYNC_RULES, "test_lines_for_each_request")
        + at(FRONT, "test_log_lines_name_requests_and_never_their_text")),
    # 4.1 state
    Row("4.1 is_running", "a loop that has not ended", STATES),
    Row("4.1 is_stopped", "an error, or a loop that has ended", STATES + ERRORED),
    Row("4.1 errored", "an error was recorded", STATES + ERRORED),
    Row("4.1 dead_error", "a new RuntimeError each time, which is not raised", ERRORED),
    Row("4.1 attributes", "log_requests, start_engine_loop, engine, background_loop",
        at(ASYNC_RULES, "test_plain_attributes") + STATES + NO_INNER_STEPS),
    Row("4.1 never started", "F, F, F", STATES),
    Row("4.1 active", "T, F, F", STATES),
    Row("4.1 failed", "F, T, T", DEAD),
    Row("4.1 shut down", "F, and stopped only if it had failed", STATES + ERRORED),
    Row("4.1 set_errored", "T, T", ERRORED),
    # 4.2 the background loop
    Row("4.2 start_background_loop", "RuntimeError if it runs, else the recorded error",
        PARAMETERS + STATES + ERRORED + DEAD),
    Row("4.2 shutdown_background_loop", "may be called twice", PARAMETERS + STATES),
    Row("4.2 lazy start", "with the first request", STATES),
    Row("4.2 a bad request", "an error in its own stream, and nowhere else",
        at(ASYNC, "test_refused_in_the_stream", "test_a_failed_request_fails_alone")),
    Row("4.2 another error", "ends the loop", DEAD),
    Row("4.2 idle", "the engine can be collected", DEAD),
    Row("4.2 pipeline stages", "there is one; more are refused by name", LATER_FLAGS),
    Row("4.2 a long step", "is reported, and ends nothing",
        at(ASYNC_RULES, "test_a_slow_step_ends_nothing")),
    Row("4.2 failure", "goes to every open stream; a cancelled loop is no error",
        DEAD + ERRORED + STATES),
    # 4.3 requests
    Row("4.3 add_request", "sends a request and gives the generator of its outputs",
        PARAMETERS + at(ASYNC, "test_a_request_runs_whether_somebody_reads_or_not")),
    Row("4.3 #1 not running", "is started, or an AsyncEngineDeadError", STATES + ERRORED),
    Row("4.3 #2 priority", "without its policy is a ValueError at once",
        at(ASYNC, "test_refused_at_once")
        + at(ASYNC_RULES, "test_priorities_with_their_policy")),
    Row("4.3 #3 duplicate ids", "are a ValueError at once", at(ASYNC, "test_an_id_in_use")),
    Row("4.3 arrival_time", "None and 0.0 are now",
        at(ASYNC, "test_a_request_runs_whether_somebody_reads_or_not")),
    Row("4.3 generate", "outputs of each kind, many requests at once",
        PARAMETERS + at(ASYNC, "test_outputs_of_each_kind", "test_many_at_once")),
    Row("4.3 encode", "refused by name",
        at(ASYNC_RULES, "test_everything_of_later_versions_is_refused")),
    Row("4.3 types", "are validated where that is on",
        at(ASYNC_RULES, "test_outputs_are_validated_where_that_is_on")),
    Row("4.3 cancelled", "aborts the request", at(ASYNC, "test_leaving_early_aborts")),
    Row("4.3 closed", "aborts the request", at(ASYNC, "test_leaving_early_aborts")),
    Row("4.3 end", "after the output that is finished", at(ASYNC, "test_outputs_of_each_kind")),
    Row("4.3 errors", "of the request come from the iteration",
        at(ASYNC, "test_refused_in_the_stream", "test_a_failed_request_fails_alone")),
    Row("4.3 data_parallel_rank", "a ValueError without data parallelism",
        at(ASYNC, "test_refused_at_once")),
    Row("4.3 abort", "the stream is cancelled; unknown ids are nothing; an error without a loop",
        at(ASYNC, "test_abort_by_id", "test_states")),
    # 4.4 other coroutines
    Row("4.4 get_input_preprocessor, get_tokenizer", "renderer and tokenizer", COROUTINES),
    Row("4.4 configuration getters", "give the live objects", COROUTINES),
    Row("4.4 do_log_stats", "hands out a record; its arguments are not looked at", COROUTINES),
    Row("4.4 check_health", "an AsyncEngineDeadError once it has stopped; fine before the start",
        COROUTINES + STATES + ERRORED),
    Row("4.4 is_tracing_enabled, is_sleeping", "False", COROUTINES),
    Row("4.4 start_profile, stop_profile", "need a folder for traces", COROUTINES),
    Row("4.4 reset_mm_cache, reset_prefix_cache", "give None", COROUTINES),
    Row("4.4 sleep, wake_up", "an AssertionError: sleep mode is not enabled", COROUTINES),
    Row("4.4 add_lora", "refused by name",
        COROUTINES + at(ASYNC_RULES, "test_everything_of_later_versions_is_refused")),
    Row("4.4 collective_rpc", "one result per worker, with a time limit", COROUTINES),
    Row("4.4 add_logger, remove_logger", "plain methods, KeyError as in LLMEngine", COROUTINES),
    Row("4.4 set_errored", "a plain method", ERRORED),
    Row("4.4 start and shutdown", "plain methods", PARAMETERS + STATES),
    Row("4.4 process_request_outputs", "is not offered: outputs come from another process",
        NO_INNER_STEPS),
    Row("4.4 sleep and the prefix cache", "nothing of before is found", COROUTINES + SLEEP),
    Row("4.4 inner members", "are not offered", NO_INNER_STEPS),
]  # fmt: skip

COUNTS = {
    "3.1": 7, "3.2": 7, "3.3": 2, "3.4": 3, "3.5": 11, "3.6": 3, "3.7": 5, "3.8": 13, "3.9": 7,
    "4": 5, "4.1": 10, "4.2": 9, "4.3": 14, "4.4": 16,
}  # fmt: skip
