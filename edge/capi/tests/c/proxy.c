/* A proxy that opens tunnels: CONNECT by D2TP on one side, the kernel's TCP on the other. One at a time. */
#include "bsd.h"

static void answer(int fd, const char *text) { send_all(fd, text, strlen(text)); }

/* Copies both ways until both have ended; descriptors of both kinds in one poll. */
static void carry(int device, int origin) {
    struct pollfd both[2] = {{.fd = device, .events = POLLIN}, {.fd = origin, .events = POLLIN}};
    static char buf[65536];
    for (int open = 2; open > 0;) {
        NEED(d2tp_poll(both, 2, -1) > 0);
        for (int i = 0; i < 2; i++) {
            if (both[i].fd < 0 || !both[i].revents)
                continue;
            int to = i == 0 ? origin : device;
            ssize_t n = d2tp_recv(both[i].fd, buf, sizeof buf, 0);
            if (n > 0) {
                send_all(to, buf, n);
            } else {
                d2tp_shutdown(to, SHUT_WR);
                both[i].fd = -1;
                open--;
            }
        }
    }
}

static void serve(int device) {
    char head[1024] = "", host[64];
    int port;
    size_t len = 0;
    while (!strstr(head, "\r\n\r\n") && len < sizeof head - 1)
        NEED(d2tp_recv(device, head + len++, 1, 0) == 1);
    NEED(sscanf(head, "CONNECT [%63[^]]]:%d HTTP/1.1\r\n", host, &port) == 2 ||
         sscanf(head, "CONNECT %63[^:]:%d HTTP/1.1\r\n", host, &port) == 2);
    struct sockaddr_in at = loopback(port);
    int origin = socket(AF_INET, SOCK_STREAM, 0);
    /* Origins are at IPv4's loopback, whatever they are called. */
    if (strcmp(host, "127.0.0.1") != 0 && strcmp(host, "::1") != 0 && strcmp(host, "origin.example") != 0) {
        answer(device, "HTTP/1.1 502 Bad Gateway\r\nProxy-Status: x; error=dns_error\r\n\r\nno such name");
    } else if (connect(origin, (struct sockaddr *)&at, sizeof at) < 0) {
        answer(device, "HTTP/1.1 502 Bad Gateway\r\nProxy-Status: x; error=connection_refused\r\n\r\nrefused");
    } else {
        answer(device, "HTTP/1.1 200 OK\r\n\r\n");
        carry(device, origin);
    }
    close(origin);
    d2tp_close(device);
}

int main(void) {
    struct sockaddr_in at;
    char key[64];
    socklen_t len = sizeof key;
    int ear = listener(5, &at), device;
    NEED(d2tp_getsockopt(ear, SOL_D2TP, D2TP_SO_HOSTKEY, key, &len) == 0);
    printf("d2tp://127.0.0.1:%d/%s\n", ntohs(at.sin_port), key);
    fflush(stdout);
    while ((device = d2tp_accept(ear, NULL, NULL)) >= 0)
        serve(device);
    return 1;
}
