#!/bin/sh
# Installs libd2tp below PREFIX: install.sh PREFIX. LIBRARIES: where cargo put it; DESTDIR: for packagers.
set -eu
prefix=${1:?usage: install.sh PREFIX}
here=$(cd "$(dirname "$0")" && pwd)
from=${LIBRARIES:-$here/../../target/release}
to=${DESTDIR:-}$prefix

install -d "$to/lib/pkgconfig" "$to/include" "$to/share/man/man3"
install -m 755 "$from/libd2tp.so" "$to/lib/libd2tp.so.1"
ln -sf libd2tp.so.1 "$to/lib/libd2tp.so"
install -m 644 "$from/libd2tp.a" "$to/lib/libd2tp.a"
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
