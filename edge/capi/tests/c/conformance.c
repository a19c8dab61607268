/*
 * What a program sees of its sockets, one line for each call that matters: compiled for the kernel's TCP
 * and for D2TP, and compared line by line (tests/conformance.rs).
 */
#include "bsd.h"

static const char *current = "";

static void say(const char *step, long value, int error) {
    printf("%s/%s: ", current, step);
    if (value == -1)
        printf("-1 %s\n", strerrorname_np(error) ? strerrorname_np(error) : "?");
    else
        printf("%ld\n", value);
}

/* A call's value, and errno where it failed. */
#define SAY(step, call) \
    do { \
        errno = 0; \
        long value_ = (long)(call); \
        say(step, value_, errno); \
    } while (0)

static void say_events(const char *step, int revents) {
    printf("%s/%s:%s%s%s%s%s\n", current, step, revents & POLLIN ? " IN" : "",
           revents & POLLOUT ? " OUT" : "", revents & POLLRDHUP ? " RDHUP" : "",
           revents & POLLERR ? " ERR" : "", revents & POLLHUP ? " HUP" : "");
}

static int so_error(int fd) {
    int error = 0;
    socklen_t len = sizeof error;
    NEED(BSD(getsockopt)(fd, SOL_SOCKET, SO_ERROR, &error, &len) == 0);
    return error;
}

static void say_error(const char *step, int fd) {
    int error = so_error(fd);
    printf("%s/%s: %s\n", current, step, error ? strerrorname_np(error) : "0");
}

static void half_close(void) {
    int c, s;
    char buf[16];
    connection(&c, &s);
    send_all(c, "ask", 3);
    SAY("client ends", BSD(shutdown)(c, SHUT_WR));
    SAY("server reads", BSD(recv)(s, buf, sizeof buf, MSG_WAITALL));
    SAY("server reads the end", BSD(recv)(s, buf, sizeof buf, 0));
    SAY("and again", BSD(recv)(s, buf, sizeof buf, 0));
    SAY("client writes after its end", BSD(send)(c, "x", 1, NOSIGNAL));
    SAY("server answers", BSD(send)(s, "answer", 6, NOSIGNAL));
    SAY("client reads", BSD(recv)(c, buf, 6, MSG_WAITALL));
    SAY("server ends", BSD(shutdown)(s, SHUT_WR));
    SAY("client reads the end", BSD(recv)(c, buf, sizeof buf, 0));
    SAY("server writes after its end", BSD(send)(s, "x", 1, NOSIGNAL));
    SAY("client closes", BSD(close)(c));
    SAY("server closes", BSD(close)(s));
    connection(&c, &s);
    SAY("server ends first", BSD(shutdown)(s, SHUT_WR));
    SAY("client reads the end first", BSD(recv)(c, buf, sizeof buf, 0));
    SAY("client goes on", BSD(send)(c, "more", 4, NOSIGNAL));
    SAY("server reads it", BSD(recv)(s, buf, 4, MSG_WAITALL));
    SAY("both at once", BSD(shutdown)(c, SHUT_RDWR));
    SAY("server reads that end", BSD(recv)(s, buf, sizeof buf, 0));
    SAY("client reads after SHUT_RD", BSD(recv)(c, buf, sizeof buf, 0));
    SAY("bad how", BSD(shutdown)(s, 9));
    BSD(close)(c);
    BSD(close)(s);
}

static void zero_length(void) {
    int c, s;
    char buf[4];
    connection(&c, &s);
    SAY("send nothing", BSD(send)(c, "", 0, NOSIGNAL));
    SAY("write nothing", BSD(write)(c, "", 0));
    SAY("nothing came of it", BSD(recv)(s, buf, sizeof buf, MSG_DONTWAIT));
    send_all(c, "ab", 2);
    until(s, POLLIN);
    SAY("recv nothing", BSD(recv)(s, buf, 0, 0));
    SAY("read nothing", BSD(read)(s, buf, 0));
    SAY("it is still there", BSD(recv)(s, buf, sizeof buf, 0));
    BSD(close)(c);
    BSD(close)(s);
}

static void nonblocking(void) {
    struct sockaddr_in at;
    char buf[4];
    int ear = listener(5, &at);
    NEED(BSD(fcntl)(ear, F_SETFL, O_NONBLOCK) == 0);
    SAY("accept of nothing", BSD(accept)(ear, NULL, NULL));
    int c = client_socket(SOCK_NONBLOCK);
    SAY("flags", BSD(fcntl)(c, F_GETFL, 0) & O_NONBLOCK ? 1 : 0);
    SAY("connect", BSD(connect)(c, (struct sockaddr *)&at, sizeof at));
    say_events("connected", until(c, POLLOUT));
    say_error("error", c);
    SAY("connect when made", BSD(connect)(c, (struct sockaddr *)&at, sizeof at));
    SAY("connect again", BSD(connect)(c, (struct sockaddr *)&at, sizeof at));
    say_events("listener", until(ear, POLLIN));
    int s = BSD(accept4)(ear, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    SAY("accepted flags", BSD(fcntl)(s, F_GETFL, 0) & O_NONBLOCK ? 1 : 0);
    SAY("accepted closes on exec", BSD(fcntl)(s, F_GETFD, 0));
    SAY("read nothing yet", BSD(recv)(c, buf, sizeof buf, 0));
    SAY("read nothing yet on the other", BSD(read)(s, buf, sizeof buf));
    int full = 0;
    static char block[65536];
    for (long sent = 0; sent < 256 << 20; ) {
        ssize_t n = BSD(send)(c, block, sizeof block, NOSIGNAL);
        if (n < 0) {
            full = errno;
            /* Buffers beyond this one may still take some of it. */
            struct pollfd one = {.fd = c, .events = POLLOUT};
            if (BSD(poll)(&one, 1, 300) == 0)
                break;
        } else {
            sent += n;
        }
    }
    printf("%s/full: %s\n", current, strerrorname_np(full));
    BSD(close)(c);
    BSD(close)(s);
    BSD(close)(ear);
}

static void flags(void) {
    int c, s;
    char buf[16] = "";
    connection(&c, &s);
    SAY("dontwait", BSD(recv)(s, buf, sizeof buf, MSG_DONTWAIT));
    send_all(c, "abcdef", 6);
    until(s, POLLIN);
    SAY("peek", BSD(recv)(s, buf, 3, MSG_PEEK));
    SAY("peek again", BSD(recv)(s, buf, sizeof buf, MSG_PEEK));
    SAY("read after it", BSD(recv)(s, buf, 4, 0));
    SAY("the same bytes", memcmp(buf, "abcd", 4));
    SAY("truncate counts what is there", BSD(recv)(s, buf, 1, MSG_TRUNC));
    send_all(c, "xyz", 3);
    SAY("shut", BSD(shutdown)(c, SHUT_WR));
    SAY("waitall up to the end", BSD(recv)(s, buf, sizeof buf, MSG_WAITALL));
    SAY("out of band", BSD(send)(s, "!", 1, MSG_OOB | NOSIGNAL));
    SAY("more", BSD(send)(s, "m", 1, MSG_MORE | NOSIGNAL));
    SAY("and rest", BSD(send)(s, "r", 1, NOSIGNAL));
    SAY("bad flags on recv", BSD(recv)(c, buf, 1, MSG_ERRQUEUE | MSG_DONTWAIT));
    BSD(close)(c);
    BSD(close)(s);
}

static void *send_rest(void *fd) {
    usleep(50 * 1000);
    send_all(*(int *)fd, "rest", 4);
    return NULL;
}

static void waitall(void) {
    int c, s;
    char buf[16];
    pthread_t thread;
    connection(&c, &s);
    send_all(c, "first", 5);
    NEED(pthread_create(&thread, NULL, send_rest, &c) == 0);
    SAY("waits for all", BSD(recv)(s, buf, 9, MSG_WAITALL));
    NEED(pthread_join(thread, NULL) == 0);
    BSD(close)(c);
    BSD(close)(s);
}

static void timeouts(void) {
    int c, s;
    char buf[4];
    static char block[1 << 20];
    struct timeval time = {.tv_usec = 50 * 1000};
    connection(&c, &s);
    SAY("set", BSD(setsockopt)(s, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof time));
    SAY("recv", BSD(recv)(s, buf, sizeof buf, 0));
    SAY("set for send", BSD(setsockopt)(c, SOL_SOCKET, SO_SNDTIMEO, &time, sizeof time));
    ssize_t n;
    while ((n = BSD(send)(c, block, sizeof block, NOSIGNAL)) > 0) {
    }
    say("send", n, errno);
    BSD(close)(c);
    BSD(close)(s);
}

static void on_alarm(int number) { (void)number; }

static void interrupted(void) {
    int c, s;
    char buf[4];
    connection(&c, &s);
    struct sigaction action = {.sa_handler = on_alarm};
    struct itimerval soon = {.it_value.tv_usec = 50 * 1000};
    NEED(sigaction(SIGALRM, &action, NULL) == 0);
    NEED(setitimer(ITIMER_REAL, &soon, NULL) == 0);
    SAY("recv", BSD(recv)(c, buf, sizeof buf, 0));
    BSD(close)(c);
    BSD(close)(s);
}

/* Sends until that fails, as the peer's answer takes its time. */
static long send_until_error(int fd) {
    for (;;) {
        ssize_t n = BSD(send)(fd, "x", 1, NOSIGNAL);
        if (n < 0)
            return n;
        struct pollfd one = {.fd = fd, .events = 0};
        BSD(poll)(&one, 1, 10);
    }
}

static void broken(void) {
    int c, s;
    char buf[16];
    struct linger now = {.l_onoff = 1, .l_linger = 0};
    connection(&c, &s);
    SAY("peer closes", BSD(close)(s));
    SAY("end", BSD(recv)(c, buf, sizeof buf, 0));
    SAY("send to nobody", send_until_error(c));
    SAY("and again", BSD(send)(c, "x", 1, NOSIGNAL));
    say_error("error after it was told", c);
    BSD(close)(c);

    connection(&c, &s);
    send_all(c, "unread", 6);
    until(s, POLLIN);
    SAY("peer closes without reading", BSD(close)(s));
    say_events("reset", until(c, POLLIN) & ~POLLOUT);
    SAY("recv", BSD(recv)(c, buf, sizeof buf, 0));
    SAY("recv after it", BSD(recv)(c, buf, sizeof buf, 0));
    SAY("send after it", BSD(send)(c, "x", 1, NOSIGNAL));
    BSD(close)(c);

    connection(&c, &s);
    SAY("set linger", BSD(setsockopt)(s, SOL_SOCKET, SO_LINGER, &now, sizeof now));
    SAY("abort", BSD(close)(s));
    until(c, POLLIN);
    say_error("aborted", c);
    say_error("once", c);
    SAY("recv when told", BSD(recv)(c, buf, sizeof buf, 0));
    BSD(close)(c);

    connection(&c, &s);
    send_all(s, "last words", 10);
    struct linger wait = {.l_onoff = 1, .l_linger = 10};
    SAY("set long linger", BSD(setsockopt)(s, SOL_SOCKET, SO_LINGER, &wait, sizeof wait));
    SAY("close lingers", BSD(close)(s));
    SAY("words arrive", BSD(recv)(c, buf, 10, MSG_WAITALL));
    SAY("then the end", BSD(recv)(c, buf, sizeof buf, 0));
    BSD(close)(c);
}

static void refused(void) {
    struct sockaddr_in at;
    int ear = listener(5, &at);
    NEED(BSD(close)(ear) == 0);
    int c = client_socket(0);
    struct timeval time = {.tv_usec = 200 * 1000};
    NEED(BSD(setsockopt)(c, SOL_SOCKET, SO_SNDTIMEO, &time, sizeof time) == 0);
    SAY("nobody listens", BSD(connect)(c, (struct sockaddr *)&at, sizeof at));
    BSD(close)(c);
}

static void backlog(void) {
    struct sockaddr_in at;
    int c[4], order = 0;
    char buf[4];
    int ear = listener(8, &at);
    for (int i = 0; i < 4; i++) {
        c[i] = client_socket(0);
        NEED(BSD(connect)(c[i], (struct sockaddr *)&at, sizeof at) == 0);
        send_all(c[i], &"abcd"[i], 1);
    }
    for (int i = 0; i < 4; i++) {
        int s = BSD(accept)(ear, NULL, NULL);
        NEED(s >= 0 && BSD(recv)(s, buf, 1, 0) == 1);
        order += buf[0];
        BSD(close)(s);
    }
    SAY("all four", order == 'a' + 'b' + 'c' + 'd');
    for (int i = 0; i < 4; i++)
        BSD(close)(c[i]);
    BSD(close)(ear);
}

static void states(void) {
    struct sockaddr_in at, other;
    socklen_t len = sizeof other;
    char buf[4];
    int c = client_socket(0);
    SAY("recv unconnected", BSD(recv)(c, buf, sizeof buf, 0));
    SAY("send unconnected", BSD(send)(c, buf, sizeof buf, NOSIGNAL));
    SAY("shutdown unconnected", BSD(shutdown)(c, SHUT_WR));
    SAY("peer of unconnected", BSD(getpeername)(c, (struct sockaddr *)&other, &len));
    SAY("accept of no listener", BSD(accept)(c, NULL, NULL));
    int ear = listener(5, &at);
    SAY("listen again", BSD(listen)(ear, 6));
    SAY("bind a listener", BSD(bind)(ear, (struct sockaddr *)&at, sizeof at));
    SAY("recv of a listener", BSD(recv)(ear, buf, sizeof buf, 0));
    int second = BSD(socket)(AF_INET, SOCK_STREAM, 0);
    SAY("address in use", BSD(bind)(second, (struct sockaddr *)&at, sizeof at));
    other = loopback(0);
    other.sin_addr.s_addr = htonl(0xc0000201);
    SAY("address of another host", BSD(bind)(second, (struct sockaddr *)&other, sizeof other));
    other = loopback(0);
    SAY("bind after that", BSD(bind)(second, (struct sockaddr *)&other, sizeof other));
    SAY("bind twice", BSD(bind)(second, (struct sockaddr *)&other, sizeof other));
    BSD(close)(second);
    SAY("connect", BSD(connect)(c, (struct sockaddr *)&at, sizeof at));
    SAY("connect twice", BSD(connect)(c, (struct sockaddr *)&at, sizeof at));
    SAY("listen on connected", BSD(listen)(c, 5));
    int s = BSD(accept)(ear, (struct sockaddr *)&other, &len);
    SAY("peer's family", other.sin_family == AF_INET && len == sizeof other);
    len = sizeof other;
    SAY("peer", BSD(getpeername)(c, (struct sockaddr *)&other, &len));
    SAY("peer is the listener", other.sin_port == at.sin_port && other.sin_addr.s_addr == at.sin_addr.s_addr);
    len = sizeof other;
    SAY("own name", BSD(getsockname)(s, (struct sockaddr *)&other, &len));
    SAY("own name is the listener's", other.sin_port == at.sin_port);
    len = sizeof other;
    SAY("client's own name", BSD(getsockname)(c, (struct sockaddr *)&other, &len));
    SAY("has a port", other.sin_port != 0);
    SAY("and an address", other.sin_addr.s_addr != 0);
    len = 4;
    SAY("short place", BSD(getpeername)(c, (struct sockaddr *)&other, &len));
    SAY("says how long it is", len);
    BSD(close)(c);
    BSD(close)(s);
    BSD(close)(ear);
    int again = BSD(socket)(AF_INET, SOCK_STREAM, 0);
    int one = 1;
    BSD(setsockopt)(again, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    SAY("the address is free again", BSD(bind)(again, (struct sockaddr *)&at, sizeof at));
    SAY("and can be listened at", BSD(listen)(again, 5));
    /* By the kernel's own call, which no library hears. */
    close(again);
    again = BSD(socket)(AF_INET, SOCK_STREAM, 0);
    BSD(setsockopt)(again, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    SAY("and after a plain close", BSD(bind)(again, (struct sockaddr *)&at, sizeof at));
    BSD(close)(again);
}

static void mistakes(void) {
    struct sockaddr_in at = loopback(9);
    socklen_t len = sizeof at;
    char buf[4];
    int value = 1;
    /* Volatile: the compiler knows better than to let it through. */
    void *volatile nowhere = (void *)8;
    int c, s;
    connection(&c, &s);
    SAY("family", BSD(socket)(AF_INET + 1000, SOCK_STREAM, 0));
    SAY("protocol", BSD(socket)(AF_INET, SOCK_STREAM, IPPROTO_UDP));
    int files[2];
    NEED(pipe(files) == 0);
    int pipe_fd = files[0];
    SAY("bad descriptor: send", BSD(send)(-1, "x", 1, NOSIGNAL));
    SAY("bad descriptor: recv", BSD(recv)(9999, buf, 1, 0));
    SAY("bad descriptor: connect", BSD(connect)(9999, (struct sockaddr *)&at, len));
    SAY("bad descriptor: bind", BSD(bind)(-1, (struct sockaddr *)&at, len));
    SAY("bad descriptor: listen", BSD(listen)(-1, 1));
    SAY("bad descriptor: accept", BSD(accept)(9999, NULL, NULL));
    SAY("bad descriptor: getsockopt", BSD(getsockopt)(-1, SOL_SOCKET, SO_TYPE, &value, &len));
    SAY("bad descriptor: setsockopt", BSD(setsockopt)(-1, SOL_SOCKET, SO_KEEPALIVE, &value, sizeof value));
    SAY("bad descriptor: getpeername", BSD(getpeername)(-1, (struct sockaddr *)&at, &len));
    SAY("bad descriptor: getsockname", BSD(getsockname)(-1, (struct sockaddr *)&at, &len));
    SAY("bad descriptor: shutdown", BSD(shutdown)(-1, SHUT_WR));
    SAY("bad descriptor: close", BSD(close)(-1));
    SAY("bad descriptor: fcntl", BSD(fcntl)(-1, F_GETFL, 0));
    SAY("bad descriptor: read", BSD(read)(-1, buf, 1));
    SAY("bad descriptor: write", BSD(write)(-1, buf, 1));
    SAY("no socket: send", BSD(send)(pipe_fd, "x", 1, NOSIGNAL));
    SAY("no socket: connect", BSD(connect)(pipe_fd, (struct sockaddr *)&at, sizeof at));
    SAY("no socket: getsockname", BSD(getsockname)(pipe_fd, (struct sockaddr *)&at, &len));
    SAY("no socket: write", BSD(write)(files[1], "x", 1));
    SAY("no socket: read", BSD(read)(pipe_fd, buf, 1));
    SAY("no socket: close", BSD(close)(pipe_fd));
    close(files[1]);
    SAY("bad memory: send", BSD(send)(c, nowhere, 10, NOSIGNAL));
    SAY("bad memory: write", BSD(write)(c, nowhere, 10));
    send_all(c, "x", 1);
    until(s, POLLIN);
    SAY("bad memory: recv", BSD(recv)(s, nowhere, 10, 0));
    SAY("bad memory: sendmsg", BSD(sendmsg)(c, nowhere, NOSIGNAL));
    SAY("bad memory: recvmsg", BSD(recvmsg)(s, nowhere, 0));
    SAY("bad memory: getsockopt", BSD(getsockopt)(c, SOL_SOCKET, SO_TYPE, nowhere, &len));
    SAY("bad memory: getsockopt's length", BSD(getsockopt)(c, SOL_SOCKET, SO_ERROR, &value, nowhere));
    SAY("bad memory: setsockopt", BSD(setsockopt)(c, SOL_SOCKET, SO_KEEPALIVE, nowhere, sizeof value));
    SAY("bad memory: getpeername", BSD(getpeername)(c, nowhere, &len));
    SAY("bad memory: getpeername's length", BSD(getpeername)(c, (struct sockaddr *)&at, nowhere));
    SAY("bad memory: getsockname", BSD(getsockname)(c, nowhere, &len));
    SAY("bad memory: poll", BSD(poll)(nowhere, 1, 0));
    SAY("bad memory: select", BSD(select)(1, nowhere, NULL, NULL, NULL));
    BSD(close)(c);
    BSD(close)(s);
    c = client_socket(0);
    SAY("bad memory: connect", BSD(connect)(c, nowhere, sizeof at));
    SAY("bad memory: bind", BSD(bind)(c, nowhere, sizeof at));
    at = loopback(9);
    SAY("short address", BSD(connect)(c, (struct sockaddr *)&at, 8));
    SAY("short address: bind", BSD(bind)(c, (struct sockaddr *)&at, 8));
    at.sin_family = AF_UNIX;
    SAY("address of another family", BSD(connect)(c, (struct sockaddr *)&at, sizeof at));
    at.sin_family = AF_INET6;
    SAY("short address of another family", BSD(connect)(c, (struct sockaddr *)&at, sizeof at));
    SAY("unknown option", BSD(setsockopt)(c, SOL_SOCKET, 9999, &value, sizeof value));
    SAY("short option", BSD(setsockopt)(c, SOL_SOCKET, SO_KEEPALIVE, &value, 1));
    SAY("negative timeout", BSD(poll)(NULL, 0, 0));
    BSD(close)(c);
}

static void say_option(const char *step, int fd, int name) {
    int value = -2;
    socklen_t len = sizeof value;
    errno = 0;
    long got = BSD(getsockopt)(fd, SOL_SOCKET, name, &value, &len);
    if (got == 0)
        got = value * 10 + (long)len;
    say(step, got, errno);
}

static void options(void) {
    int c, s, value = 1;
    struct sockaddr_in at;
    int ear = listener(5, &at);
    connection(&c, &s);
    say_option("type", c, SO_TYPE);
    say_option("domain", c, SO_DOMAIN);
    say_option("protocol", c, SO_PROTOCOL);
    say_option("no error", c, SO_ERROR);
    say_option("listens", ear, SO_ACCEPTCONN);
    say_option("listens not", c, SO_ACCEPTCONN);
    SAY("keepalive", BSD(setsockopt)(c, SOL_SOCKET, SO_KEEPALIVE, &value, sizeof value));
    say_option("kept alive", c, SO_KEEPALIVE);
    SAY("nodelay", BSD(setsockopt)(c, IPPROTO_TCP, TCP_NODELAY, &value, sizeof value));
    int six = BSD(socket)(AF_INET6, SOCK_STREAM, 0);
    SAY("only IPv6", BSD(setsockopt)(six, IPPROTO_IPV6, IPV6_V6ONLY, &value, sizeof value));
    say_option("domain of IPv6", six, SO_DOMAIN);
    BSD(close)(six);
    BSD(close)(ear);
    BSD(close)(c);
    BSD(close)(s);
}

static void polling(void) {
    int c, s;
    char buf[4];
    const int all = POLLIN | POLLOUT | POLLRDHUP;
    struct pollfd one = {.events = all};
    connection(&c, &s);
    one.fd = c;
    NEED(BSD(poll)(&one, 1, 0) == 1);
    say_events("at rest", one.revents);
    send_all(s, "x", 1);
    until(c, POLLIN);
    NEED(BSD(poll)(&one, 1, 0) == 1);
    say_events("with a byte", one.revents);
    NEED(BSD(recv)(c, buf, 1, 0) == 1);
    NEED(BSD(shutdown)(s, SHUT_WR) == 0);
    until(c, POLLRDHUP);
    NEED(BSD(poll)(&one, 1, 0) == 1);
    say_events("after the peer's end", one.revents);
    NEED(BSD(shutdown)(c, SHUT_WR) == 0);
    until(c, POLLHUP);
    NEED(BSD(poll)(&one, 1, 0) == 1);
    say_events("after both ends", one.revents);
    BSD(close)(c);
    BSD(close)(s);
}

/* Its descriptor beside those of the kernel's TCP in select and epoll. */
static void mixed(void) {
    int c, s, plain[2];
    char buf[8];
    NEED(socketpair(AF_UNIX, SOCK_STREAM, 0, plain) == 0);
    connection(&c, &s);
    int epoll = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.fd = c}, got[4];
    NEED(epoll_ctl(epoll, EPOLL_CTL_ADD, c, &event) == 0);
    event.data.fd = plain[0];
    NEED(epoll_ctl(epoll, EPOLL_CTL_ADD, plain[0], &event) == 0);
    SAY("nothing", epoll_wait(epoll, got, 4, 0));
    send_all(s, "one", 3);
    SAY("one", epoll_wait(epoll, got, 4, -1));
    SAY("is ours", got[0].data.fd == c);
    SAY("edge", epoll_wait(epoll, got, 4, 0));
    NEED(write(plain[1], "x", 1) == 1);
    SAY("the other", epoll_wait(epoll, got, 4, -1));
    fd_set set;
    FD_ZERO(&set);
    FD_SET(c, &set);
    FD_SET(plain[0], &set);
    SAY("select", BSD(select)((c > plain[0] ? c : plain[0]) + 1, &set, NULL, NULL, NULL));
    SAY("plain read", read(c, buf, sizeof buf));
    SAY("plain write", write(c, "back", 4));
    SAY("arrives", BSD(recv)(s, buf, 4, MSG_WAITALL));
    int bytes = -1;
    send_all(s, "12345", 5);
    until(c, POLLIN);
    NEED(ioctl(c, FIONREAD, &bytes) == 0);
    SAY("bytes there", bytes);
    close(epoll);
    close(plain[0]);
    close(plain[1]);
    BSD(close)(c);
    BSD(close)(s);
}

static void vectors(void) {
    int c, s;
    char a[3], b[5], buf[16];
    connection(&c, &s);
    struct iovec out[2] = {{"abc", 3}, {"defgh", 5}}, in[2] = {{a, 3}, {b, 5}};
    SAY("writev", BSD(writev)(c, out, 2));
    until(s, POLLIN);
    SAY("readv", BSD(readv)(s, in, 2));
    SAY("in order", memcmp(a, "abc", 3) + memcmp(b, "defgh", 5));
    struct msghdr message = {.msg_iov = out, .msg_iovlen = 2};
    SAY("sendmsg", BSD(sendmsg)(c, &message, NOSIGNAL));
    struct sockaddr_in from;
    struct msghdr to = {.msg_iov = in, .msg_iovlen = 2, .msg_name = &from, .msg_namelen = sizeof from};
    SAY("recvmsg", BSD(recvmsg)(s, &to, MSG_WAITALL));
    SAY("flags", to.msg_flags);
    SAY("name", to.msg_namelen);
    socklen_t len = sizeof from;
    SAY("sendto", BSD(sendto)(c, "x", 1, NOSIGNAL, NULL, 0));
    SAY("recvfrom", BSD(recvfrom)(s, buf, sizeof buf, 0, (struct sockaddr *)&from, &len));
    FILE *file = tmpfile();
    NEED(file && fwrite("from a file", 1, 11, file) == 11 && fflush(file) == 0);
    off_t at = 5;
    SAY("sendfile", sendfile(c, fileno(file), &at, 100));
    SAY("of the file", BSD(recv)(s, buf, 6, MSG_WAITALL));
    SAY("its bytes", memcmp(buf, "a file", 6));
    fclose(file);
    volatile int fewer = -1;
    SAY("too few vectors", BSD(writev)(c, out, fewer));
    BSD(close)(c);
    BSD(close)(s);
}

static void descriptors(void) {
    int c, s;
    char buf[8];
    struct sockaddr_in peer;
    socklen_t len = sizeof peer;
    connection(&c, &s);
    int twin = dup(c);
    SAY("close one", BSD(close)(c));
    SAY("the other writes", BSD(send)(twin, "twin", 4, NOSIGNAL));
    SAY("which arrives", BSD(recv)(s, buf, 4, MSG_WAITALL));
    SAY("and knows its peer", BSD(getpeername)(twin, (struct sockaddr *)&peer, &len));
    SAY("no end yet", BSD(recv)(s, buf, 4, MSG_DONTWAIT));
    SAY("close it", BSD(close)(twin));
    SAY("now the end", BSD(recv)(s, buf, 4, 0));
    int next = BSD(socket)(AF_INET, SOCK_STREAM, 0);
    SAY("the lowest number is taken again", next == c);
    SAY("which is not connected", BSD(getpeername)(next, (struct sockaddr *)&peer, &len));
    BSD(close)(next);
    BSD(close)(s);

    connection(&c, &s);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        BSD(close)(s);
        int ok = BSD(send)(c, "child", 5, NOSIGNAL) == 5 && BSD(recv)(c, buf, 4, MSG_WAITALL) == 4;
        _exit(ok ? 0 : 1);
    }
    int status = -1;
    SAY("a child's bytes", BSD(recv)(s, buf, 5, MSG_WAITALL));
    SAY("answer to it", BSD(send)(s, "mine", 4, NOSIGNAL));
    SAY("the child is gone", waitpid(child, &status, 0) == child);
    SAY("and had its answer", status);
    SAY("the connection is not", BSD(send)(c, "parent", 6, NOSIGNAL));
    SAY("it goes on", BSD(recv)(s, buf, 6, MSG_WAITALL));
    BSD(close)(c);
    SAY("until its last descriptor", BSD(recv)(s, buf, 1, 0));
    BSD(close)(s);

    /* A server that forks for each connection. */
    struct sockaddr_in at;
    int ear = listener(5, &at);
    fflush(stdout);
    child = fork();
    if (child == 0) {
        int one = BSD(accept)(ear, NULL, NULL);
        ssize_t n = BSD(recv)(one, buf, sizeof buf, 0);
        _exit(one >= 0 && n > 0 && BSD(send)(one, buf, n, NOSIGNAL) == n ? 0 : 1);
    }
    c = client_socket(0);
    SAY("connect to a child", BSD(connect)(c, (struct sockaddr *)&at, sizeof at));
    SAY("ask it", BSD(send)(c, "echo", 4, NOSIGNAL));
    SAY("it answers", BSD(recv)(c, buf, 4, MSG_WAITALL));
    SAY("it ends", BSD(recv)(c, buf, 4, 0));
    SAY("it leaves", waitpid(child, &status, 0) == child && status == 0);
    BSD(close)(c);
    BSD(close)(ear);
}

enum { BULK = 24 << 20 };

static void *fill(void *fd) {
    static __thread unsigned char block[100003];
    size_t sent = 0;
    for (size_t i = 0; i < sizeof block; i++)
        block[i] = (unsigned char)(i * 7);
    while (sent < BULK) {
        size_t n = BULK - sent < sizeof block ? BULK - sent : sizeof block;
        send_all(*(int *)fd, block, n);
        sent += n;
    }
    NEED(BSD(shutdown)(*(int *)fd, SHUT_WR) == 0);
    return NULL;
}

static void *drain(void *fd) {
    static __thread unsigned char block[70001];
    uintptr_t wrong = 0;
    size_t at = 0;
    ssize_t n;
    while ((n = BSD(recv)(*(int *)fd, block, sizeof block, 0)) > 0)
        for (ssize_t i = 0; i < n; i++, at++)
            wrong += block[i] != (unsigned char)(at % 100003 * 7);
    if (at != BULK) fprintf(stderr, "at %zu n %zd errno %d\n", at, n, errno);
    return (void *)(wrong + (at == BULK ? 0 : 1));
}

static void bulk(void) {
    int c, s;
    pthread_t threads[4];
    void *wrong[2];
    connection(&c, &s);
    NEED(pthread_create(&threads[0], NULL, fill, &c) == 0);
    NEED(pthread_create(&threads[1], NULL, drain, &s) == 0);
    NEED(pthread_create(&threads[2], NULL, fill, &s) == 0);
    NEED(pthread_create(&threads[3], NULL, drain, &c) == 0);
    pthread_join(threads[0], NULL);
    pthread_join(threads[1], &wrong[0]);
    pthread_join(threads[2], NULL);
    pthread_join(threads[3], &wrong[1]);
    SAY("wrong bytes up", (uintptr_t)wrong[0]);
    SAY("wrong bytes down", (uintptr_t)wrong[1]);
    BSD(close)(c);
    BSD(close)(s);
}

static struct sockaddr_in storm_at;

static void *echo_server(void *fd) {
    char buf[256];
    int s;
    while ((s = BSD(accept)(*(int *)fd, NULL, NULL)) >= 0) {
        ssize_t n;
        while ((n = BSD(recv)(s, buf, sizeof buf, 0)) > 0)
            send_all(s, buf, n);
        BSD(close)(s);
    }
    return NULL;
}

static void *echo_client(void *number) {
    char out[64], in[64];
    uintptr_t wrong = 0;
    for (int i = 0; i < 12; i++) {
        int c = client_socket(0);
        NEED(BSD(connect)(c, (struct sockaddr *)&storm_at, sizeof storm_at) == 0);
        memset(out, (int)(uintptr_t)number + i, sizeof out);
        send_all(c, out, sizeof out);
        NEED(BSD(shutdown)(c, SHUT_WR) == 0);
        wrong += BSD(recv)(c, in, sizeof in, MSG_WAITALL) != sizeof in || memcmp(in, out, sizeof in);
        wrong += BSD(recv)(c, in, sizeof in, 0) != 0;
        BSD(close)(c);
    }
    return (void *)wrong;
}

static void storm(void) {
    enum { CLIENTS = 16, SERVERS = 4 };
    pthread_t clients[CLIENTS], servers[SERVERS];
    uintptr_t wrong = 0;
    int ear = listener(64, &storm_at);
    for (int i = 0; i < SERVERS; i++)
        NEED(pthread_create(&servers[i], NULL, echo_server, &ear) == 0);
    for (uintptr_t i = 0; i < CLIENTS; i++)
        NEED(pthread_create(&clients[i], NULL, echo_client, (void *)i) == 0);
    for (int i = 0; i < CLIENTS; i++) {
        void *one;
        pthread_join(clients[i], &one);
        wrong += (uintptr_t)one;
    }
    SAY("wrong echoes", wrong);
    /* Ends the accepts that wait. */
    SAY("shut the listener", BSD(shutdown)(ear, SHUT_RD));
    for (int i = 0; i < SERVERS; i++)
        pthread_join(servers[i], NULL);
    BSD(close)(ear);
}

static const struct {
    const char *name;
    void (*run)(void);
} cases[] = {
    {"half-close", half_close}, {"zero", zero_length},   {"nonblocking", nonblocking},
    {"flags", flags},           {"waitall", waitall},    {"timeouts", timeouts},
    {"interrupted", interrupted}, {"broken", broken},    {"refused", refused},
    {"backlog", backlog},       {"states", states},      {"mistakes", mistakes},
    {"options", options},       {"polling", polling},    {"mixed", mixed},
    {"vectors", vectors},       {"descriptors", descriptors}, {"bulk", bulk},
    {"storm", storm},
};

static void *watchdog(void *unused) {
    (void)unused;
    sleep(120);
    fprintf(stderr, "%s takes too long\n", current);
    abort();
}

int main(int argc, char **argv) {
    pthread_t dog;
    NEED(pthread_create(&dog, NULL, watchdog, NULL) == 0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        if (argc > 1 && strcmp(argv[1], cases[i].name) != 0)
            continue;
        current = cases[i].name;
        cases[i].run();
        fflush(stdout);
    }
    return 0;
}
