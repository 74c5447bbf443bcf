"""The API contract: outputs. Which tests show which row."""

from tests.compat.rows import (
    ADMISSION,
    ASYNC,
    BEAMS,
    ENGINE,
    ENGINES,
    FRONT,
    LAYOUT,
    LLM,
    OUTPUTS,
    PROCESSOR,
    SAMPLING,
    SCHEDULER,
    STOPS,
    TYPES,
    Row,
    at,
)

FIELDS = at(TYPES, "test_fields_of_outputs")
COMPLETION = FIELDS + at(OUTPUTS, "test_completion_output_fields_in_order")
REQUEST = FIELDS + at(TYPES, "test_every_parameter_is_an_attribute_and_shown")
AGGREGATES = at(OUTPUTS, "test_add_aggregates_deltas")
KINDS = at(PROCESSOR, "test_delta_and_cumulative_and_final")
SCORED = at(OUTPUTS, "test_outputs_are_what_a_plain_object_would_be")
PROMPT_FIELDS = at(OUTPUTS, "test_prompt_logprobs", "test_prompt_fields_until_the_first_tokens")
NO_POOLING = at(TYPES, "test_names_of_later_versions") + at(LAYOUT, "test_public_names_exist")
NO_ENCODING = at(LLM, "test_features_of_later_versions")

ROWS: list[Row] = [
    # 1 one sequence
    Row("1 index", "the place in the request, from 0",
        COMPLETION + at(SAMPLING, "test_seeds_and_choices")),
    Row("1 text", "what was generated, or what is new", COMPLETION + KINDS),
    Row("1 token_ids", "its ids, which need not be a list", COMPLETION + KINDS),
    Row("1 cumulative_logprob", "the sum over the whole sequence, None without scores",
        COMPLETION + at(SAMPLING, "test_scores_of_outputs", "test_no_scores_unless_asked")),
    Row("1 logprobs", "a dict per token, None if nobody asked",
        COMPLETION + at(SAMPLING, "test_scores_of_outputs", "test_no_scores_unless_asked")),
    Row("1 finish_reason", "None while it runs", COMPLETION + SCORED),
    Row("1 stop_reason", "the stop token or string that ended it, else None",
        COMPLETION + at(SAMPLING, "test_stop_strings", "test_stop_tokens", "test_the_end_of_text",
                        "test_a_limit_of_tokens")),
    Row("1 lora_request", "None", COMPLETION),
    Row("1 finished()", "a method: whether there is a reason", COMPLETION),
    Row("1 repr", "leaves the adapter out",
        at(TYPES, "test_every_parameter_is_an_attribute_and_shown")),
    Row("1 stop", "by end of text, stop token or stop string",
        at(SAMPLING, "test_the_end_of_text", "test_stop_tokens", "test_stop_strings")),
    Row("1 length", "by max_tokens or the window",
        at(SAMPLING, "test_a_limit_of_tokens") + at(SCHEDULER, "test_stop_conditions")),
    Row("1 abort", "a sequence that was aborted says so",
        at(OUTPUTS, "test_deltas_of_several_choices",
           "test_aborted_and_failed_requests_are_counted_once")),
    Row("1 refused", "a prompt that can never fit is an error at once, not an empty output",
        at(ADMISSION, "test_window", "test_pool")
        + at(SCHEDULER, "test_a_prompt_that_can_never_fit_is_refused_with_the_numbers")),
    Row("1 Logprob", "value, rank, and the token's text",
        FIELDS + at(SAMPLING, "test_scores_of_outputs")
        + at(PROCESSOR, "test_logprobs_follow_tokens")),
    # 2 one request
    Row("2 request_id", "the caller's name for it",
        REQUEST + at(ENGINE, "test_steps_until_everything_is_finished")),
    Row("2 prompt", "its text, None for ids", REQUEST + at(LLM, "test_forms_of_prompts")),
    Row("2 prompt_token_ids", "the ids that were run",
        REQUEST + at(LLM, "test_forms_of_prompts")),
    Row("2 prompt_logprobs", "one entry per token, the first None",
        REQUEST + at(SAMPLING, "test_scores_of_prompts")
        + at(OUTPUTS, "test_prompt_of_one_token_has_one_empty_score")),
    Row("2 outputs", "one entry per sequence", REQUEST + at(SAMPLING, "test_seeds_and_choices")),
    Row("2 finished", "whether all of them have ended",
        REQUEST + at(OUTPUTS, "test_deltas_of_several_choices")),
    Row("2 metrics", "times of the request",
        REQUEST + at(ENGINES, "test_requests_arrive_now") + at(OUTPUTS, "test_times")),
    Row("2 lora_request", "None", REQUEST),
    Row("2 encoder_prompt", "None: there are no encoder-decoder models", REQUEST),
    Row("2 encoder_prompt_token_ids", "None likewise", REQUEST),
    Row("2 num_cached_tokens", "what the prefix cache had of the prompt",
        REQUEST + at(ENGINES, "test_a14_scores_do_not_depend_on_cache_and_chunks")
        + at(LLM, "test_prefix_cache_reset_and_salt")),
    Row("2 multi_modal_placeholders", "by keyword only; None is an empty dict",
        REQUEST + at(OUTPUTS, "test_request_output_fields_and_unknown_ones")),
    Row("2 kv_transfer_params", "by keyword only", REQUEST),
    Row("2 **kwargs", "unknown ones are ignored, with one warning",
        FIELDS + at(OUTPUTS, "test_request_output_fields_and_unknown_ones")),
    Row("2 repr", "shows everything but kv_transfer_params",
        at(TYPES, "test_every_parameter_is_an_attribute_and_shown")),
    # 2.1 add
    Row("2.1 finished", "if either was", AGGREGATES
        + at(TYPES, "test_adding_changes_nothing_else",
             "test_adding_a_choice_that_is_not_there")),
    Row("2.1 kv_transfer_params", "the newer ones, None too", AGGREGATES),
    Row("2.1 the rest", "stays as it was", at(TYPES, "test_adding_changes_nothing_else")),
    Row("2.1 aggregate", "appends text, ids and scores, takes sum and reasons over",
        AGGREGATES + at(OUTPUTS, "test_unread_deltas_merge_to_what_they_say")),
    Row("2.1 aggregate without scores", "scores out of nowhere are an AssertionError",
        at(OUTPUTS, "test_add_refuses_logprobs_out_of_nowhere")),
    Row("2.1 replace", "the newer object takes the place",
        at(OUTPUTS, "test_add_replaces_cumulative_outputs")),
    Row("2.1 new index", "is appended, either way",
        at(TYPES, "test_adding_a_choice_that_is_not_there")),
    Row("2.1 use", "deltas are aggregated to what a whole output says",
        at(PROCESSOR, "test_any_cutting_gives_the_same_text")),
    # 2.2 how outputs come about
    Row("2.2 #1 several sequences", "come under one request; best_of cuts and sorts them",
        at(OUTPUTS, "test_deltas_of_several_choices", "test_best_of")
        + at(SAMPLING, "test_the_best_are_returned")),
    Row("2.2 #2 no parameters", "is an error",
        at(TYPES, "test_params_of_another_type_are_refused")
        + at(FRONT, "test_limits_and_refusals")),
    Row("2.2 #3 final only", "nothing comes before the end", KINDS),
    Row("2.2 #4 scores", "only if asked for, and the sum with them",
        at(OUTPUTS, "test_logprobs_only_if_asked")
        + at(SAMPLING, "test_no_scores_unless_asked")),
    Row("2.2 #5 text", "what may begin a stop string is held back until that is known",
        at(PROCESSOR, "test_a1_stop_string_never_leaks", "test_any_cutting_gives_the_same_text")
        + at(STOPS, "test_only_a_proper_prefix_of_a_stop_string_is_held")),
    Row("2.2 #6 ids", "are not held back, so a delta may have ids alone",
        KINDS + at(OUTPUTS, "test_a_delta_may_have_ids_and_no_text")),
    Row("2.2 #7 scores in deltas", "those of the new tokens; None without any",
        at(OUTPUTS, "test_deltas_of_several_choices",
           "test_unread_deltas_merge_to_what_they_say")),
    Row("2.2 #8 prompt fields", "in deltas until the first tokens, else always",
        PROMPT_FIELDS + KINDS),
    Row("2.2 #9 cached tokens", "the same for all sequences", at(OUTPUTS, "test_times")),
    Row("2.2 #10 finished_time", "wall clock, at the end",
        at(OUTPUTS, "test_times") + at(ENGINES, "test_requests_arrive_now")),
    Row("2.2 #11 index", "the sequence's place in its request",
        at(OUTPUTS, "test_deltas_of_several_choices", "test_best_of")),
    Row("2.2 #12 reuse", "never: an output that is kept does not change",
        SCORED + at(ENGINES, "test_attributes_beside_the_configuration")),
    Row("2.2 while running", "cumulative and delta every step, final only nothing", KINDS),
    Row("2.2 text and ids", "all, new, all", KINDS),
    Row("2.2 scores", "all, new, all",
        SCORED + at(OUTPUTS, "test_unread_deltas_merge_to_what_they_say")
        + at(SAMPLING, "test_scores_of_outputs")),
    Row("2.2 sum", "of everything so far in each kind",
        SCORED + at(OUTPUTS, "test_deltas_of_several_choices",
                    "test_unread_deltas_merge_to_what_they_say")),
    Row("2.2 prompt", "always, first only, always", PROMPT_FIELDS + KINDS),
    # 2.3 and 2.4
    Row("2.3 fields", "two required times, seven that may be None",
        FIELDS + at(OUTPUTS, "test_request_metrics_fields")),
    Row("2.3 values", "arrival, first scheduled, first and last token, end: in this order",
        at(ENGINES, "test_requests_arrive_now") + at(OUTPUTS, "test_times")),
    Row("2.4 first delta", "carries the prompt and gathers the others",
        at(TYPES, "test_adding_changes_nothing_else")
        + at(PROCESSOR, "test_any_cutting_gives_the_same_text")),
    Row("2.4 None and None", "no scores on either side is fine",
        at(TYPES, "test_adding_no_scores_to_no_scores")),
    Row("2.4 no copies", "objects of the newer output are used as they are",
        AGGREGATES + at(OUTPUTS, "test_add_replaces_cumulative_outputs")),
    # 3 pooling
    Row("3.1 PoolingOutput", "comes later: refused by name", NO_POOLING),
    Row("3.2 PoolingRequestOutput", "comes later: refused by name", NO_POOLING),
    Row("3.2 from_seq_group", "comes later with it", NO_POOLING),
    Row("3.3 EmbeddingOutput", "comes later: refused by name", NO_POOLING),
    Row("3.3 ClassificationOutput", "comes later: refused by name", NO_POOLING),
    Row("3.3 ScoringOutput", "comes later: refused by name", NO_POOLING),
    Row("3.3 messages", "come later with them", NO_POOLING),
    Row("3.3 score path", "comes later: score is refused", NO_ENCODING),
    # 4 which call gives what
    Row("4 generate, chat", "a list of RequestOutput; the asynchronous one yields them",
        at(LLM, "test_forms_of_prompts", "test_chat")
        + at(ENGINES, "test_outputs_are_validated_where_that_is_on")
        + at(ASYNC, "test_outputs_of_each_kind")),
    Row("4 encode", "refused by name",
        NO_ENCODING + at(ASYNC, "test_coroutines_and_properties")),
    Row("4 embed", "refused by name", NO_ENCODING),
    Row("4 classify", "refused by name", NO_ENCODING),
    Row("4 score", "refused by name", NO_ENCODING),
    Row("4 beam_search", "a list of BeamSearchOutput",
        at(ENGINES, "test_fields_of_beams") + at(BEAMS, "test_against_transformers")),
    Row("4 step", "a list of RequestOutput",
        at(ENGINE, "test_steps_until_everything_is_finished")),
]  # fmt: skip

COUNTS = {
    "1": 15, "2": 15, "2.1": 8, "2.2": 17, "2.3": 2, "2.4": 3, "3.1": 1, "3.2": 2, "3.3": 5,
    "4": 7,
}  # fmt: skip
