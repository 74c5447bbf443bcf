"""A row of a contract, and where its tests are."""

from typing import NamedTuple


class Row(NamedTuple):
    """One row: its place on its page (`section number name`), what holds, the tests that show it.

    `tests` are node ids without parameters.
    """

    id: str
    holds: str
    tests: list[str]

    @property
    def section(self) -> str:
        return self.id.split(" ", 1)[0]


def at(path: str, *names: str) -> list[str]:
    """Node ids of tests in one file."""
    return [f"{path}::{name}" for name in names]


PARAMS = "tests/configs/test_sampling_params.py"
SOURCES = "tests/configs/test_sampling_sources.py"
ARGS = "tests/configs/test_engine_args.py"
MODEL_INFO = "tests/configs/test_model_info.py"
HUB = "tests/configs/test_hub.py"
SAMPLER = "tests/workers/test_sampler.py"
EDITS = "tests/workers/test_sampler_edits.py"
DRAWS = "tests/workers/test_sampler_distribution.py"
SCORES = "tests/workers/test_sampler_logprobs.py"
WORKER = "tests/workers/test_worker.py"
RUNNER = "tests/workers/test_model_runner.py"
SCHEDULER = "tests/engine_core/test_scheduler.py"
REPORTS = "tests/engine_core/test_scheduler_reports.py"
CACHE = "tests/engine_core/test_kv_cache_manager.py"
CLIENT = "tests/engine_core/test_client.py"
MAINTENANCE = "tests/engine_core/test_maintenance.py"
UPDATES = "tests/faults/test_weight_updates.py"
LIVE_WEIGHTS = "tests/workers/test_live_weights.py"
REMOTE = "tests/executors/test_worker_calls.py"
UNIPROC = "tests/executors/test_uniproc.py"
ADMISSION = "tests/frontend/test_admission.py"
OUTPUTS = "tests/frontend/test_outputs.py"
PROCESSOR = "tests/frontend/test_output_processor.py"
STREAM = "tests/frontend/test_output_stream.py"
STOPS = "tests/frontend/test_stop_strings.py"
DETOKENIZER = "tests/frontend/test_detokenizer.py"
RENDERER = "tests/frontend/test_renderer.py"
TEMPLATES = "tests/frontend/test_chat_template.py"
COST = "tests/frontend/test_linear_cost.py"
FRONT = "tests/frontend/test_front_end.py"
PROMETHEUS = "tests/frontend/test_prometheus_logger.py"
CLI = "tests/frontend/test_cli_arguments.py"
LLM = "tests/frontend/test_llm.py"
ENGINE = "tests/frontend/test_llm_engine.py"
ASYNC = "tests/frontend/test_async_llm_engine.py"
BEAMS = "tests/frontend/test_beam_search.py"
HTTP = "tests/frontend/http"
BENCH = "tests/frontend/bench"
REAL_LLM = "tests/e2e/test_llm.py"
CASES = "tests/e2e/test_http_cases.py"
CONSERVATION = "tests/e2e/test_conservation.py"
INVARIANCE = "tests/e2e/test_invariance.py"
PROMPT_SCORES = "tests/e2e/test_prompt_logprobs.py"
STATES = "tests/e2e/test_state_machine.py"
LAYOUT = "tests/repository/test_layout.py"
SAMPLING = "tests/compat/test_sampling.py"
TYPES = "tests/compat/test_types.py"
SIGNATURES = "tests/compat/test_signatures.py"
ENGINES = "tests/compat/test_engines.py"
