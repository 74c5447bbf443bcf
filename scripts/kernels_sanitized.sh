#!/usr/bin/env bash
# Tests of the native kernels with the address and undefined-behaviour sanitizers, on a copy of the
# package built for it. usage: scripts/kernels_sanitized.sh [PYTEST ARGUMENTS]
set -euo pipefail
cd "$(dirname "$0")/.."
bin="${VENV:-.venv}/bin"
copy="build/sanitized"

rm -rf "$copy"
mkdir -p "$copy/source"
cp -r pyproject.toml setup.py README.md LICENSE configs kernels workers executors engine_core \
    frontend headrace "$copy/source"
find "$copy/source" -name '*.so' -delete
flags="-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g"
CFLAGS="$flags" CXXFLAGS="$flags" LDFLAGS="-fsanitize=address,undefined" \
    "$bin/python" -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation \
    --target "$copy/package" "$copy/source"
test -e "$copy/package/headrace/kernels/native/libheadrace_kernels.so"

# Python itself never gives all its memory back. Exceptions need the C++ library from the beginning.
# Tests build copies of the library: with these flags.
CXXFLAGS="$flags" LDFLAGS="-fsanitize=address,undefined" \
    ASAN_OPTIONS=detect_leaks=0 \
    LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libstdc++.so)" \
    PYTHONPATH="$PWD/$copy/package" OMP_NUM_THREADS=1 \
    "$bin/pytest" -q -p no:cacheprovider --timeout 1800 -m "not slow" \
    tests/kernels/test_native_argmax.py tests/kernels/test_native_logprobs.py \
    tests/kernels/test_native_sampling.py tests/kernels/test_native_choice.py \
    tests/kernels/test_native_rows.py tests/kernels/test_native_amx.py \
    tests/kernels/test_native_amx_attention.py tests/kernels/test_native_attention.py \
    tests/kernels/test_native_products.py tests/kernels/test_native_quantized.py \
    tests/kernels/test_native_shards.py tests/workers/test_native_decoder.py "$@"
