"""The API contract: sampling parameters. Which tests show which row."""

from tests.compat.rows import (
    ADMISSION,
    BEAMS,
    DETOKENIZER,
    DRAWS,
    EDITS,
    ENGINES,
    LAYOUT,
    OUTPUTS,
    PARAMS,
    PROCESSOR,
    PROMPT_SCORES,
    SAMPLER,
    SAMPLING,
    SCHEDULER,
    TYPES,
    Row,
    at,
)

FIELDS = at(PARAMS, "test_fields_and_defaults")
CHECKS = at(PARAMS, "test_validation", "test_the_first_failing_check_wins")
FIRST_WINS = at(PARAMS, "test_the_first_failing_check_wins")
SMALL = at(PARAMS, "test_small_normalisations")
CALLER = at(SAMPLING, "test_no_field_of_the_caller_changes")
FILTERS = at(SAMPLING, "test_filters_keep_the_likely_tokens", "test_zero_and_minus_one_keep_all")
GUIDED_FIELDS = at(TYPES, "test_fields_of_guided_decoding")
NO_POOLING = at(TYPES, "test_names_of_later_versions") + at(LAYOUT, "test_public_names_exist")
BEAM_FIELDS = at(TYPES, "test_fields_of_beam_search")
GUIDED_REFUSED = at(TYPES, "test_guided_decoding_is_refused_and_stays_as_it_was")
PROCESSORS_REFUSED = at(TYPES, "test_logits_processors_are_refused_by_name")

ROWS: list[Row] = [
    Row("1 struct", "keywords or places, defaults left out of messages, attributes may be added",
        at(PARAMS, "test_omitted_defaults_are_not_serialised", "test_survives_the_wire")
        + at(TYPES, "test_construction_by_keyword_and_by_place")),
    # 1.1 the fields
    Row("1.1 #1 n", "that many sequences, which differ, come back in the order of their index",
        FIELDS + at(SAMPLING, "test_seeds_and_choices")),
    Row("1.1 #2 best_of", "of so many sequences the n with the largest sum of scores come back",
        FIELDS + at(SAMPLING, "test_the_best_are_returned") + at(OUTPUTS, "test_best_of")),
    Row("1.1 #3 _real_n", "remembers n as it was given",
        FIELDS + at(PARAMS, "test_best_of_becomes_n")),
    Row("1.1 #4 presence_penalty", "takes one amount off every token that was generated",
        FIELDS + at(SAMPLING, "test_penalties_bias_and_allowed_ids")
        + at(EDITS, "test_repetition_counts_the_prompt_and_the_other_penalties_do_not")),
    Row("1.1 #5 frequency_penalty", "takes an amount off for every time that it was generated",
        FIELDS + at(SAMPLING, "test_penalties_bias_and_allowed_ids")
        + at(EDITS, "test_edits_equal_brute_force")),
    Row("1.1 #6 repetition_penalty", "divides or multiplies by sign, for the prompt's tokens too",
        FIELDS + at(SAMPLING, "test_penalties_bias_and_allowed_ids")
        + at(EDITS, "test_repetition_counts_the_prompt_and_the_other_penalties_do_not")),
    Row("1.1 #7 temperature", "divides the scores; 0 always takes the best token",
        FIELDS + at(DRAWS, "test_draws_follow_the_float64_softmax")
        + at(SAMPLING, "test_what_leaves_one_token_is_greedy")),
    Row("1.1 #8 top_p", "keeps the likeliest tokens up to that mass; 1 keeps all",
        FIELDS + FILTERS
        + at(DRAWS, "test_draws_follow_the_float64_softmax")),
    Row("1.1 #9 top_k", "keeps that many; 0 and -1 keep all",
        FIELDS + FILTERS
        + at(SAMPLER, "test_top_k_keeps_ties_at_the_kth_score")),
    Row("1.1 #10 min_p", "drops what is less likely than that share of the best; 0 drops nothing",
        FIELDS + FILTERS
        + at(DRAWS, "test_draws_follow_the_float64_softmax")),
    Row("1.1 #11 seed", "the same sequence each time; -1 and None are fresh each time",
        FIELDS + at(SAMPLING, "test_seeds_and_choices") + at(ADMISSION, "test_seeds")),
    Row("1.1 #12 stop", "one string or several end a sequence and are left out of its text",
        FIELDS + at(SAMPLING, "test_stop_strings")),
    Row("1.1 #13 stop_token_ids", "end a sequence; the id stays, its text does not",
        FIELDS + at(SAMPLING, "test_stop_tokens") + at(OUTPUTS, "test_pp30_text_of_a_stop_token")),
    Row("1.1 #14 ignore_eos", "goes on past the end of text, but not past the caller's stop tokens",
        FIELDS + at(SAMPLING, "test_the_end_of_text") + at(SCHEDULER, "test_stop_conditions")),
    Row("1.1 #15 max_tokens", "16; None fills the window",
        FIELDS + at(SAMPLING, "test_a_limit_of_tokens")),
    Row("1.1 #16 min_tokens", "before so many tokens nothing ends a sequence",
        FIELDS + at(SAMPLING, "test_the_end_of_text", "test_stop_strings")
        + at(SAMPLER, "test_min_tokens_masks_all_stop_tokens")),
    Row("1.1 #17 logprobs", "scores of the sampled token and of the best k; 0 means it alone",
        FIELDS + at(SAMPLING, "test_scores_of_outputs", "test_no_scores_unless_asked")),
    Row("1.1 #18 prompt_logprobs", "the same for the tokens of the prompt",
        FIELDS + at(SAMPLING, "test_scores_of_prompts")
        + at(PROMPT_SCORES, "test_scores_equal_those_of_transformers")),
    Row("1.1 #19 detokenize", "False gives ids and no text",
        FIELDS + at(SAMPLING, "test_without_text")),
    Row("1.1 #20 skip_special_tokens", "False writes special tokens out",
        FIELDS + at(SAMPLING, "test_the_end_of_text")
        + at(DETOKENIZER, "test_special_tokens_are_left_out_or_kept")),
    Row("1.1 #21 spaces_between_special_tokens", "no spaces either way, like fast tokenizers",
        FIELDS + at(DETOKENIZER, "test_spaces_between_special_tokens_as_in_transformers")
        + at(SAMPLING, "test_the_end_of_text")),
    Row("1.1 #22 logits_processors", "refused by name", FIELDS + PROCESSORS_REFUSED),
    Row("1.1 #23 include_stop_str_in_output", "keeps the stop string, or a stop token's text",
        FIELDS + at(SAMPLING, "test_stop_strings", "test_stop_tokens")),
    Row("1.1 #24 truncate_prompt_tokens", "keeps the last tokens of the prompt",
        FIELDS + at(SAMPLING, "test_cut_prompts_keep_their_end")),
    Row("1.1 #25 output_kind", "cumulative unless another kind is asked for",
        FIELDS + at(PROCESSOR, "test_delta_and_cumulative_and_final")),
    Row("1.1 #26 output_text_buffer_length", "one less than the longest stop string",
        FIELDS + at(PARAMS, "test_text_buffer_length")),
    Row("1.1 #27 _all_stop_token_ids", "a set of its own in every instance",
        FIELDS + at(PARAMS, "test_all_stop_token_ids")),
    Row("1.1 #28 guided_decoding", "refused by name", FIELDS + GUIDED_REFUSED),
    Row("1.1 #29 logit_bias", "is added to the scores of its tokens",
        FIELDS + at(SAMPLING, "test_penalties_bias_and_allowed_ids")
        + at(DRAWS, "test_draws_follow_the_float64_softmax")),
    Row("1.1 #30 allowed_token_ids", "nothing else is sampled",
        FIELDS + at(SAMPLING, "test_penalties_bias_and_allowed_ids")),
    Row("1.1 #31 extra_args", "anything may be in it, nothing is done with it", FIELDS + CALLER),
    Row("1.1 #32 bad_words", "are not written", FIELDS + at(SAMPLING, "test_bad_words")),
    Row("1.1 #33 _bad_words_token_ids", "None until a tokenizer was there",
        FIELDS + at(PARAMS, "test_bad_words", "test_bad_words_that_cannot_be")),
    Row("1.1 note", "truncate_prompt_tokens=-1 is refused here", at(PARAMS, "test_validation")),
    # 1.2 what construction changes, in order
    Row("1.2 #1 best_of", "takes the place of n, which is remembered; 0 is refused",
        at(PARAMS, "test_best_of_becomes_n", "test_validation")),
    Row("1.2 #2 temperature", "below 1e-5 greedy, above it used as given",
        at(PARAMS, "test_temperatures_are_used_as_given")
        + at(SAMPLER, "test_pp27_temperature_sweep")),
    Row("1.2 #3 seed", "-1 is None", SMALL),
    Row("1.2 #4 stop", "None is an empty list, a string a list of one", FIELDS + SMALL),
    Row("1.2 #5 lists", "stop_token_ids and bad_words are empty lists for None", FIELDS),
    Row("1.2 #6 logprobs", "True is 1, False is 0, for both kinds", SMALL),
    Row("1.2 #7 buffer", "only for stop strings that are left out",
        at(PARAMS, "test_text_buffer_length")),
    Row("1.2 #8 order", "every check comes after these changes", CHECKS),
    Row("1.2 #9 greedy", "clears the filters, keeps penalties, seed and bias, refuses n above 1",
        at(PARAMS, "test_greedy_clears_what_only_sampling_uses")),
    Row("1.2 #10 stop tokens", "join the set of all stops", at(PARAMS, "test_all_stop_token_ids")),
    Row("1.2 note", "a list with an empty stop string is refused", at(PARAMS, "test_validation")),
    # 1.3 checks
    Row("1.3 #1", "n is an int", CHECKS),
    Row("1.3 #2", "n is at least 1", CHECKS),
    Row("1.3 #3", "best_of is an int, at least 1, and at least n", at(PARAMS, "test_validation")),
    Row("1.3 #4", "presence_penalty lies in [-2, 2]", CHECKS),
    Row("1.3 #5", "frequency_penalty lies in [-2, 2]", CHECKS),
    Row("1.3 #6", "repetition_penalty is above 0 and has no upper bound",
        CHECKS + at(PARAMS, "test_what_is_accepted")),
    Row("1.3 #7", "temperature is at least 0", CHECKS),
    Row("1.3 #8", "top_p lies in (0, 1]", CHECKS),
    Row("1.3 #9", "top_k is at least -1", CHECKS),
    Row("1.3 #10", "top_k is an int, else a TypeError after the range", CHECKS),
    Row("1.3 #11", "min_p lies in [0, 1]", CHECKS),
    Row("1.3 #12", "max_tokens is None or at least 1",
        CHECKS + at(PARAMS, "test_what_is_accepted")),
    Row("1.3 #13", "min_tokens is at least 0", CHECKS),
    Row("1.3 #14", "min_tokens is at most max_tokens, if that is given",
        CHECKS + at(PARAMS, "test_what_is_accepted")),
    Row("1.3 #15", "logprobs is at least 0, or -1 for the whole vocabulary",
        CHECKS + at(PARAMS, "test_what_is_accepted") + at(ADMISSION, "test_number_of_logprobs")),
    Row("1.3 #16", "prompt_logprobs likewise",
        CHECKS + at(PARAMS, "test_what_is_accepted") + at(ADMISSION, "test_number_of_logprobs")),
    Row("1.3 #17", "truncate_prompt_tokens is at least 1", CHECKS),
    Row("1.3 #18", "stop_token_ids is a list, else an AssertionError", CHECKS),
    Row("1.3 #19", "every one of them is an int", CHECKS),
    Row("1.3 #20", "stop is a list or a string, else an AssertionError", CHECKS),
    Row("1.3 #21", "no stop string is empty", CHECKS),
    Row("1.3 #22", "stop strings need text", CHECKS),
    Row("1.3 #23", "best_of above n cannot be streamed in deltas",
        at(PARAMS, "test_validation", "test_what_is_accepted")),
    Row("1.3 NaN", "is refused everywhere",
        at(PARAMS, "test_validation", "test_what_is_constructed_is_sane")),
    Row("1.3 later", "more scores than max_logprobs are refused at admission",
        at(ADMISSION, "test_number_of_logprobs")),
    Row("1.3 elsewhere", "ids are checked against the vocabulary and bad words by the tokenizer",
        at(ADMISSION, "test_ranges", "test_blank_bad_words")),
    # 1.4 from_optional
    Row("1.4 parameters", "the 29 public fields with the same defaults",
        at(PARAMS, "test_from_optional_has_the_public_parameters")),
    Row("1.4 None", "stands for the default of six of them",
        at(PARAMS, "test_from_optional_replaces_none")),
    Row("1.4 passed on", "the others are taken as they are",
        at(PARAMS, "test_from_optional_replaces_none")),
    Row("1.4 keys of logit_bias", "may be strings that spell an int",
        at(PARAMS, "test_from_optional_reads_bias_keys")),
    Row("1.4 values of logit_bias", "are clamped to [-100, 100], here and everywhere",
        at(PARAMS, "test_from_optional_reads_bias_keys",
           "test_logit_bias_is_clamped_and_the_callers_dict_left_alone")),
    # 1.5 update_from_generation_config
    Row("1.5 copy", "works on a copy of the engine's own",
        CALLER + at(ADMISSION, "test_eos_set_is_a_union")),
    Row("1.5 #1", "the primary end token joins the set of all stops, with ignore_eos too",
        at(PARAMS, "test_update_from_generation_config")),
    Row("1.5 #2", "the file's end tokens, one or a list, without the primary one",
        at(PARAMS, "test_update_from_generation_config")),
    Row("1.5 #3", "join all stops, and the stop tokens unless ignore_eos",
        at(PARAMS, "test_update_from_generation_config")),
    Row("1.5 effect", "only they give a stop reason; the primary one gives none",
        at(SCHEDULER, "test_stop_conditions") + at(SAMPLING, "test_the_end_of_text")),
    # 1.6 update_from_tokenizer
    Row("1.6 none", "nothing happens without bad words",
        at(PARAMS, "test_bad_words_that_cannot_be")),
    Row("1.6 variants", "each word, without leading spaces, alone and behind one space",
        at(PARAMS, "test_bad_words")),
    Row("1.6 alone", "is always recorded", at(PARAMS, "test_bad_words")),
    Row("1.6 behind a space", "only with the same length and another first token",
        at(PARAMS, "test_bad_words")),
    Row("1.6 range", "ids outside the vocabulary are refused with the numbers",
        at(PARAMS, "test_bad_words_that_cannot_be")),
    Row("1.6 effect", "bans the last token, right after the ones before it",
        at(SAMPLING, "test_bad_words")
        + at(EDITS, "test_only_the_last_token_of_a_bad_word_is_banned_after_the_others")),
    Row("1.6 blank", "words without tokens are refused",
        at(PARAMS, "test_bad_words_that_cannot_be") + at(ADMISSION, "test_blank_bad_words")),
    # 1.7 other members
    Row("1.7 sampling_type", "is worked out once, from temperature and seed",
        at(TYPES, "test_sampling_type", "test_values_of_enums")
        + at(PARAMS, "test_sampling_type_is_remembered")),
    Row("1.7 all_stop_token_ids", "shows the inner set", at(PARAMS, "test_all_stop_token_ids")),
    Row("1.7 bad_words_token_ids", "shows the inner list, or None", at(PARAMS, "test_bad_words")),
    Row("1.7 clone", "copies all but logits processors, which are shared or cloned",
        at(PARAMS, "test_clone")),
    Row("1.7 repr", "lists 23 fields in order and not the others", at(PARAMS, "test_repr")),
    # 1.8 what the engine makes of them
    Row("1.8 guided decoding", "is refused; the caller's object stays as it was", GUIDED_REFUSED),
    Row("1.8 bias and allowed ids", "change nothing in the caller's object", CALLER),
    Row("1.8 bad words", "stay in the caller's object", CALLER),
    Row("1.8 own processors", "are refused, so none come after them", PROCESSORS_REFUSED),
    Row("1.8 vocabulary", "ids outside it and an empty allowed list are refused",
        at(ADMISSION, "test_ranges") + at(EDITS, "test_ids_outside_the_vocabulary_are_refused")),
    # 2 output kinds
    Row("2 CUMULATIVE", "0: everything so far",
        at(TYPES, "test_values_of_enums") + at(PROCESSOR, "test_delta_and_cumulative_and_final")),
    Row("2 DELTA", "1: only what is new",
        at(TYPES, "test_values_of_enums") + at(PROCESSOR, "test_delta_and_cumulative_and_final")),
    Row("2 FINAL_ONLY", "2: one output, at the end",
        at(TYPES, "test_values_of_enums") + at(PROCESSOR, "test_delta_and_cumulative_and_final")),
    Row("2 LLM", "always gives the final output",
        at("tests/frontend/test_llm.py", "test_the_callers_parameters_stay_as_they_are")),
    Row("2 pooling", "its parameters do not exist yet", NO_POOLING),
    # 3 guided decoding parameters
    *(Row(f"3 {name}", "a field with that default, refused when it is used",
          GUIDED_FIELDS + GUIDED_REFUSED)
      for name in ("json", "regex", "choice", "grammar", "json_object", "backend",
                   "backend_was_auto", "disable_fallback", "disable_any_whitespace",
                   "disable_additional_properties", "whitespace_pattern", "structural_tag")),
    Row("3 one constraint", "two are refused; a structural tag does not count",
        at(PARAMS, "test_guided_decoding_params")),
    Row("3 from_optional", "None without a constraint; a pydantic model becomes its schema",
        at(PARAMS, "test_guided_decoding_params", "test_guided_decoding_takes_pydantic_models")),
    # 4 pooling parameters
    *(Row(f"4 {name}", "pooling comes later: its parameters are refused by name", NO_POOLING)
      for name in ("dimensions", "use_cross_encoder", "additional_data", "output_kind",
                   "verify #1", "verify #2", "verify #3", "verify #4", "Matryoshka models",
                   "clone", "repr")),
    # 5 beam search parameters
    Row("5 beam_width", "required, at least 1",
        BEAM_FIELDS + at(PARAMS, "test_beam_search_params")),
    Row("5 max_tokens", "required, at least 0",
        BEAM_FIELDS + at(PARAMS, "test_beam_search_params")),
    Row("5 ignore_eos", "False", BEAM_FIELDS
        + at(BEAMS, "test_completed_beams_take_no_place_and_end_nothing")),
    Row("5 temperature", "0.0", BEAM_FIELDS + at(ENGINES, "test_steps_of_a_beam_search")),
    Row("5 length_penalty", "1.0", BEAM_FIELDS
        + at(BEAMS, "test_score_is_per_token_without_the_last_eos")),
    Row("5 checks", "values that cannot work are refused", at(PARAMS, "test_beam_search_params")),
    Row("5 use", "the search reads these five",
        at(BEAMS, "test_against_transformers", "test_arguments_of_beam_search")),
]  # fmt: skip

COUNTS = {
    "1": 1, "1.1": 34, "1.2": 11, "1.3": 26, "1.4": 5, "1.5": 5, "1.6": 7, "1.7": 5, "1.8": 5,
    "2": 5, "3": 14, "4": 11, "5": 7,
}  # fmt: skip
