#!/bin/bash
# Unpacks a CRIU that knows recent kernels: the one of Debian's current release, with its
# libraries, into a directory of its own. Debian 12's is too old for Linux 6.
#
#   tests/criu-root.sh DIR
#
# Prints the path of a program that runs it. Needs root, debootstrap, and about 30 s the first time;
# a directory that is complete is used again. Nothing of it is installed, and no package's script is
# run: only files are unpacked, and CRIU is started with its own dynamic loader.

set -euo pipefail

SUITE=trixie
VERSION=1 # of this script's result: raise it when the result changes
ROOT=$(mkdir -p "$1" && cd "$1" && pwd)/criu-$SUITE-$VERSION

if [ ! -x "$ROOT/criu" ]; then
    rm -rf "$ROOT" "$ROOT.new"
    trap 'rm -rf "$ROOT.new"' EXIT
    debootstrap --foreign --variant=minbase --include=criu "$SUITE" "$ROOT.new/root" \
        >"$ROOT.log" 2>&1 || { tail -n 5 "$ROOT.log" >&2; exit 1; }
    for package in "$ROOT.new"/root/var/cache/apt/archives/*.deb; do
        dpkg-deb --fsys-tarfile "$package" |
            tar -x -C "$ROOT.new/root" --keep-directory-symlink
    done
    rm -rf "$ROOT.new/root/var/cache/apt/archives"
    cat >"$ROOT.new/criu" <<EOS
#!/bin/sh
root="$ROOT/root"
exec "\$root/usr/lib64/ld-linux-x86-64.so.2" --library-path "\$root/usr/lib/x86_64-linux-gnu" \\
    "\$root/usr/sbin/criu" "\$@"
EOS
    chmod +x "$ROOT.new/criu"
    mv "$ROOT.new" "$ROOT"
fi
echo "$ROOT/criu"
