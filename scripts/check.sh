#!/usr/bin/env bash
# Every check, cheap ones first. Stops at the first kind that fails.
set -euo pipefail
cd "$(dirname "$0")/.."
bin="${VENV:-.venv}/bin"

"$bin/ruff" check .
"$bin/ruff" format --check .

# mypy does not see the package mapping of an editable install: it checks an installed copy.
rm -rf build/types
# No types are in its kernels: their build, which is optional, fails at once.
CC=false CXX=false "$bin/python" -m pip install -q --disable-pip-version-check --no-deps \
    --no-build-isolation --target build/types .
cache="$PWD/.mypy_cache"
(cd build/types && "$OLDPWD/$bin/mypy" --config-file "$OLDPWD/pyproject.toml" \
    --cache-dir "$cache" -p headrace) > build/mypy.log 2>&1 &
mypy=$!
trap 'kill "$mypy" 2>/dev/null || true' EXIT

"$bin/pytest" -q -m "not slow"
trap - EXIT
if ! wait "$mypy"; then
    cat build/mypy.log
    exit 1
fi
tail -n 1 build/mypy.log
"$bin/pytest" -q -m slow
