#!/bin/sh
# Brings the pinned CUDA compiler into a local folder from its PyPI wheels: no toolkit, no driver and no root needed.
#
#     tools/fetch_nvcc.sh [FOLDER]      default .deps/cuda-13.0; prints the compiler's path
#
# `ingot build` accepts that release only: another compiler makes other bytes, whose evidence nobody has.
set -eu
cd "$(dirname "$0")/.."
folder=${1:-.deps/cuda-13.0}
nvcc=$folder/nvidia/cu13/bin/nvcc
pins="nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-runtime==13.0.88 nvidia-cuda-cccl==13.0.85"
if [ ! -x "$nvcc" ] || [ "$(cat "$folder/pins" 2>/dev/null)" != "$pins" ]; then
	python=python3
	[ -x .venv/bin/python ] && python=.venv/bin/python
	rm -rf "$folder.new"
	# shellcheck disable=SC2086 # one word a package
	"$python" -m pip --disable-pip-version-check install -q --no-deps --target "$folder.new" $pins >&2
	echo "$pins" >"$folder.new/pins"
	rm -rf "$folder"
	mkdir -p "$(dirname "$folder")"
	mv "$folder.new" "$folder"
fi
"$nvcc" --version >/dev/null
echo "$nvcc"
