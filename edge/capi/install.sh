#!/bin/sh
# Installs libd2tp below PREFIX: install.sh [--keep-symbols] PREFIX. LIBRARIES: where cargo put it; DESTDIR: for packagers.
set -eu
keep=
if [ "${1:-}" = --keep-symbols ]; then
    keep=yes
    shift
fi
prefix=${1:?usage: install.sh [--keep-symbols] PREFIX}
here=$(cd "$(dirname "$0")" && pwd)
from=${LIBRARIES:-$here/../../target/release}
to=${DESTDIR:-}$prefix

install -d "$to/lib/pkgconfig" "$to/include" "$to/share/man/man3"
install -m 755 "$from/libd2tp.so" "$to/lib/libd2tp.so.1"
ln -sf libd2tp.so.1 "$to/lib/libd2tp.so"
install -m 644 "$from/libd2tp.a" "$to/lib/libd2tp.a"
# What debuggers read is most of both files, and what rustc keeps to optimise once more is most of the static one.
if [ -z "$keep" ] && command -v strip > /dev/null; then
    strip --strip-unneeded "$to/lib/libd2tp.so.1"
    strip --strip-debug --remove-section=.llvmbc --remove-section=.llvmcmd "$to/lib/libd2tp.a"
fi
install -m 644 "$here/include/d2tp.h" "$to/include/d2tp.h"
install -m 644 "$here"/man/*.3 "$to/share/man/man3/"
# One page for each group; the others lead to it, as man(7) has it.
for page in "$here"/man/*.3; do
    first=$(basename "$page")
    for name in $(sed -n '/^\.SH NAME/{n;s/ \\- .*//;s/,//g;p;}' "$page"); do
        [ "$name.3" = "$first" ] || echo ".so man3/$first" > "$to/share/man/man3/$name.3"
    done
done
sed "s|@PREFIX@|$prefix|" "$here/d2tp.pc.in" > "$to/lib/pkgconfig/d2tp.pc"
chmod 644 "$to/lib/pkgconfig/d2tp.pc"

# The loader looks in its cache, and in folders that it was told of.
ldconfig=$(command -v ldconfig || command -v /sbin/ldconfig || true)
if [ -z "${DESTDIR:-}" ]; then
    case $prefix in
        /usr | /usr/local) system=yes ;;
        *) system= ;;
    esac
    if ! { [ "$system" ] && [ "$(id -u)" = 0 ] && [ "$ldconfig" ] && "$ldconfig"; }; then
        echo "Programs find the library with LD_LIBRARY_PATH=$prefix/lib, or when linked with -Wl,-rpath,$prefix/lib." >&2
    fi
fi
