#!/bin/bash
# Stands in for systemctl on one of the machines of `machines.rs`: runs what the installed unit runs, with
# the paths of that machine. The parts end with the test.
set -euo pipefail

TIMEOUT_S=60

on_this_machine() {
    sed -E "s#(/var/lib/harvestfs|/etc/|/mnt/|/srv/)#$MACHINE\1#g"
}

# wait_for UNIT COMMAND...
wait_for() {
    local unit=$1 end=$((SECONDS + TIMEOUT_S))
    shift
    until "$@"; do
        if ((SECONDS >= end)); then
            echo "$unit: not in time: $*" >&2
            tail -n 20 "$MACHINE/run/$unit.log" >&2
            return 1
        fi
        sleep 0.1
    done
}

# A unit of Type=notify is started when it says READY=1, which it does together with this line.
is_ready() {
    grep -q '^ready' "$MACHINE/run/$1.out"
}

# Whoever is its parent by now may not have asked for its status.
has_ended() {
    ! grep -qs '^State:[[:space:]]*[^Z[:space:]]' "/proc/$1/status"
}

# keep RUN ARGUMENT...: runs a part; nothing outlives the test, however that ends.
keep() {
    local run=$1 parent=$BASHPID part
    shift
    harvestfs --supervised-by "$parent" "$@" &
    part=$!
    echo "$part" >"$run.pid"
    while kill -0 "$TEST_PID" && kill -0 "$part"; do
        sleep 1
    done 2>/dev/null
    kill "$part" 2>/dev/null || true
}

start() {
    local unit=$MACHINE/etc/systemd/system/$1.service run=$MACHINE/run/$1 before command
    while read -r before; do
        case $before in
            -*) ${before#-} 2>/dev/null || true ;;
            *) $before ;;
        esac
    done < <(sed -n 's/^ExecStartPre=//p' "$unit" | on_this_machine)
    command=$(sed -n 's#^ExecStart=/usr/local/bin/##p' "$unit" | on_this_machine)
    : >"$run.out"
    keep "$run" ${command#harvestfs } </dev/null >"$run.out" 2>>"$run.log" &
    wait_for "$1" is_ready "$1"
}

stop() {
    local pid_file=$MACHINE/run/$1.pid pid
    [ -e "$pid_file" ] || return 0
    pid=$(cat "$pid_file")
    rm "$pid_file"
    kill "$pid" 2>/dev/null || return 0
    wait_for "$1" has_ended "$pid" || kill -KILL "$pid"
}

case $1 in
    daemon-reload) ;;
    enable) start "$3" ;;
    start) start "$2" ;;
    stop) stop "$2" ;;
    restart)
        stop "$2"
        start "$2"
        ;;
    kill) kill -s "${2#--signal=}" "$(cat "$MACHINE/run/$3.pid")" ;;
    *)
        echo "the document uses systemctl $1, which its stand-in does not know" >&2
        exit 1
        ;;
esac
