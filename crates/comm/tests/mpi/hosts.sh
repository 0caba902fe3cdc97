# Runs a command on the first of two hosts, h1 and h2: network namespaces with their own host names, joined by a bridge.
# Everything is inside namespaces of this shell's own, so nothing is left of it afterwards.
mkdir -p /run/netns
mount -t tmpfs consort /run/netns
# The bridge's own namespace must outlive this shell.
touch /run/netns/bridge
mount --bind /proc/self/ns/net /run/netns/bridge
ip link add bridge type bridge
ip link set bridge up
echo 127.0.0.1 localhost > /run/netns/hosts
for i in 1 2; do
    ip netns add h$i
    ip link add v$i type veth peer name eth0 netns h$i
    ip link set v$i master bridge up
    ip -n h$i addr add 10.77.0.$i/24 dev eth0
    ip -n h$i link set eth0 up
    ip -n h$i link set lo up
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
exec nsenter --net=/run/netns/h1 unshare --uts sh -c 'hostname h1; exec "$@"' sh "$@"
