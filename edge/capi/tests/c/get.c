/* get HOST PORT PATH, or get d2tp://HOST:PORT/KEY "" PATH: an HTTP/1.0 client. */
#include "bsd.h"

int main(int argc, char **argv) {
    char buf[4096];
    struct addrinfo *server;
    if (argc != 4)
        return 2;
    const char *service = *argv[2] ? argv[2] : NULL;
    if (d2tp_getaddrinfo(argv[1], service, NULL, &server) != 0)
        return 2;
    int fd = d2tp_socket(AF_INET, SOCK_STREAM, 0);
    NEED(fd >= 0);
    if (d2tp_connect(fd, server->ai_addr, server->ai_addrlen) < 0) {
        printf("%s", strerrorname_np(errno));
        socklen_t len = sizeof buf;
        if (d2tp_getsockopt(fd, SOL_D2TP, D2TP_SO_ERROR, buf, &len) == 0)
            printf(": %s\n", buf);
        return 0;
    }
    d2tp_freeaddrinfo(server);
    int len = snprintf(buf, sizeof buf, "GET %s HTTP/1.0\r\nHost: x\r\n\r\n", argv[3]);
    send_all(fd, buf, len);
    ssize_t n;
    while ((n = d2tp_recv(fd, buf, sizeof buf, 0)) > 0)
        fwrite(buf, 1, n, stdout);
    NEED(n == 0 && d2tp_close(fd) == 0);
    return 0;
}
