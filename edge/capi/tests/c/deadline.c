/* Deadlines, and what else only D2TP's sockets know. */
#include "bsd.h"

static int get_int(int fd, int name) {
    int value = -1;
    socklen_t len = sizeof value;
    NEED(d2tp_getsockopt(fd, SOL_D2TP, name, &value, &len) == 0 && len == sizeof value);
    return value;
}

static void cause(int fd, const char *word) {
    char text[200];
    socklen_t len = sizeof text;
    NEED(d2tp_getsockopt(fd, SOL_D2TP, D2TP_SO_ERROR, text, &len) == 0);
    if (!strstr(text, word)) {
        fprintf(stderr, "cause: %s\n", text);
        exit(1);
    }
}

int main(void) {
    struct sockaddr_in at;
    char buf[8];
    int minutes = 300, second = 1, none = 0, wait = D2TP_IFLATE_WAIT, c, s;
    int ear = listener(5, &at);

    /* It passes while both wait, and both hear of it. A busy machine may take longer than a second to connect. */
    c = client_socket(0);
    NEED(d2tp_setsockopt(c, SOL_D2TP, D2TP_SO_DEADLINE, &minutes, sizeof minutes) == 0);
    NEED(d2tp_connect(c, (struct sockaddr *)&at, sizeof at) == 0);
    s = d2tp_accept(ear, NULL, NULL);
    NEED(s >= 0);
    int64_t left = 0;
    socklen_t len = sizeof left;
    NEED(d2tp_getsockopt(c, SOL_D2TP, D2TP_SO_DEADLINE, &left, &len) == 0 && left > 200 && left <= 300);
    struct d2tp_info info;
    len = sizeof info;
    NEED(d2tp_getsockopt(c, SOL_D2TP, D2TP_SO_INFO, &info, &len) == 0);
    NEED(info.di_state == 2 && info.di_slack_ms > 200000 && info.di_slack_ms <= 300000);
    NEED(d2tp_setsockopt(c, SOL_D2TP, D2TP_SO_DEADLINE, &second, sizeof second) == 0);
    NEED(d2tp_recv(c, buf, sizeof buf, 0) == -1 && errno == ETIME);
    cause(c, "deadline passed");
    NEED(d2tp_recv(s, buf, sizeof buf, 0) == -1 && errno == ETIME);
    NEED(d2tp_close(c) == 0 && d2tp_close(s) == 0);

    /* It is taken back in time, and one that may be late is no end. */
    for (int late = 0; late < 2; late++) {
        c = client_socket(0);
        int *first = late ? &second : &minutes;
        NEED(d2tp_setsockopt(c, SOL_D2TP, D2TP_SO_DEADLINE, first, sizeof *first) == 0);
        if (late)
            NEED(d2tp_setsockopt(c, SOL_D2TP, D2TP_SO_IFLATE, &wait, sizeof wait) == 0);
        NEED(d2tp_connect(c, (struct sockaddr *)&at, sizeof at) == 0);
        s = d2tp_accept(ear, NULL, NULL);
        NEED(s >= 0);
        if (!late) {
            NEED(d2tp_setsockopt(c, SOL_D2TP, D2TP_SO_DEADLINE, &second, sizeof second) == 0);
            NEED(d2tp_setsockopt(c, SOL_D2TP, D2TP_SO_DEADLINE, &none, sizeof none) == 0);
        }
        struct timeval beyond = {.tv_sec = 1, .tv_usec = 300 * 1000};
        NEED(d2tp_setsockopt(c, SOL_SOCKET, SO_RCVTIMEO, &beyond, sizeof beyond) == 0);
        NEED(d2tp_recv(c, buf, sizeof buf, 0) == -1 && errno == EAGAIN);
        send_all(s, "on", 2);
        NEED(d2tp_recv(c, buf, 2, MSG_WAITALL) == 2);
        NEED(d2tp_close(c) == 0 && d2tp_close(s) == 0);
    }

    /* One that has passed is told before anything begins. */
    struct timespec past = {.tv_sec = 1};
    c = client_socket(0);
    NEED(d2tp_setsockopt(c, SOL_D2TP, D2TP_SO_DEADLINE, &past, sizeof past) == 0);
    NEED(d2tp_connect(c, (struct sockaddr *)&at, sizeof at) == -1 && errno == ETIME);
    NEED(d2tp_close(c) == 0);

    /* Options come back, on what is accepted too. */
    int policy = D2TP_POLICY_ANY;
    NEED(d2tp_setsockopt(ear, SOL_D2TP, D2TP_SO_POLICY, &policy, sizeof policy) == 0);
    NEED(get_int(ear, D2TP_SO_POLICY) == D2TP_POLICY_ANY);
    policy = 17;
    NEED(d2tp_setsockopt(ear, SOL_D2TP, D2TP_SO_POLICY, &policy, sizeof policy) == -1 && errno == EINVAL);
    NEED(d2tp_setsockopt(0, SOL_D2TP, D2TP_SO_POLICY, &policy, sizeof policy) == -1);

    /* Neither key nor proxy: there is nowhere to go. */
    c = d2tp_socket(AF_INET, SOCK_STREAM, 0);
    NEED(d2tp_connect(c, (struct sockaddr *)&at, sizeof at) == -1 && errno == ENETUNREACH);
    cause(c, "CEDOS_PROX");
    NEED(d2tp_close(c) == 0);
    puts("ok");
    return 0;
}
