#!/usr/bin/env bash
# Runs tests on Linux on ARM, in an emulated process on any Debian or Ubuntu on x86-64:
#   tests/on_arm.sh                        the folders that tests/README.md lists
#   tests/on_arm.sh tests/formats -x -q    what pytest is given
#   tests/on_arm.sh --python -c '...'      Python itself
# It needs, as root:
#   dpkg --add-architecture arm64 && apt-get update && apt-get install qemu-user-static g++-aarch64-linux-gnu
# and keeps ARM's packages (300 MB from Debian and the package index) in build/arm, or ARM_FOLDER.
# ARM_CPU chooses another of `qemu-aarch64-static -cpu help`, as cortex-a53.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$(realpath -m "${ARM_FOLDER:-build/arm}") root=$folder/root site=$folder/site-packages bin=$folder/bin
python=python3.11
missing() {
  echo "on_arm.sh: $1; as root: dpkg --add-architecture arm64 && apt-get update &&" \
    "apt-get install qemu-user-static g++-aarch64-linux-gnu" >&2
  exit 3
}
command -v qemu-aarch64-static >/dev/null || missing "there is no qemu-aarch64-static"
command -v aarch64-linux-gnu-g++ >/dev/null || missing "there is no aarch64-linux-gnu-g++"

if [ ! -e "$folder/.system" ]; then
  apt-cache show "$python:arm64" >/dev/null 2>&1 || missing "apt has no $python:arm64"
  mkdir -p "$folder/packages" "$root"
  no=(recommends suggests conflicts breaks replaces enhances)
  needed=$(apt-cache depends --recurse "${no[@]/#/--no-}" \
    "$python:arm64" libgomp1:arm64 libstdc++6:arm64 | grep '^[a-z].*:arm64$' |
    grep -Ev '^(dpkg|tar|perl)' | sort -u)
  # shellcheck disable=SC2086
  (cd "$folder/packages" && apt-get download -q $needed)
  for package in "$folder"/packages/*.deb; do dpkg -x "$package" "$root"; done
  python3 -m venv "$folder/uv" && "$folder/uv/bin/pip" install -q uv
  touch "$folder/.system"
fi

# What a process starts by the name `python3` or as sys.executable, and links with, is ARM's, too.
mkdir -p "$bin"
cat >"$bin/python3" <<END
#!/bin/sh
exec qemu-aarch64-static -L '$root' '$root/usr/bin/$python' "\$@"
END
chmod +x "$bin/python3"
for tool in g++ ld; do ln -sf "$(command -v "aarch64-linux-gnu-$tool")" "$bin/$tool"; done
printf '%s\n' "$site" "import sys; sys.executable = '$bin/python3'" \
  >"$root/usr/lib/python3/dist-packages/on_arm.pth"
native=$(PATH=$PWD/.venv/bin:$PATH command -v python3)
export QEMU_CPU=${ARM_CPU:-neoverse-n1} PATH=$bin:$PATH PYTHONNOUSERSITE=1
# Emulated, Python takes minutes to compile its modules.
export PYTHONPYCACHEPREFIX=$folder/pycache
unset PYTHONDONTWRITEBYTECODE

if [ ! -e "$folder/.site" ] || [ constraints.txt -nt "$folder/.site" ]; then
  # uv resolves for another machine, which pip cannot; emulated, pip takes half an hour. The last
  # torch whose wheels for ARM need no CUDA, with TVM's way to it, which would be compiled here.
  grep -v '^torch==' constraints.txt >"$folder/constraints.txt"
  "$folder/uv/bin/uv" pip install -q --target "$site" --upgrade --only-binary=:all: \
    --python-platform aarch64-manylinux_2_35 --python-version "${python#python}" \
    -c "$folder/constraints.txt" apache-tvm apache-tvm-ffi numpy scipy 'torch<2.10' \
    torch-c-dlpack-ext torch-geometric pytest pytest-xdist hypothesis psutil optuna tqdm matplotlib
  touch "$folder/.site"
fi

export PYTHONPATH=$PWD/python
if [ "${1:-}" = --python ]; then
  shift
  exec "$bin/python3" "$@"
fi
[ $# -gt 0 ] || set -- -q tests/formats tests/sparse_ir tests/runtime tests/schedules tests/ops

# Where there is TVM for this machine, too, it compiles the kernels.
if "$native" -c 'import tvm' 2>/dev/null; then
  TESTS_CROSS_COMPILER=$(mktemp -u "${TMPDIR:-/tmp}/on_arm.XXXXXX")
  export TESTS_CROSS_COMPILER
  TESTS_LINKER=aarch64-linux-gnu-ld "$native" tests/cross_compiler.py "$TESTS_CROSS_COMPILER" &
  trap 'kill $!; rm -f "$TESTS_CROSS_COMPILER"' EXIT
  until [ -e "$TESTS_CROSS_COMPILER" ]; do sleep 0.1; done
fi
"$bin/python3" -m pytest "$@"
