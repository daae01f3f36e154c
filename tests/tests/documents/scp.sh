#!/bin/bash
# Stands in for scp between the machines of `machines.rs`: what `HOST:PATH` names is in that machine's
# directory, and configurations that are copied there speak of it.
set -euo pipefail

options=()
while [[ $1 == -* ]]; do
    options+=("$1")
    shift
done
host=${2%%:*}
to=$MACHINES/$host${2#"$host:$MACHINE"}
if [ -d "$to" ]; then
    to=$to/$(basename "$1")
fi
cp "${options[@]}" "$1" "$to"
find "$to" -name '*.toml' -exec sed -i "s#$MACHINE/#$MACHINES/$host/#g" {} +
