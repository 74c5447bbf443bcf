#!/usr/bin/env bash
# Tests of answers without the native library, on a copy of the package that was installed from
# source without a compiler. usage: scripts/check_without_kernels.sh [PYTEST ARGUMENTS]
set -euo pipefail
cd "$(dirname "$0")/.."
bin="${VENV:-.venv}/bin"
copy="build/without_kernels"

rm -rf "$copy"
mkdir -p "$copy/source"
cp -r pyproject.toml setup.py README.md LICENSE configs kernels workers executors engine_core \
    frontend headrace "$copy/source"
find "$copy/source" -name '*.so' -delete
CC=false CXX=false "$bin/python" -m pip install -q --disable-pip-version-check --no-deps \
    --no-build-isolation --target "$copy/package" "$copy/source"
if find "$copy/package" -name '*.so' | grep -q .; then
    echo "a library was built without a compiler" >&2
    exit 1
fi

PYTHONPATH="$PWD/$copy/package" "$bin/pytest" -q -p no:cacheprovider tests/kernels tests/workers \
    tests/e2e tests/compat tests/frontend/test_llm.py tests/frontend/test_llm_engine.py \
    tests/frontend/test_async_llm_engine.py tests/frontend/test_beam_search.py "$@"
