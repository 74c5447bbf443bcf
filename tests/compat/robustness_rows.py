"""The robustness rules and cases of this stage. Which tests show which clause."""

from tests.compat.rows import (
    ADMISSION,
    ASYNC,
    BENCH,
    CASES,
    CLI,
    CONSERVATION,
    COST,
    DETOKENIZER,
    ENGINE,
    ENGINES,
    FRONT,
    HTTP,
    INVARIANCE,
    LIVE_WEIGHTS,
    MAINTENANCE,
    MODEL_INFO,
    OUTPUTS,
    PARAMS,
    PROMETHEUS,
    PROMPT_SCORES,
    RENDERER,
    RUNNER,
    SAMPLER,
    SAMPLING,
    SCHEDULER,
    SCORES,
    SOURCES,
    STATES,
    STOPS,
    STREAM,
    TEMPLATES,
    UPDATES,
    WORKER,
    Row,
    at,
)

LIMITS = f"{HTTP}/test_limits.py"
FIELD_LIMITS = at(f"{HTTP}/test_field_limits.py", "test_at_the_limit_and_above")
STREAMS = f"{HTTP}/test_streams.py"
COMPLETIONS = f"{HTTP}/test_completions.py"
CHAT = f"{HTTP}/test_chat.py"
FIELDS = f"{HTTP}/test_fields.py"
BAD = f"{HTTP}/test_bad_requests.py"
METRICS = f"{HTTP}/test_metrics.py"
LIVE = f"{HTTP}/test_live_server.py"
ROUTES = f"{HTTP}/test_routes.py"
TOKENIZE = f"{HTTP}/test_tokenize.py"
ECHO = f"{HTTP}/test_echo.py"
LOAD_CLIENT = f"{BENCH}/test_load_client.py"
BENCH_SERVE = f"{BENCH}/test_serve.py"
LEAVING = at(CONSERVATION, "test_leaving_at_any_moment_gives_everything_back")
A11 = at(CASES, "test_a11_disconnects_free_everything")
DOUBLING = at(COST, "test_twice_the_text_takes_twice_the_time")

ROWS: list[Row] = [
    Row("PP15 peak", "8k tokens with 20 scores stay inside the reserve",
        at(PROMPT_SCORES, "test_pp15_a_long_prompt_stays_inside_the_reserve")),
    Row("PP15 reserve", "the budget at start counts it",
        at("tests/compat/test_cases.py", "test_pp15_the_budget_has_room_for_scores")
        + at(WORKER, "test_memory_is_accounted_for")),
    Row("PP15 whole vocabulary", "is off unless the operator allows it",
        at(ADMISSION, "test_number_of_logprobs")
        + at(BAD, "test_scores_of_the_whole_vocabulary_need_the_operators_leave")),
    Row("PP17 every phase", "queued, in a chunk, decoding, in the last step; stream or not",
        LEAVING + A11 + at(SCHEDULER, "test_an_abort_frees_everything_at_once")),
    Row("PP17 within 100 ms", "a disconnect aborts", at(LIVE, "test_disconnect_aborts")),
    Row("PP17 by id", "an explicit call aborts, too",
        at(ENGINE, "test_aborted_requests_give_nothing_more")
        + at(ASYNC, "test_abort_by_id", "test_a_servers_engine")),
    Row("PP21 new weights", "find nothing in a warm cache, and answer as after a cold start",
        at(UPDATES, "test_from_a_path_and_from_shared_memory")
        + at(MAINTENANCE, "test_an_update_under_load_never_mixes")),
    Row("PP21 old names", "for new weights find nothing of before",
        at(MAINTENANCE, "test_an_old_name_for_new_weights_finds_no_old_prefixes")),
    Row("PP23 scores", "have a floor in JSON, whole and streamed",
        at(STREAMS, "test_no_number_is_infinite")),
    Row("PP23 processed scores", "of tokens that may not be sampled are at the floor",
        at(CASES, "test_a13_and_strict")),
    Row("PP24 equal", "with the cache on, off and warm, and for every size of chunk",
        at(PROMPT_SCORES, "test_a14", "test_scores_equal_those_of_transformers")
        + at(ENGINES, "test_a14_scores_do_not_depend_on_cache_and_chunks")),
    Row("PP24 position 0", "is None, or null",
        at(SAMPLING, "test_scores_of_prompts") + at(ECHO, "test_prompt_logprobs")),
    Row("PP24 values", "are those of the model, never left over",
        at(PROMPT_SCORES, "test_scores_equal_those_of_transformers",
           "test_batch_mates_and_choices_do_not_matter")),
    Row("PP26 key", "seed, choice and position decide",
        at(SAMPLER, "test_seeds_repeat_and_choices_differ")
        + at(RUNNER, "test_random_choices_depend_on_seed_and_index_alone")),
    Row("PP26 mates", "change nothing",
        at(INVARIANCE, "test_batch_mates")
        + at(STATES, "test_output_does_not_depend_on_what_else_runs")),
    Row("PP26 no seed", "is fresh each time",
        at(SAMPLING, "test_seeds_and_choices") + at(ADMISSION, "test_seeds")),
    Row("PP26 choices", "of a seed differ and repeat",
        at(SAMPLING, "test_seeds_and_choices") + at(INVARIANCE, "test_choices_repeat_and_differ")),
    Row("PP27 epsilon", "below 1e-5 is greedy",
        at(PARAMS, "test_temperatures_are_used_as_given")
        + at(SAMPLING, "test_what_leaves_one_token_is_greedy")),
    Row("PP27 sweep", "from 0 to 2 the scores are finite, in every mode",
        at(SAMPLER, "test_pp27_temperature_sweep") + at(SCORES, "test_pp27_sweep")),
    Row("PP28 precedence", "request, then command line, then files, then built-in",
        at(SOURCES, "test_from_the_model_with_overrides")
        + at(FIELDS, "test_precedence_and_its_report")),
    Row("PP28 sources", "each of them has a test with typed values",
        at(SOURCES, "test_from_the_model", "test_from_a_folder", "test_own_defaults_only",
           "test_from_a_gguf_file")),
    Row("PP28 at start", "is printed", at(ADMISSION, "test_facts_for_the_log")
        + at(ENGINES, "test_the_start_says_what_ends_a_text_and_where_defaults_come_from")),
    Row("PP28 return_effective_params", "echoes what holds after clamping",
        at(FIELDS, "test_effective_params_after_clamping")),
    Row("PP30 union", "of tokenizer, model and generation files, shown at start",
        at(MODEL_INFO, "test_eos_is_the_union_of_three_files")
        + at(SOURCES, "test_end_of_text_tokens_are_the_union")
        + at(ADMISSION, "test_eos_set_is_a_union", "test_facts_for_the_log")
        + at(ENGINES, "test_the_start_says_what_ends_a_text_and_where_defaults_come_from")),
    Row("PP30 min_tokens", "masks all of them",
        at(SAMPLER, "test_min_tokens_masks_all_stop_tokens")),
    Row("PP30 ignore_eos", "leaves the caller's stop tokens alone",
        at(SCHEDULER, "test_stop_conditions") + at(SAMPLING, "test_the_end_of_text")),
    Row("PP30 text", "of a stop token is left out unless asked for",
        at(OUTPUTS, "test_pp30_text_of_a_stop_token") + at(SAMPLING, "test_stop_tokens")),
    Row("PP30 stop_reason", "says which",
        at(SAMPLING, "test_stop_tokens", "test_the_end_of_text", "test_stop_strings")),
    Row("PP36 include_usage", "one last chunk without choices, null before it",
        at(COMPLETIONS, "test_stream_usage") + at(CHAT, "test_stream")
        + at(CASES, "test_a3_usage_in_streams")),
    Row("PP36 continuous", "totals never fall and end at those of the whole answer",
        at(STREAMS, "test_completion_streams_equal_whole_answers",
           "test_chat_streams_equal_whole_answers")),
    Row("PP36 n", "counts the prompt once", at(CHAT, "test_stream")),
    Row("PP36 cached tokens", "are split out, where the operator shows them",
        at(COMPLETIONS, "test_operator_can_force_usage_and_show_cached_tokens")),
    Row("PP38 tokens", "cost the same up to 64k, with stop strings and without",
        at(OUTPUTS, "test_pp38_cost_per_token_is_flat")),
    Row("PP38 empty texts", "10k of them cost the same",
        at(OUTPUTS, "test_pp38_cost_per_token_is_flat")
        + at(DETOKENIZER, "test_cost_is_linear")),
    Row("PP38 slow clients", "get merged deltas instead of a queue",
        at(STREAM, "test_merged_deltas_are_the_single_ones_joined",
           "test_merging_costs_the_same_for_every_token")),
    Row("PP45 known", "but unsupported fields are a 400",
        at(BAD, "test_sweep") + at(CHAT, "test_refused")
        + at(CASES, "test_a15_unknown_and_unsupported_fields")),
    Row("PP45 unknown", "fields are accepted, named in a header and counted",
        at(COMPLETIONS, "test_unknown_fields_are_named_and_counted")
        + at(METRICS, "test_unknown_fields_are_counted")),
    Row("PP45 no log line", "for a request", at(CASES, "test_a15_unknown_and_unsupported_fields")),
    Row("PP45 strict", "a 400 with the nearest name",
        at(COMPLETIONS, "test_strict_refuses_unknown_fields") + at(CASES, "test_a13_and_strict")),
    Row("PP50 requests", "submitted are finished, aborted, failed, running or waiting",
        at(CONSERVATION, "test_what_was_submitted_is_somewhere") + LEAVING
        + at(OUTPUTS, "test_aborted_and_failed_requests_are_counted_once")),
    Row("PP50 tokens", "sum up to the usage of the answers",
        at(CONSERVATION, "test_token_sums_are_the_sums_of_usage")),
    Row("PP50 several front ends", "come later: the flag is refused by name",
        at(CLI, "test_known_flags_are_refused_by_name")),
    Row("PP50 names", "are stable and there from the start",
        at(PROMETHEUS, "test_every_series_is_there_at_zero", "test_labels")),
    Row("PP50 faults", "of metrics and loggers end no request",
        at(METRICS, "test_a_fault_in_the_metrics_breaks_nothing")
        + at(FRONT, "test_every_logger_gets_every_record_and_cannot_fail_a_request")),
    Row("PP51 transaction", "all workers or none; an error leaves every bit of the old weights",
        at(UPDATES, "test_a_failed_update_changes_nothing")
        + at(LIVE_WEIGHTS, "test_a_failed_update_leaves_every_bit")
        + at(MAINTENANCE, "test_a_failed_update_is_rolled_back_everywhere")),
    Row("PP51 under load", "every output is of one set, and names it",
        at(UPDATES, "test_an_update_under_load_never_mixes")),
    Row("PP51 pause", "abort, wait, keep", at(UPDATES, "test_pause_modes_with_requests_in_flight")),
    Row("PP51 sleep", "serves nothing until weights are loaded; the memory is free",
        at(UPDATES, "test_requests_wait_for_a_sleeping_engine", "test_sleep_and_wake")
        + at(LIVE_WEIGHTS, "test_sleep_gives_memory_back")),
    Row("PP60 self-check", "less than 2 % off a mock server's timings, and it can fail",
        at(LOAD_CLIENT, "test_it_measures_what_the_mock_server_does",
           "test_a_wrong_benchmark_does_not_pass_the_check")
        + at(BENCH_SERVE, "test_self_check")),
    Row("PP60 clocks", "the server's and the client's, and the share of cache hits",
        at(BENCH_SERVE, "test_server_clock_is_the_difference_of_two_scrapes",
           "test_a_run_prints_and_writes_its_result")),
    Row("PP60 errors", "have a kind each and are in no mean",
        at(LOAD_CLIENT, "test_failures_have_a_kind_each", "test_failed_requests_are_in_no_figure")
        + at(BENCH_SERVE, "test_failures_are_told_and_have_no_figures")),
    Row("PP60 lengths", "those that came, beside those that were asked for",
        at(BENCH_SERVE, "test_a_run_prints_and_writes_its_result",
           "test_prompts_have_the_length_and_are_repeated_by_the_seed")),
    # security
    Row("S7 text of models", "detokenizing and stop strings are linear",
        DOUBLING + at(STOPS, "test_cost_is_linear") + at(DETOKENIZER, "test_cost_is_linear")),
    Row("S7 text of users", "spellings, templates and tokenizing are linear",
        DOUBLING + at(TEMPLATES, "test_marking_takes_linear_time")),
    Row("S11 templates", "of clients are refused at every end point unless the operator opts in",
        at(FIELDS, "test_clients_bring_templates_only_where_the_operator_trusts_them")
        + at(TOKENIZE, "test_templates_come_from_the_operator") + at(CHAT, "test_refused")),
    Row("S11 chat_template_kwargs", "are filtered; reserved names are refused",
        at(TEMPLATES, "test_template_variables")
        + at(RENDERER, "test_reserved_variables_are_refused")),
    Row("S11 sandbox", "with limits on time, output and memory",
        at(TEMPLATES, "test_hostile_templates", "test_templates_cannot_use_up_the_memory")),
    Row("S11 pool", "of the configured size, off the event loop",
        at(RENDERER, "test_the_pool_is_as_large_as_configured")
        + at("tests/compat/test_cases.py",
             "test_s11_templates_and_tokenizing_run_beside_the_event_loop")),
    Row("S19 headers", "count and bytes, at the limit and above",
        at(LIMITS, "test_header_count", "test_header_bytes", "test_a_header_that_never_ends")),
    Row("S19 bodies", "bytes, also when they come in chunks",
        at(LIMITS, "test_body_bytes", "test_chunked_bodies_are_counted_as_they_arrive",
           "test_an_announced_body_is_refused_before_it_comes")),
    Row("S19 compressed bodies", "are refused",
        at(BAD, "test_charset_is_allowed_and_compression_is_not")),
    Row("S19 JSON", "depth", at(LIMITS, "test_json_depth") + at(BAD, "test_depth_of_the_body")),
    Row("S19 fields", "messages, parts, prompts, choices, stops, words, bias, scores, salts",
        FIELD_LIMITS + at(FIELDS, "test_limits_of_messages")
        + at(BAD, "test_combinations_and_limits", "test_at_the_limits")),
    Row("S19 tools", "are refused altogether", at(CHAT, "test_refused")),
    Row("S19 one table", "which the docs show and the tests cover",
        at(LIMITS, "test_the_table_in_the_docs")
        + at(f"{HTTP}/test_field_limits.py", "test_every_limit_is_tested_and_has_its_value")),
    Row("S21 prompts", "take twice the time for twice the text", DOUBLING),
    # cases
    Row("A3", "usage of a stream of two choices", at(CASES, "test_a3_usage_in_streams")
        + at(CHAT, "test_stream")),
    Row("A8", "the sweep of every field: 200 with finite scores, or 400",
        at(CASES, "test_a8_sweep") + at(BAD, "test_sweep")),
    Row("A10 window", "L and L + 1 are refused with the numbers, L - 1 gives one token",
        at(CASES, "test_a10_window_keys_and_readiness")
        + at(COMPLETIONS, "test_context_length") + at(ADMISSION, "test_window")
        + at(SAMPLING, "test_a_limit_of_tokens")),
    Row("A10 cut", "only when asked for by name",
        at(FIELDS, "test_truncation") + at(RENDERER, "test_length")),
    Row("A12 answers", "50 requests of one label are each answered right",
        at(CASES, "test_a12_one_request_id_for_all")
        + at(COMPLETIONS, "test_ids_are_ours_and_labels_are_echoed")),
    Row("A12 log", "has an id of its own for each",
        at("tests/compat/test_cases.py", "test_a12_every_line_has_an_id_of_its_own")
        + at(ROUTES, "test_request_log")),
    Row("A13 masked tokens", "are at the floor, in JSON that is strictly valid",
        at(CASES, "test_a13_and_strict") + at(STREAMS, "test_no_number_is_infinite")),
    Row("A13 NaN", "is a typed 500 for that request alone",
        at(STREAMS, "test_non_finite_logits_end_that_request_alone")
        + at(RUNNER, "test_non_finite_values_stay_with_their_choice_and_its_blocks")
        + at(ENGINE, "test_a_failed_request_is_raised_by_step_and_others_are_kept")),
    Row("A14", "the same text four times, 3 B cached, equal scores, the first of them null",
        at(PROMPT_SCORES, "test_a14")
        + at(ENGINES, "test_a14_scores_do_not_depend_on_cache_and_chunks")),
    Row("A15 unknown", "named in the header, counted, not logged; strict: a 400 with the name",
        at(CASES, "test_a15_unknown_and_unsupported_fields", "test_a13_and_strict")),
    Row("A15 unsupported", "a 400", at(CASES, "test_a15_unknown_and_unsupported_fields")),
]  # fmt: skip

COUNTS = {
    "PP15": 3, "PP17": 3, "PP21": 2, "PP23": 2, "PP24": 3, "PP26": 4, "PP27": 2, "PP28": 4,
    "PP30": 5, "PP36": 4, "PP38": 3, "PP45": 4, "PP50": 5, "PP51": 4, "PP60": 4, "S7": 2,
    "S11": 4, "S19": 7, "S21": 1, "A3": 1, "A8": 1, "A10": 2, "A12": 2, "A13": 2, "A14": 1,
    "A15": 2,
}  # fmt: skip
