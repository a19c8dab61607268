#!/bin/sh
# Builds the binding, which serves every version of Node: build.sh [FILE]. Needs cargo.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
to=${1:-$here/build/d2tp.node}
cargo build --release --manifest-path "$here/Cargo.toml"
mkdir -p "$(dirname "$to")"
install -m 755 "${CARGO_TARGET_DIR:-$here/../../target}/release/libd2tp_node.so" "$to"
