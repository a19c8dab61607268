/* late serve: prints its address, then what one connection brought. late send ADDRESS: sends and is gone. */
#include "bsd.h"

enum { BYTES = 3000000 };

static void serve(void) {
    static char buf[10000];
    struct sockaddr_in at;
    char key[64];
    socklen_t len = sizeof key;
    int ear = listener(5, &at);
    NEED(d2tp_getsockopt(ear, SOL_D2TP, D2TP_SO_HOSTKEY, key, &len) == 0);
    printf("d2tp://127.0.0.1:%d/%s\n", ntohs(at.sin_port), key);
    fflush(stdout);
    int s = d2tp_accept(ear, NULL, NULL);
    NEED(s >= 0);
    long all = 0;
    ssize_t n;
    while ((n = d2tp_recv(s, buf, sizeof buf, 0)) > 0) {
        all += n;
        /* Slower than the sender, which is gone by then. */
        d2tp_poll(NULL, 0, 1);
    }
    printf("%ld bytes, then %s\n", all, n == 0 ? "the end" : strerrorname_np(errno));
}

static void deliver(const char *address) {
    static char bytes[BYTES];
    struct addrinfo *server;
    NEED(d2tp_getaddrinfo(address, NULL, NULL, &server) == 0);
    NEED(server->ai_family == AF_D2TP && server->ai_addrlen <= sizeof(struct sockaddr_storage));
    int c = d2tp_socket(AF_INET, SOCK_STREAM, 0);
    NEED(c >= 0);
    NEED(d2tp_connect(c, server->ai_addr, server->ai_addrlen) == 0);
    d2tp_freeaddrinfo(server);
    send_all(c, bytes, sizeof bytes);
}

int main(int argc, char **argv) {
    if (argc == 2 && strcmp(argv[1], "serve") == 0)
        serve();
    else if (argc == 3 && strcmp(argv[1], "send") == 0)
        deliver(argv[2]);
    else
        return 2;
    return 0;
}
