#!/bin/sh
# Builds the binding for this machine's Node: build.sh [FILE]. Needs cc, pkg-config's d2tp and Node's headers.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
to=${1:-$here/build/d2tp.node}
node=$(dirname "$(dirname "$(readlink -f "$(command -v node)")")")
mkdir -p "$(dirname "$to")"
flags=$(pkg-config --cflags --libs d2tp)
exec cc -shared -fPIC -O2 -Wall -Wextra -o "$to" "$here/binding.c" -I"${NODE_INCLUDE:-$node/include/node}" $flags
