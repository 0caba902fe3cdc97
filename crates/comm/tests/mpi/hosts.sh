# Runs a command on the first of some hosts, h1, h2, ..: network namespaces with their own host names, joined by a bridge.
# Arguments: how many hosts, the rate of their network (such as 100mbit, or - for no limit), a mark, the command.
# Everything is inside namespaces of this shell's own, so nothing is left of it afterwards. What the command leaves behind
# on a host is printed: its processes carry the mark in their environment.
count=$1 rate=$2 mark=$3
shift 3
hosts=$(seq "$count")
mkdir -p /run/netns
mount -t tmpfs consort /run/netns
mount -t tmpfs consort /dev/shm
# The bridge's own namespace must outlive this shell.
touch /run/netns/bridge
mount --bind /proc/self/ns/net /run/netns/bridge
ip link add bridge type bridge
ip link set bridge up
echo 127.0.0.1 localhost > /run/netns/hosts
for i in $hosts; do
    ip netns add h$i
    ip link add v$i type veth peer name eth0 netns h$i
    ip link set v$i master bridge up
    ip -n h$i addr add 10.77.0.$i/24 dev eth0
    ip -n h$i link set eth0 up
    ip -n h$i link set lo up
    [ "$rate" = - ] || tc -n h$i qdisc add dev eth0 root tbf rate "$rate" burst 64kb latency 50ms
    echo 10.77.0.$i h$i >> /run/netns/hosts
done
mount --bind /run/netns/hosts /etc/hosts
# In place of ssh: the host, then a command line.
cat > /run/netns/agent <<'AGENT'
#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1
shift
exec nsenter --net=/run/netns/$host unshare --uts sh -c 'hostname $0; exec sh -c "$1"' "$host" "$*"
AGENT
chmod +x /run/netns/agent
code=0
nsenter --net=/run/netns/h1 unshare --uts env CONSORT_TEST_MARK="$mark" \
    sh -c 'hostname h1; exec "$@"' sh "$@" || code=$?
left() { grep -lsa "CONSORT_TEST_MARK=$mark" /proc/[0-9]*/environ || true; }
# What was told to end may take a moment.
for _ in $(seq 100); do
    [ -n "$(left)" ] || break
    sleep 0.1
done
for process in $(left); do
    echo "left behind: process $(tr '\0' ' ' < "${process%environ}cmdline")"
done
for file in /dev/shm/*; do
    case $file in
    # Not of consort: MPICH 5 leaves its own if a rank ends without MPI_Finalize.
    */mpich_shm_*) echo "MPI leaves $file" ;;
    *) [ ! -e "$file" ] || echo "left behind: $file" ;;
    esac
done
# Sockets that a process holds: the kernel's own, of connections that were cut, go by themselves.
for i in $hosts; do
    nsenter --net=/run/netns/h$i sh -c 'cd /proc/net
        awk "FNR > 1 && \$10 != 0" tcp tcp6 udp udp6
        awk "FNR > 1 && \$7 != 0" unix' | sed "s/^/left behind: socket on h$i: /"
done
exit $code
