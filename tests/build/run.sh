#!/bin/sh
# run.sh takes paths as the caller means them, from whatever folder it is called, and its own example without arguments.
# Asked for help it only answers.
# Usage: run.sh SOURCE_DIR
set -eu
source=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# A tree in which setting up and building do nothing, and the command says whether its file is there.
mkdir -p "$work/tree/tests" "$work/tree/build/release" "$work/tree/examples" "$work/bin" "$work/elsewhere"
cp "$source/run.sh" "$work/tree"
sed 's/^build_packages=.*/build_packages=/' "$source/tests/setup.sh" >"$work/tree/tests/setup.sh"
printf '#!/bin/sh\n' >"$work/bin/cmake"
printf '#!/bin/sh\nshift\necho "attn $*"\ncat "$1" && cp "$1" "$3"\n' >"$work/tree/build/release/ingot"
chmod +x "$work/bin/cmake" "$work/tree/build/release/ingot"
echo "the caller's" >"$work/elsewhere/layer.safetensors"
echo "the example" >"$work/tree/examples/minilm.safetensors"
PATH=$work/bin:$PATH

cd "$work/elsewhere"
../tree/run.sh layer.safetensors --out result >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
cmp layer.safetensors result
sed -i 's/ && cp.*//' "$work/tree/build/release/ingot"
../tree/run.sh >"$work/log" 2>&1 && grep -q "the example" "$work/log" || { cat "$work/log"; exit 1; }
../tree/run.sh --help >"$work/log" 2>&1
grep -q 'ingot attn' "$work/log" && ! grep -q '^==' "$work/log" || { cat "$work/log"; exit 1; }
echo "run.sh takes its caller's paths"
