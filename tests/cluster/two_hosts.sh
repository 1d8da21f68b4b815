# Two hosts on one machine: this network namespace and another, joined by a virtual cable.
#
#     unshare --user --map-root-user --net --kill-child -- bash two_hosts.sh PYTHON ARGUMENTS...
#
# Runs torchrun with these arguments on both: as node 1 on the other host, as node 0 on this one,
# whose address is 10.77.0.1. Ends as node 0 does, and says on standard error how many bytes came
# over the cable. Without arguments it only lays the cable, to see if that can be done here.
set -e
ip link set lo up
unshare --net sleep 600 &
other=$!
trap 'kill $other $there 2> /dev/null || true' EXIT
until [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do sleep 0.05; done
ip link add here type veth peer name there netns $other
ip address add 10.77.0.1/24 dev here
ip link set here up
nsenter --target $other --net sh -c "ip link set lo up
    ip address add 10.77.0.2/24 dev there
    ip link set there up"
[ $# = 0 ] && exit
export GLOO_SOCKET_IFNAME=there
nsenter --target $other --net "$1" -m torch.distributed.run --node-rank 1 "${@:2}" &
there=$!
export GLOO_SOCKET_IFNAME=here
"$1" -m torch.distributed.run --node-rank 0 "${@:2}"
awk '$1 == "here:" { print "bytes over the cable:", $2 }' /proc/net/dev >&2
