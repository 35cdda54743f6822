#!/usr/bin/env bash
# BAGEL's stages on two hosts, as far as they can tell: each has a network namespace of its own, and
# there is nothing between them but a cable (a veth pair). Needs root; leaves nothing behind.
#
#     sudo examples/two_hosts.sh                                  # zmq+tcp://10.77.0.1:7000
#     sudo examples/two_hosts.sh zmq+tcp://10.77.0.1:0 --stream   # options are the demo's
#
# Exit status: the demo's; 77 if this machine cannot do it.
set -euo pipefail

cannot() {
    echo "two_hosts.sh: $*" >&2
    exit 77
}

url=${1:-zmq+tcp://10.77.0.1:7000}
[[ $# -eq 0 ]] || shift
if [[ ! $url =~ ://(([0-9]+\.){3})([0-9]+): ]]; then
    echo "two_hosts.sh: $url: wanted an IPv4 address, as in zmq+tcp://10.77.0.1:7000" >&2
    exit 2
fi
ar_host=${BASH_REMATCH[1]}${BASH_REMATCH[3]}
dit_host=${BASH_REMATCH[1]}$((BASH_REMATCH[3] % 254 + 1))

[[ $EUID -eq 0 ]] || cannot "network namespaces need root: sudo $0"
command -v ip >/dev/null || cannot "there is no 'ip': apt install iproute2"
ip netns list >/dev/null 2>&1 || cannot "this 'ip' knows no 'ip netns': apt install iproute2"

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
    for space in "$ar" "$dit"; do # the cable goes with them
        ip netns pids "$space" 2>/dev/null | xargs -r kill -9
        ip netns del "$space" 2>/dev/null
    done
    rm -rf "$scratch"
}
trap remove EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

for space in "$ar" "$dit"; do
    ip netns add "$space" || cannot "no network namespace can be made here"
done
ip link add eth0 netns "$ar" type veth peer name eth0 netns "$dit" || cannot "no veth pair here"
for host in "$ar $ar_host" "$dit $dit_host"; do
    ip -n "${host% *}" address add "${host#* }/24" dev eth0
    ip -n "${host% *}" link set lo up
    ip -n "${host% *}" link set eth0 up
done

echo "two hosts: AR $ar_host, DiT $dit_host"
# In the background: bash hears of signals only while it waits.
TMPDIR=$scratch "$python" "$root/examples/bagel_two_stage.py" --connector "$url" \
    --keys "$scratch/keys" --prefix-ar "ip netns exec $ar" --prefix-dit "ip netns exec $dit" "$@" &
demo=$!
status=0
wait "$demo" || status=$?
demo=
sent=$(ip netns exec "$ar" cat /sys/class/net/eth0/statistics/tx_bytes)
echo "the AR host sent $sent bytes"
exit "$status"
