/* messages serve HOST [port=N], or messages to ADDRESS [policy=N | say=TEXT]: a datagram socket that does what it is told, line by line, and
 * says what came of it. One that serves says its address first, one that has a text at once nothing else. */
#include "bsd.h"

static int fd;
static struct sockaddr_in who;

static void said(const char *what, long value) {
    char text[300] = "";
    if (value >= 0) {
        printf("%s %ld\n", what, value);
    } else {
        const char *name = strerrorname_np(errno);
        socklen_t len = sizeof text;
        NEED(d2tp_getsockopt(fd, SOL_D2TP, D2TP_SO_ERROR, text, &len) == 0);
        printf("%s %s: %s\n", what, name, text);
    }
    fflush(stdout);
}

static void hear(void) {
    static char buf[70000];
    socklen_t len = sizeof who;
    ssize_t n = d2tp_recvfrom(fd, buf, sizeof buf - 1, 0, (struct sockaddr *)&who, &len);
    if (n < 0)
        return said("hear", n);
    buf[n < 50 ? n : 50] = 0;
    printf("hear %zd %s\n", n, buf);
    fflush(stdout);
}

/* How many come until none does for so long; the first so many are waited for as long as it takes. */
static void count(int silence_ms, long at_least) {
    static char buf[70000];
    struct pollfd one = {.fd = fd, .events = POLLIN};
    long all = 0, bytes = 0;
    while (poll(&one, 1, all < at_least ? -1 : silence_ms) == 1) {
        ssize_t n = d2tp_recv(fd, buf, sizeof buf, 0);
        if (n < 0)
            break;
        all++;
        bytes += n;
    }
    printf("count %ld %ld\n", all, bytes);
    fflush(stdout);
}

static ssize_t marked(const char *text, int route, int ms) {
    union {
        struct cmsghdr head;
        char bytes[2 * CMSG_SPACE(sizeof(int))];
    } control;
    int kinds[2] = {D2TP_SO_ROUTE, D2TP_SO_EXPIRY}, values[2] = {route, ms};
    struct iovec piece = {(void *)text, strlen(text)};
    struct msghdr message = {
        .msg_iov = &piece, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    struct cmsghdr *at = CMSG_FIRSTHDR(&message);
    for (int i = 0; i < 2; i++, at = (struct cmsghdr *)((char *)at + CMSG_SPACE(sizeof(int)))) {
        at->cmsg_level = SOL_D2TP;
        at->cmsg_type = kinds[i];
        at->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(at), &values[i], sizeof(int));
    }
    return d2tp_sendmsg(fd, &message, 0);
}

/* So many messages of so many bytes, with a pause after each. */
static long many(long messages, long bytes, long pause_us) {
    static char buf[70000];
    for (long i = 0; i < messages; i++) {
        if (d2tp_send(fd, buf, bytes, 0) < 0)
            return -1;
        usleep(pause_us);
    }
    return messages;
}

/* A child speaks by what it inherited. */
static long child(const char *text) {
    int status;
    pid_t pid = fork();
    NEED(pid >= 0);
    if (pid == 0)
        _exit(d2tp_send(fd, text, strlen(text), 0) == (ssize_t)strlen(text) ? 0 : 1);
    NEED(waitpid(pid, &status, 0) == pid);
    return WEXITSTATUS(status);
}

static long option(int name, int value) { return d2tp_setsockopt(fd, SOL_D2TP, name, &value, sizeof value); }

static void serve(const char *host, int port) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(port)};
    char key[64];
    socklen_t len = sizeof at;
    NEED(inet_pton(AF_INET, host, &at.sin_addr) == 1);
    NEED(d2tp_bind(fd, (struct sockaddr *)&at, sizeof at) == 0);
    NEED(d2tp_getsockname(fd, (struct sockaddr *)&at, &len) == 0);
    len = sizeof key;
    NEED(d2tp_getsockopt(fd, SOL_D2TP, D2TP_SO_HOSTKEY, key, &len) == 0);
    printf("d2tp://%s:%d/%s\n", host, ntohs(at.sin_port), key);
    fflush(stdout);
}

static void call(const char *address) {
    struct addrinfo *server;
    NEED(d2tp_getaddrinfo(address, NULL, NULL, &server) == 0);
    said("connect", d2tp_connect(fd, server->ai_addr, server->ai_addrlen));
    d2tp_freeaddrinfo(server);
}

int main(int argc, char **argv) {
    char line[300], word[50], text[200];
    if (argc < 3)
        return 2;
    fd = d2tp_socket(AF_INET, SOCK_DGRAM, 0);
    NEED(fd >= 0 && option(D2TP_SO_EXPIRY, 60000) == 0);
    if (argc > 3 && strncmp(argv[3], "policy=", 7) == 0)
        NEED(option(D2TP_SO_POLICY, atoi(argv[3] + 7)) == 0);
    if (strcmp(argv[1], "serve") == 0)
        serve(argv[2], argc > 3 && strncmp(argv[3], "port=", 5) == 0 ? atoi(argv[3] + 5) : 0);
    else
        call(argv[2]);
    if (argc > 3 && strncmp(argv[3], "say=", 4) == 0)
        return d2tp_send(fd, argv[3] + 4, strlen(argv[3] + 4), 0) > 0 ? 0 : 1;
    while (fgets(line, sizeof line, stdin)) {
        long a = 0, b = 0, c = 0;
        int rest = 0;
        text[0] = 0;
        if (sscanf(line, "%49s %n", word, &rest) < 1)
            continue;
        sscanf(line + rest, "%199s", text);
        sscanf(line + rest, "%ld %ld %ld", &a, &b, &c);
        if (strcmp(word, "say") == 0) {
            said("say", d2tp_send(fd, text, strlen(text), 0));
        } else if (strcmp(word, "write") == 0) {
            said("write", write(fd, text, strlen(text)));
        } else if (strcmp(word, "mark") == 0) {
            NEED(sscanf(line + rest, "%ld %ld %199s", &a, &b, text) == 3);
            said("mark", marked(text, (int)a, (int)b));
        } else if (strcmp(word, "many") == 0) {
            said("many", many(a, b, c));
        } else if (strcmp(word, "child") == 0) {
            said("child", child(text));
        } else if (strcmp(word, "answer") == 0) {
            said("answer", d2tp_sendto(fd, text, strlen(text), 0, (struct sockaddr *)&who, sizeof who));
        } else if (strcmp(word, "hear") == 0) {
            hear();
        } else if (strcmp(word, "count") == 0) {
            count((int)a, b);
        } else if (strcmp(word, "expiry") == 0) {
            said("expiry", option(D2TP_SO_EXPIRY, (int)a));
        } else if (strcmp(word, "deadline") == 0) {
            said("deadline", option(D2TP_SO_DEADLINE, (int)a));
        } else if (strcmp(word, "call") == 0) {
            call(text);
        } else if (strcmp(word, "twin") == 0) {
            /* The number that was is closed. */
            int other = dup(fd);
            NEED(other >= 0 && d2tp_close(fd) == 0);
            fd = other;
            said("twin", 0);
        } else if (strcmp(word, "info") == 0) {
            struct d2tp_info info;
            socklen_t len = sizeof info;
            NEED(d2tp_getsockopt(fd, SOL_D2TP, D2TP_SO_INFO, &info, &len) == 0);
            printf("info %u %llu %llu %u\n", info.di_state, (unsigned long long)info.di_bytes_sent,
                   (unsigned long long)info.di_bytes_received, info.di_paths_count);
            fflush(stdout);
        } else if (strcmp(word, "close") == 0) {
            said("close", d2tp_close(fd));
        } else if (strcmp(word, "exit") == 0) {
            /* With what it says just before. */
            NEED(d2tp_send(fd, text, strlen(text), 0) > 0);
            exit(0);
        } else if (strcmp(word, "die") == 0) {
            NEED(d2tp_send(fd, text, strlen(text), 0) > 0);
            raise(SIGKILL);
        } else {
            return 2;
        }
    }
    return 0;
}
