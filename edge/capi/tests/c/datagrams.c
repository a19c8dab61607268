/* Datagram sockets: boundaries, names, sizes, what one message asks for itself, expiry, and ends. */
#include "bsd.h"

/* A busy machine may take long for a handshake; what is to arrive is worth waiting for. */
static void be_patient(int fd) {
    int ms = 60000;
    NEED(d2tp_setsockopt(fd, SOL_D2TP, D2TP_SO_EXPIRY, &ms, sizeof ms) == 0);
}

static int server_at(struct sockaddr_in *at) {
    socklen_t len = sizeof *at;
    int fd = d2tp_socket(AF_INET, SOCK_DGRAM, 0);
    NEED(fd >= 0);
    be_patient(fd);
    NEED(d2tp_bind(fd, (struct sockaddr *)at, sizeof *at) == 0);
    NEED(d2tp_getsockname(fd, (struct sockaddr *)at, &len) == 0);
    NEED(at->sin_port != 0);
    return fd;
}

static int client_of(const struct sockaddr_in *at) {
    int fd = d2tp_socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, IPPROTO_UDP);
    NEED(fd >= 0);
    be_patient(fd);
    know_peer(fd);
    NEED(d2tp_connect(fd, (struct sockaddr *)at, sizeof *at) == 0);
    return fd;
}

/* The next message is `text`; who sent it. */
static struct sockaddr_in heard(int fd, const char *text) {
    struct sockaddr_in from;
    socklen_t len = sizeof from;
    char buf[2000];
    ssize_t n = d2tp_recvfrom(fd, buf, sizeof buf, 0, (struct sockaddr *)&from, &len);
    NEED(n == (ssize_t)strlen(text) && memcmp(buf, text, n) == 0);
    NEED(len == sizeof from && from.sin_family == AF_INET);
    return from;
}

static void say(int fd, const char *text) {
    NEED(d2tp_send(fd, text, strlen(text), 0) == (ssize_t)strlen(text));
}

static void answer(int fd, const char *text, struct sockaddr_in to) {
    ssize_t n = d2tp_sendto(fd, text, strlen(text), 0, (struct sockaddr *)&to, sizeof to);
    NEED(n == (ssize_t)strlen(text));
}

static void messages_keep_their_bounds_and_senders_their_names(void) {
    struct sockaddr_in at = loopback(0);
    int server = server_at(&at), one = client_of(&at), two = client_of(&at);
    int kind;
    socklen_t len = sizeof kind;
    NEED(d2tp_getsockopt(one, SOL_SOCKET, SO_TYPE, &kind, &len) == 0 && kind == SOCK_DGRAM);

    say(one, "first");
    struct sockaddr_in first = heard(server, "first");
    say(one, "second");
    say(one, "");
    say(one, "third");
    struct sockaddr_in again = heard(server, "second");
    NEED(again.sin_addr.s_addr == first.sin_addr.s_addr && again.sin_port == first.sin_port);
    heard(server, "");
    heard(server, "third");
    say(two, "other");
    struct sockaddr_in other = heard(server, "other");
    NEED(other.sin_addr.s_addr != first.sin_addr.s_addr);

    answer(server, "to one", first);
    answer(server, "to two", other);
    struct sockaddr_in from = heard(one, "to one");
    NEED(from.sin_port == at.sin_port && from.sin_addr.s_addr == at.sin_addr.s_addr);
    heard(two, "to two");
    len = sizeof from;
    NEED(d2tp_getpeername(one, (struct sockaddr *)&from, &len) == 0);
    NEED(from.sin_port == at.sin_port);

    /* Cut, and told. */
    char small[4];
    struct iovec piece = {small, sizeof small};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1};
    say(one, "too long for it");
    NEED(d2tp_recvmsg(server, &message, 0) == 4 && memcmp(small, "too ", 4) == 0);
    NEED(message.msg_flags & MSG_TRUNC);
    say(one, "too long for it");
    NEED(d2tp_recv(server, small, sizeof small, MSG_TRUNC) == 15);
    say(one, "kept");
    NEED(d2tp_recv(server, small, sizeof small, MSG_PEEK) == 4);
    heard(server, "kept");
    NEED(d2tp_recv(server, small, sizeof small, MSG_DONTWAIT) == -1 && errno == EAGAIN);

    /* The kernel's own calls. */
    char buf[100];
    NEED(write(one, "plain", 5) == 5);
    NEED(until(server, POLLIN) == POLLIN);
    struct sockaddr_in by;
    len = sizeof by;
    NEED(recvfrom(server, buf, sizeof buf, 0, (struct sockaddr *)&by, &len) == 5);
    NEED(sendto(server, "so too", 6, 0, (struct sockaddr *)&by, len) == 6);
    NEED(read(one, buf, sizeof buf) == 6 && memcmp(buf, "so too", 6) == 0);
    NEED(d2tp_write(one, "w", 1) == 1);
    NEED(d2tp_read(server, buf, sizeof buf) == 1);
    struct iovec pieces[2] = {{"a", 1}, {"b", 1}}, into[2] = {{buf, 1}, {buf + 1, 9}};
    NEED(d2tp_writev(one, pieces, 2) == 2 && d2tp_readv(server, into, 2) == 2 && buf[1] == 'b');
    NEED(d2tp_close(one) == 0 && d2tp_close(two) == 0 && d2tp_close(server) == 0);
}

static void what_fits_no_packet_is_emsgsize(void) {
    struct sockaddr_in at = loopback(0);
    int server = server_at(&at), client = client_of(&at);
    static char large[70000];
    NEED(d2tp_send(client, large, 3000, 0) == -1 && errno == EMSGSIZE);
    NEED(d2tp_send(client, large, 1100, 0) == 1100);
    NEED(d2tp_recv(server, large, sizeof large, 0) == 1100);
    NEED(d2tp_send(client, large, 3000, 0) == -1 && errno == EMSGSIZE);
    NEED(d2tp_send(client, large, sizeof large, 0) == -1 && errno == EMSGSIZE);
    /* Such a message by the kernel's call is lost, and those after it are not. */
    NEED(write(client, large, 3000) == 3000);
    say(client, "after it");
    struct sockaddr_in from = heard(server, "after it");
    NEED(d2tp_sendto(server, large, 3000, 0, (struct sockaddr *)&from, sizeof from) == -1);
    NEED(errno == EMSGSIZE);
    NEED(d2tp_close(client) == 0 && d2tp_close(server) == 0);
}

static ssize_t marked(int fd, const char *text, int kind, int value, struct sockaddr_in *to) {
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {.head = {.cmsg_level = SOL_D2TP, .cmsg_type = kind, .cmsg_len = CMSG_LEN(sizeof(int))}};
    memcpy(CMSG_DATA(&control.head), &value, sizeof value);
    struct iovec piece = {(void *)text, strlen(text)};
    struct msghdr message = {.msg_iov = &piece,
                             .msg_iovlen = 1,
                             .msg_name = to,
                             .msg_namelen = to ? sizeof *to : 0,
                             .msg_control = &control,
                             .msg_controllen = sizeof control};
    return d2tp_sendmsg(fd, &message, 0);
}

static void a_message_may_ask_for_its_own_way_and_time(void) {
    struct sockaddr_in at = loopback(0);
    int server = server_at(&at), client = client_of(&at);
    say(client, "hello");
    struct sockaddr_in from = heard(server, "hello");
    NEED(marked(client, "on each", D2TP_SO_ROUTE, D2TP_ROUTE_EACH, NULL) == 7);
    heard(server, "on each");
    NEED(marked(client, "steady", D2TP_SO_ROUTE, D2TP_ROUTE_STEADIEST, NULL) == 6);
    heard(server, "steady");
    NEED(marked(server, "back", D2TP_SO_EXPIRY, 30000, &from) == 4);
    heard(client, "back");
    NEED(marked(client, "x", D2TP_SO_ROUTE, 3, NULL) == -1 && errno == EINVAL);
    NEED(marked(client, "x", D2TP_SO_EXPIRY, 0, NULL) == -1 && errno == EINVAL);
    NEED(marked(client, "x", D2TP_SO_POLICY, 1, NULL) == -1 && errno == EINVAL);
    int route = D2TP_ROUTE_EACH;
    NEED(d2tp_setsockopt(client, SOL_D2TP, D2TP_SO_ROUTE, &route, sizeof route) == 0);
    struct d2tp_rcvbufth levels = {.dr_low = 1, .dr_high = 2};
    NEED(d2tp_setsockopt(client, SOL_D2TP, D2TP_SO_RCVBUFTH, &levels, sizeof levels) < 0 && errno == EOPNOTSUPP);
    say(client, "all on each");
    heard(server, "all on each");
    NEED(d2tp_close(client) == 0 && d2tp_close(server) == 0);
}

static void what_is_late_is_not_sent(void) {
    struct sockaddr_in at = loopback(0);
    int server = server_at(&at);
    NEED(d2tp_close(server) == 0);
    int client = client_of(&at);
    /* Nobody is there yet. */
    NEED(marked(client, "worth a millisecond", D2TP_SO_EXPIRY, 1, NULL) > 0);
    NEED(poll(NULL, 0, 20) == 0);
    say(client, "worth a minute");
    server = server_at(&at);
    heard(server, "worth a minute");
    NEED(d2tp_close(client) == 0 && d2tp_close(server) == 0);
}

static void ends_are_told_and_last_words_arrive(void) {
    struct sockaddr_in at = loopback(0);
    int server = server_at(&at), client = client_of(&at);
    char buf[100];
    say(client, "are you there");
    heard(server, "are you there");
    NEED(d2tp_close(server) == 0);
    NEED(d2tp_recv(client, buf, sizeof buf, 0) == -1 && errno == ECONNRESET);
    NEED(d2tp_recv(client, buf, sizeof buf, 0) == -1 && errno == ECONNRESET);
    NEED(d2tp_send(client, "x", 1, 0) == -1 && errno == ECONNRESET);
    socklen_t len = sizeof buf;
    NEED(d2tp_getsockopt(client, SOL_D2TP, D2TP_SO_ERROR, buf, &len) == 0 && strlen(buf) > 0);
    NEED(d2tp_close(client) == 0);

    /* The address is free, and what was said just before a close arrives. */
    server = server_at(&at);
    client = client_of(&at);
    int worth = 30000;
    NEED(d2tp_setsockopt(client, SOL_D2TP, D2TP_SO_EXPIRY, &worth, sizeof worth) == 0);
    say(client, "my last word");
    NEED(d2tp_close(client) == 0);
    heard(server, "my last word");
    NEED(d2tp_close(server) == 0);
    /* Whenever: just as its session is made, too. */
    for (int i = 0; i < 60; i++) {
        server = server_at(&at);
        client = client_of(&at);
        NEED(usleep(100 * i) == 0);
        say(client, "and that was all");
        NEED(d2tp_close(client) == 0);
        heard(server, "and that was all");
        NEED(d2tp_close(server) == 0);
    }
}

static void what_cannot_be_is_said(void) {
    struct sockaddr_in at = loopback(9), none = loopback(0);
    int fd = d2tp_socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK, 0);
    char buf[10];
    NEED(d2tp_listen(fd, 5) == -1 && errno == EOPNOTSUPP);
    NEED(d2tp_accept(fd, NULL, NULL) == -1 && errno == EOPNOTSUPP);
    NEED(d2tp_flush(fd, 0) == -1 && errno == EOPNOTSUPP);
    NEED(d2tp_send(fd, "x", 1, 0) == -1 && errno == EDESTADDRREQ);
    NEED(d2tp_sendto(fd, "x", 1, 0, (struct sockaddr *)&at, sizeof at) == -1 && errno == ENOTCONN);
    NEED(d2tp_recv(fd, buf, sizeof buf, 0) == -1 && errno == EAGAIN);
    NEED(d2tp_connect(fd, (struct sockaddr *)&at, sizeof at) == -1 && errno == ENETUNREACH);
    const char *proxy = "d2tp://127.0.0.1:9/AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA";
    NEED(d2tp_setsockopt(fd, SOL_D2TP, D2TP_SO_PROXY, proxy, strlen(proxy)) == 0);
    NEED(d2tp_connect(fd, (struct sockaddr *)&at, sizeof at) == -1 && errno == EPROTONOSUPPORT);
    NEED(d2tp_socket(AF_INET, SOCK_DGRAM, IPPROTO_TCP) == -1 && errno == EPROTONOSUPPORT);
    NEED(d2tp_close(fd) == 0);
    /* As many programs do before they connect. */
    struct sockaddr_in server_is = loopback(0);
    int server = server_at(&server_is);
    fd = d2tp_socket(AF_INET, SOCK_DGRAM, 0);
    be_patient(fd);
    know_peer(fd);
    NEED(d2tp_bind(fd, (struct sockaddr *)&none, sizeof none) == 0);
    NEED(d2tp_connect(fd, (struct sockaddr *)&server_is, sizeof server_is) == 0);
    NEED(d2tp_sendto(fd, "x", 1, 0, (struct sockaddr *)&at, sizeof at) == -1 && errno == EISCONN);
    say(fd, "bound before");
    heard(server, "bound before");
    /* Nobody but the engine speaks to either. */
    struct sockaddr_in inner;
    socklen_t len = sizeof inner;
    NEED(getsockname(server, (struct sockaddr *)&inner, &len) == 0);
    int stranger = socket(AF_INET, SOCK_DGRAM, 0);
    NEED(sendto(stranger, "psst", 4, 0, (struct sockaddr *)&inner, sizeof inner) == 4);
    say(fd, "after the stranger");
    heard(server, "after the stranger");
    close(stranger);
    NEED(d2tp_close(fd) == 0 && d2tp_close(server) == 0);
}

int main(void) {
    alarm(240);
    messages_keep_their_bounds_and_senders_their_names();
    what_fits_no_packet_is_emsgsize();
    a_message_may_ask_for_its_own_way_and_time();
    what_is_late_is_not_sent();
    ends_are_told_and_last_words_arrive();
    what_cannot_be_is_said();
    puts("ok");
    return 0;
}
