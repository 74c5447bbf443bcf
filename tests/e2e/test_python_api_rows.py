"""Which test covers which row of the Python API that is about text generation.

Rows are those of the pages on the Python API (sections 2 to 4), the engine loop (section 2.1 and
what a caller sees of sections 3 to 10) and prompts (section 1). What is refused by name, because
its feature comes later, has a row like any other.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
LLM = "tests/frontend/test_llm.py"
ENGINE = "tests/frontend/test_llm_engine.py"
ASYNC = "tests/frontend/test_async_llm_engine.py"
BEAMS = "tests/frontend/test_beam_search.py"
FRONT = "tests/frontend/test_front_end.py"
LAYOUT = "tests/repository/test_layout.py"

ROWS = {
    # Python API, section 1: the package
    "1.1 __all__ and its order": f"{LAYOUT}::test_public_names_exist",
    "1.2 lazy attributes, the same object each time": f"{LAYOUT}::test_public_names_exist",
    "1.2 a cheap import": f"{LAYOUT}::test_cheap_imports",
    "1.2 home modules": f"{LAYOUT}::test_alias_modules",
    # section 2: LLM
    "2.1 DEPRECATE_LEGACY, deprecate_legacy_api": f"{LLM}::test_legacy_form_for_ids",
    "2.2 unknown arguments": f"{LLM}::test_arguments_of_the_constructor",
    "2.2 conversions: hf_overrides None, disable_log_stats": f"{LLM}::test_special_starts",
    "2.2 disable_log_stats absent": f"{LLM}::test_metrics",
    "2.2 skip_tokenizer_init": f"{LLM}::test_special_starts",
    "2.3 get_tokenizer, set_tokenizer": f"{LLM}::test_another_tokenizer",
    "2.3 ValueError without a tokenizer": f"{LLM}::test_special_starts",
    "2.4 get_default_sampling_params": f"{LLM}::test_default_parameters",
    "2.5 forms of prompts": f"{LLM}::test_forms_of_prompts",
    "2.5 legacy forms": f"{LLM}::test_legacy_form_for_ids",
    "2.5 guided options, adapters": f"{LLM}::test_wrong_arguments_leave_nothing_behind",
    "2.5 parameters that are left out": f"{LLM}::test_default_parameters",
    "2.5 truncation, shared and per request": f"{LLM}::test_truncation_for_all_and_for_each",
    "2.5 order of the results": f"{LLM}::test_order_and_ids",
    "2.5 no prompts at all": f"{LLM}::test_wrong_arguments_leave_nothing_behind",
    "2.6 text wins over ids; numbers must agree": f"{LLM}::test_legacy_form_for_ids",
    "2.6 empty lists": f"{LLM}::test_wrong_arguments_leave_nothing_behind",
    "2.7 a str is one prompt": f"{LLM}::test_forms_of_prompts",
    "2.8 lengths of params and priority": f"{LLM}::test_wrong_arguments_leave_nothing_behind",
    "2.8 the caller's params stay": f"{LLM}::test_the_callers_parameters_stay_as_they_are",
    "2.8 ids count up": f"{LLM}::test_order_and_ids",
    "2.8 a failure half-way": f"{LLM}::test_a_failure_while_queueing_aborts_the_call",
    "2.8 priority with its policy": f"{LLM}::test_special_starts",
    "2.9 bars: texts, totals, updates, none": f"{LLM}::test_progress_bars",
    "2.9 a request that fails": f"{LLM}::test_a_failed_request_ends_the_call_and_nothing_else",
    "2.10 one conversation, many, none": f"{LLM}::test_chat",
    "2.10 templates, tools, overrides, formats": f"{LLM}::test_chat_templates",
    "2.10 errors": f"{LLM}::test_wrong_chats",
    "2.11 the algorithm": f"{BEAMS}::test_wide_beams_find_the_best_of_all_sequences",
    "2.11 against a reference": f"{BEAMS}::test_against_transformers",
    "2.11 completed beams": f"{BEAMS}::test_completed_beams_take_no_place_and_end_nothing",
    "2.11 dropped beams": f"{BEAMS}::test_beams_without_room_or_scores_are_dropped",
    "2.11 one call for all prompts": f"{BEAMS}::test_all_prompts_go_in_one_call_and_apart",
    "2.11 score": f"{BEAMS}::test_score_is_per_token_without_the_last_eos",
    "2.11 arguments, max_logprobs, bar": f"{BEAMS}::test_arguments_of_beam_search",
    "2.12 pooling is refused": f"{LLM}::test_features_of_later_versions",
    "2.13 collective_rpc, apply_model": f"{LLM}::test_collective_rpc_and_apply_model",
    "2.13 timeout": f"{LLM}::test_a_call_that_takes_too_long",
    "2.13 profile": f"{LLM}::test_special_starts",
    "2.13 reset_prefix_cache": f"{LLM}::test_prefix_cache_reset_and_salt",
    "2.13 sleep, wake_up": f"{LLM}::test_features_of_later_versions",
    "2.13 get_metrics": f"{LLM}::test_metrics",
    # section 3: LLMEngine
    "3.1 from_engine_args, from_vllm_config": f"{ENGINE}::test_in_this_process",
    "3.1 no pickling": f"{ENGINE}::test_an_engine_cannot_be_pickled",
    "3.1 an early failure": f"{ENGINE}::test_a_start_that_fails_leaves_nothing",
    "3.1 collected with its core": f"{LLM}::test_special_starts",
    "3.2 attributes": f"{ENGINE}::test_configuration_and_state",
    "3.3 tokenizer": f"{ENGINE}::test_configuration_and_state",
    "3.4 output validation": f"{ENGINE}::test_validation_of_outputs",
    "3.5 add_request: arrival time, later changes": (
        f"{ENGINE}::test_later_changes_of_parameters_have_no_effect"
    ),
    "3.5 add_request: tokenization_kwargs": f"{ENGINE}::test_options_of_tokenization",
    "3.6 abort_request": f"{ENGINE}::test_aborted_requests_give_nothing_more",
    "3.7 step, unfinished requests": f"{ENGINE}::test_steps_until_everything_is_finished",
    "3.8 config getters, caches": f"{ENGINE}::test_configuration_and_state",
    "3.8 loggers": f"{ENGINE}::test_loggers",
    "3.8 loggers without statistics": f"{ENGINE}::test_in_this_process",
    "3.8 adapters and tracing are refused": f"{ENGINE}::test_features_of_later_versions",
    "3.8 check_health": f"{ENGINE}::test_in_this_process",
    "3.9 sleep mode is refused": f"{ENGINE}::test_features_of_later_versions",
    # section 4: AsyncLLMEngine
    "4 from_engine_args, an early failure": f"{ASYNC}::test_a_start_that_fails",
    "4 from_vllm_config, collected": f"{ASYNC}::test_a_dead_engine_core_and_a_collected_engine",
    "4.1 states": f"{ASYNC}::test_states",
    "4.1 set_errored, dead_error": f"{ASYNC}::test_a_recorded_error_ends_everything",
    "4.2 start, shut down, lazy start, another loop": f"{ASYNC}::test_states",
    "4.2 without start_engine_loop": f"{ASYNC}::test_a_recorded_error_ends_everything",
    "4.2 a bad request alone": f"{ASYNC}::test_refused_in_the_stream",
    "4.2 errors go to every stream": f"{ASYNC}::test_a_dead_engine_core_and_a_collected_engine",
    "4.3 errors at once": f"{ASYNC}::test_refused_at_once",
    "4.3 duplicate ids": f"{ASYNC}::test_an_id_in_use",
    "4.3 output kinds": f"{ASYNC}::test_outputs_of_each_kind",
    "4.3 cancellation, closing": f"{ASYNC}::test_leaving_early_aborts",
    "4.3 abort": f"{ASYNC}::test_abort_by_id",
    "4.3 add_request": f"{ASYNC}::test_a_request_runs_whether_somebody_reads_or_not",
    "4.3 a failed request": f"{ASYNC}::test_a_failed_request_fails_alone",
    "4.4 coroutines": f"{ASYNC}::test_coroutines_and_properties",
    # the engine loop
    "loop 2.1 checks and their order": f"{ENGINE}::test_refused_requests",
    "loop 2.1 duplicate ids": f"{ENGINE}::test_an_id_in_use",
    "loop 3 one request's failure": (
        f"{ENGINE}::test_a_failed_request_is_raised_by_step_and_others_are_kept"
    ),
    "loop 3 nothing to do": f"{ENGINE}::test_steps_until_everything_is_finished",
    "loop 5 records for loggers": f"{ENGINE}::test_loggers",
    "loop 5 a logger that raises": (
        f"{FRONT}::test_every_logger_gets_every_record_and_cannot_fail_a_request"
    ),
    "loop 9 outputs of aborted requests": f"{ASYNC}::test_abort_by_id",
    "loop 10 a dead engine core": f"{ENGINE}::test_in_this_process",
    # prompts
    "prompts 1.1 TextPrompt, 1.2 TokensPrompt": f"{LLM}::test_forms_of_prompts",
    "prompts 1.1 cache_salt": f"{LLM}::test_prefix_cache_reset_and_salt",
    "prompts 1.3 embeddings, media are refused": (
        f"{LLM}::test_wrong_arguments_leave_nothing_behind"
    ),
}
SECTIONS = (
    *(f"2.{number}" for number in range(1, 14)),
    *(f"3.{number}" for number in range(1, 10)),
    *(f"4.{number}" for number in range(1, 5)),
)


def test_every_row_names_a_test_that_exists() -> None:
    known: dict[str, set[str]] = {}
    for row, test in ROWS.items():
        path, _, name = test.partition("::")
        if path not in known:
            body = ast.parse((ROOT / path).read_text()).body
            known[path] = {node.name for node in body if isinstance(node, ast.FunctionDef)}
        assert name in known[path], f"{row}: there is no {test}"


@pytest.mark.parametrize("section", SECTIONS)
def test_every_section_has_rows(section: str) -> None:
    assert any(row.startswith(f"{section} ") for row in ROWS)
