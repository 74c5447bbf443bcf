#!/usr/bin/env bash
# Cross-compiles the native kernels for 64-bit Arm and checks them in an emulator, against scalar code
# and against what the library built for this machine gives with AVX2. Where a tool is missing, it
# says `skipped` and why. usage: scripts/kernels_aarch64.sh
set -euo pipefail
cd "$(dirname "$0")/.."
python="${VENV:-.venv}/bin/python"
folder="build/aarch64"
native="kernels/native"
library="$PWD/$folder/lib/headrace/$native"

for tool in aarch64-linux-gnu-gcc aarch64-linux-gnu-g++ qemu-aarch64; do
    if ! command -v "$tool" > /dev/null; then
        echo "skipped: there is no $tool (in Debian: apt-get install g++-aarch64-linux-gnu qemu-user)"
        exit 0
    fi
done
export QEMU_LD_PREFIX="${QEMU_LD_PREFIX:-/usr/aarch64-linux-gnu}"
unset CFLAGS CXXFLAGS CPPFLAGS LDFLAGS  # which are for this machine
mkdir -p "$folder"

check() { # COMPILER OUTPUT FOLDER_OF_THE_LIBRARY
    "$1" -std=c++17 -O1 -ffp-contract=off -Wall -Wextra -Werror -I"$native" \
        tests/kernels/aarch64/check.cpp -o "$2" "$3/libheadrace_kernels.so" -Wl,-rpath,"$3" -pthread
}

_PYTHON_HOST_PLATFORM=linux-aarch64 CC=aarch64-linux-gnu-gcc CXX=aarch64-linux-gnu-g++ \
    "$python" setup.py -q build_ext --build-lib "$folder/lib" --build-temp "$folder/temp"
check aarch64-linux-gnu-g++ "$folder/check" "$library"

how=(alone)
if [ -e "$native/libheadrace_kernels.so" ] && grep -qw avx2 /proc/cpuinfo; then
    check "${CXX:-g++}" "$folder/check_here" "$PWD/$native"
    "$folder/check_here" avx2 write "$folder/avx2.bin"
    how=(compare "$folder/avx2.bin")
else
    echo "there is no library for AVX2 here: scalar code alone is the judge"
fi

# The oldest processors have no dot products: the library must load there, and say so.
status=0
reason="$(qemu-aarch64 -cpu cortex-a53 "$folder/check" neondotprod alone)" || status=$?
echo "$reason"
[ "$status" = 3 ]
qemu-aarch64 -cpu cortex-a53 "$folder/check" neon "${how[@]}" &
first=$!
qemu-aarch64 -cpu max "$folder/check" neondotprod "${how[@]}"
wait "$first"
