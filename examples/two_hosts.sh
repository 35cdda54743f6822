#!/usr/bin/env bash
# Runs BAGEL's two stages as on two hosts: each in a network namespace of its own, connected by a veth
# pair. Needs root; removes everything at the end.
#
#     sudo examples/two_hosts.sh                                  # zmq+tcp://10.77.0.1:7000
#     sudo examples/two_hosts.sh zmq+tcp://10.77.0.1:0 --stream   # options are the demo's
#
# Exit status: the demo's; 77 if this machine cannot make the namespaces.
set -euo pipefail

skip() {
    echo "two_hosts.sh: $*" >&2
    exit 77
}

url=${1:-zmq+tcp://10.77.0.1:7000}
[[ $# -eq 0 ]] || shift
if [[ ! $url =~ ://(([0-9]+\.){3})([0-9]+): ]]; then
    echo "two_hosts.sh: $url: expected an IPv4 address, as in zmq+tcp://10.77.0.1:7000" >&2
    exit 2
fi
ar_host=${BASH_REMATCH[1]}${BASH_REMATCH[3]}
dit_host=${BASH_REMATCH[1]}$((BASH_REMATCH[3] % 254 + 1))

[[ $EUID -eq 0 ]] || skip "network namespaces need root: sudo $0"
command -v ip >/dev/null || skip "'ip' is missing: apt install iproute2"
ip netns list >/dev/null 2>&1 || skip "this 'ip' has no 'ip netns': apt install iproute2"

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
command -v "$python" >/dev/null || python=python3
ar=kvl-ar-$$ dit=kvl-dit-$$ demo=
scratch=$(mktemp -d)

# shellcheck disable=SC2317 # the trap calls it
remove() {
    set +e
    trap '' HUP INT TERM
    [[ -z $demo ]] || { kill "$demo" && wait "$demo"; } 2>/dev/null
    for namespace in "$ar" "$dit"; do # the veth pair is removed with them
        ip netns pids "$namespace" 2>/dev/null | xargs -r kill -9
        ip netns del "$namespace" 2>/dev/null
    done
    rm -rf "$scratch"
}
trap remove EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

for namespace in "$ar" "$dit"; do
    ip netns add "$namespace" || skip "cannot make a network namespace here"
done
ip link add eth0 netns "$ar" type veth peer name eth0 netns "$dit" || skip "cannot make a veth pair here"
for host in "$ar $ar_host" "$dit $dit_host"; do
    ip -n "${host% *}" address add "${host#* }/24" dev eth0
    ip -n "${host% *}" link set lo up
    ip -n "${host% *}" link set eth0 up
done

echo "two hosts: AR $ar_host, DiT $dit_host"
# In the background: bash handles signals only while it waits.
TMPDIR=$scratch "$python" "$root/examples/bagel_two_stage.py" --url "$url" \
    --keys "$scratch/keys" --prefix-ar "ip netns exec $ar" --prefix-dit "ip netns exec $dit" "$@" &
demo=$!
status=0
wait "$demo" || status=$?
demo=
sent=$(ip netns exec "$ar" cat /sys/class/net/eth0/statistics/tx_bytes)
echo "the AR host sent $sent bytes"
exit "$status"
