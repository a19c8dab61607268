/* A process that has used sockets forks, and its child uses some of its own. */
#include "bsd.h"

static void talk(void) {
    int c, s;
    char buf[8];
    connection(&c, &s);
    send_all(c, "hello", 5);
    NEED(BSD(recv)(s, buf, 5, MSG_WAITALL) == 5 && memcmp(buf, "hello", 5) == 0);
    NEED(BSD(close)(c) == 0);
    NEED(BSD(recv)(s, buf, 5, 0) == 0);
    NEED(BSD(close)(s) == 0);
}

static void *keep_busy(void *end) {
    while (!__atomic_load_n((int *)end, __ATOMIC_ACQUIRE))
        talk();
    return NULL;
}

int main(void) {
    int end = 0;
    pthread_t thread;
    talk();
    /* Somebody is in the middle of a call whenever we fork. */
    NEED(pthread_create(&thread, NULL, keep_busy, &end) == 0);
    NEED(d2tp_dlock_acquire() == 1);
    for (int i = 0; i < 8; i++) {
        int policy = 1, status, c, s;
        connection(&c, &s);
        pid_t child = fork();
        NEED(child >= 0);
        if (child == 0) {
            /* What is the parent's engine's is not ours to steer. */
            NEED(d2tp_setsockopt(c, SOL_D2TP, D2TP_SO_POLICY, &policy, sizeof policy) == -1);
            NEED(errno == EOPNOTSUPP);
            NEED(d2tp_dlock_release() == -1 && errno == EINVAL);
            NEED(d2tp_dlock_acquire() == 1);
            talk();
            exit(0);
        }
        NEED(waitpid(child, &status, 0) == child && status == 0);
        NEED(BSD(close)(c) == 0 && BSD(close)(s) == 0);
    }
    __atomic_store_n(&end, 1, __ATOMIC_RELEASE);
    pthread_join(thread, NULL);
    NEED(d2tp_dlock_release() == 0);
    puts("ok");
    return 0;
}
