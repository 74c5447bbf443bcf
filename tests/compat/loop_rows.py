"""The API contract: what a caller sees of the engine loop, and prompts. Which tests show which row.

Of these two pages, what a caller of the Python API sees; the rest is looked at elsewhere.
"""

from tests.compat.rows import (
    ADMISSION,
    ASYNC,
    ENGINE,
    ENGINES,
    FRONT,
    LLM,
    RENDERER,
    SAMPLING,
    SCHEDULER,
    STOPS,
    Row,
    at,
)

ROWS: list[Row] = [
    Row("loop 2.1 checks", "come in the documented order", at(ENGINE, "test_refused_requests")),
    Row("loop 2.1 duplicate ids", "are a ValueError", at(ENGINE, "test_an_id_in_use")),
    Row("loop 2.1 lengths", "a prompt of exactly the window is refused",
        at(ADMISSION, "test_window") + at(ENGINE, "test_refused_requests")),
    Row("loop 2.3 copies", "later changes of the caller's object have no effect",
        at(ENGINE, "test_later_changes_of_parameters_have_no_effect")),
    Row("loop 3 one request's failure", "is raised by step(); the others go on",
        at(ENGINE, "test_a_failed_request_is_raised_by_step_and_others_are_kept")),
    Row("loop 3 nothing to do", "is an empty list",
        at(ENGINE, "test_steps_until_everything_is_finished")),
    Row("loop 4 stop conditions", "in the documented order; min_tokens before them all",
        at(SCHEDULER, "test_stop_conditions")
        + at(SAMPLING, "test_stop_strings", "test_stop_tokens", "test_the_end_of_text")),
    Row("loop 4 stop strings", "the match that ends first wins",
        at(STOPS, "test_which_match_wins", "test_every_cutting_gives_the_defined_text")),
    Row("loop 5 records", "go to every logger", at(ENGINE, "test_loggers")),
    Row("loop 5 a logger that raises", "ends no request",
        at(FRONT, "test_every_logger_gets_every_record_and_cannot_fail_a_request")),
    Row("loop 9 aborts", "give no more outputs", at(ASYNC, "test_abort_by_id")),
    Row("loop 10 a dead engine core", "is an error for every request",
        at(ENGINE, "test_in_this_process")),
    Row("prompts 1.1 and 1.2", "texts and ids, as themselves and in dicts",
        at(LLM, "test_forms_of_prompts") + at(RENDERER, "test_forms_of_prompts")),
    Row("prompts 1.1 cache_salt", "separates cached prefixes",
        at(LLM, "test_prefix_cache_reset_and_salt")),
    Row("prompts 1.3 and 1.4", "embeddings, media and encoder prompts are refused by name",
        at(LLM, "test_wrong_arguments_leave_nothing_behind") + at(RENDERER, "test_bad_prompts")
        + at(ENGINES, "test_prompts_of_a_beam_search_have_no_media")),
    Row("prompts 1.6", "empty, too long, outside the vocabulary: ValueError",
        at(ENGINE, "test_refused_requests") + at(ADMISSION, "test_bad_prompt_ids")),
]  # fmt: skip

COUNTS = {"loop": 12, "prompts": 4}
