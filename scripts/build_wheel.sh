#!/usr/bin/env bash
# Builds the sdist and, from it, the wheel. usage: scripts/build_wheel.sh [FOLDER, dist by default]
set -euo pipefail
cd "$(dirname "$0")/.."
python="$(realpath -s "${VENV:-.venv}/bin/python")"
mkdir -p "${1:-dist}"
folder="$(realpath "${1:-dist}")"

"$python" -c 'import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])' \
    "$folder" > /dev/null
sdist="$(ls -t "$folder"/headrace-*.tar.gz | head -n 1)"
"$python" -m pip --disable-pip-version-check wheel -q --no-deps --no-build-isolation \
    --no-cache-dir -w "$folder" "$sdist"
ls -t "$folder"/headrace-*.whl | head -n 1
