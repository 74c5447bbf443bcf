"""Every row of the Python API that is about text generation, page by page, with its tests.

A row is a row of a table, a numbered step, or a bullet of the page. What belongs to a feature of
later versions has its row, too, with the test that shows how it is refused.
"""

from tests.compat import (
    engine_rows,
    llm_rows,
    loop_rows,
    output_rows,
    robustness_rows,
    sampling_params_rows,
)
from tests.compat.rows import Row

# page -> its rows, and how many there are in each section, typed by hand
PAGES: dict[str, tuple[list[Row], dict[str, int]]] = {
    "sampling parameters": (sampling_params_rows.ROWS, sampling_params_rows.COUNTS),
    "outputs": (output_rows.ROWS, output_rows.COUNTS),
    "Python API": (
        [*llm_rows.ROWS, *engine_rows.ROWS],
        {**llm_rows.COUNTS, **engine_rows.COUNTS},
    ),
    "engine loop and prompts": (loop_rows.ROWS, loop_rows.COUNTS),
    "robustness": (robustness_rows.ROWS, robustness_rows.COUNTS),
}
NUM_ROWS = {
    "sampling parameters": 136, "outputs": 75, "Python API": 272, "engine loop and prompts": 16,
    "robustness": 77,
}  # fmt: skip
