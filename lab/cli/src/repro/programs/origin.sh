# The origin's own servers, as they are: nginx, over TCP and as a D2TP server, and sshd. Told by AT, CEDOS, ORIGIN.
unset CEDOS_PROX
[ -f "$AT/origin.key" ] || "$CEDOS" key gen -o "$AT/origin.key"
if command -v nginx; then
    "$CEDOS" run --listen --allow-any-client --at "$ORIGIN:8081" --key "$AT/origin.key" -- \
        nginx -c "$AT/nginx.conf" 2>"$AT/front" &
fi
if [ -f "$AT/host_key" ]; then
    # It wants a folder of its own in /run, which not every system has; and its whole path.
    SSHD=$(command -v sshd) unshare -m sh -c \
        'mount -t tmpfs none /run && mkdir -m 755 /run/sshd && exec "$SSHD" -D -e -f "$AT/sshd_config"' \
        2>"$AT/sshd.said" &
fi
wait
