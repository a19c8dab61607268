#!/bin/sh
# Builds the classes and their native part into FOLDER: build.sh FOLDER. Needs a JDK, cc and pkg-config's d2tp.
set -eu
to=${1:?usage: build.sh FOLDER}
here=$(cd "$(dirname "$0")" && pwd)
jdk=${JAVA_HOME:-$(dirname "$(dirname "$(readlink -f "$(command -v javac)")")")}
mkdir -p "$to"
javac --release 11 -Xlint:all,-options -Werror -d "$to" "$here"/src/cedos/d2tp/*.java "$here/Example.java"
flags=$(pkg-config --cflags --libs d2tp)
cc -shared -fPIC -O2 -Wall -Wextra -o "$to/libd2tp_java.so" "$here/native.c" \
    -I"$jdk/include" -I"$jdk/include/linux" $flags
