/* io_uring on descriptors of ours: send, poll, recv and close as the kernel's own requests, by bare system calls. */
#include "bsd.h"

#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>

static struct {
    int fd;
    unsigned *tail, *mask, *head_done, *tail_done, *mask_done;
    unsigned *order;
    struct io_uring_sqe *asked;
    struct io_uring_cqe *done;
} ring;

static void *mapped(int fd, size_t bytes, off_t what) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, what);
    NEED(at != MAP_FAILED);
    return at;
}

static int open_ring(void) {
    struct io_uring_params p = {0};
    ring.fd = syscall(SYS_io_uring_setup, 8, &p);
    if (ring.fd < 0)
        return 0;
    char *sq = mapped(ring.fd, p.sq_off.array + p.sq_entries * sizeof(unsigned), IORING_OFF_SQ_RING);
    char *cq = mapped(ring.fd, p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe), IORING_OFF_CQ_RING);
    ring.asked = mapped(ring.fd, p.sq_entries * sizeof(struct io_uring_sqe), IORING_OFF_SQES);
    ring.tail = (unsigned *)(sq + p.sq_off.tail);
    ring.mask = (unsigned *)(sq + p.sq_off.ring_mask);
    ring.order = (unsigned *)(sq + p.sq_off.array);
    ring.head_done = (unsigned *)(cq + p.cq_off.head);
    ring.tail_done = (unsigned *)(cq + p.cq_off.tail);
    ring.mask_done = (unsigned *)(cq + p.cq_off.ring_mask);
    ring.done = (struct io_uring_cqe *)(cq + p.cq_off.cqes);
    return 1;
}

static void ask(int what, int fd, const void *at, unsigned bytes, unsigned long long name) {
    unsigned tail = *ring.tail, slot = tail & *ring.mask;
    struct io_uring_sqe one = {.opcode = what, .fd = fd, .addr = (uintptr_t)at, .len = bytes, .user_data = name};
    if (what == IORING_OP_POLL_ADD)
        one.poll32_events = POLLIN;
    ring.asked[slot] = one;
    ring.order[slot] = slot;
    __atomic_store_n(ring.tail, tail + 1, __ATOMIC_RELEASE);
    NEED(syscall(SYS_io_uring_enter, ring.fd, 1, 0, 0, NULL, 0) == 1);
}

/* The next answer is `name`'s; what it is. */
static int answered(unsigned long long name) {
    unsigned head = *ring.head_done;
    while (head == __atomic_load_n(ring.tail_done, __ATOMIC_ACQUIRE))
        NEED(syscall(SYS_io_uring_enter, ring.fd, 0, 1, IORING_ENTER_GETEVENTS, NULL, 0) >= 0);
    struct io_uring_cqe one = ring.done[head & *ring.mask_done];
    __atomic_store_n(ring.head_done, head + 1, __ATOMIC_RELEASE);
    NEED(one.user_data == name);
    return one.res;
}

int main(void) {
    int c, s, kernel[2];
    char buf[100];
    alarm(120);
    connection(&c, &s);
    if (!open_ring()) {
        printf("no io_uring here: %s\n", strerror(errno));
        return 0;
    }
    /* It waits before there is anything, and beside a descriptor of another kind. */
    NEED(socketpair(AF_UNIX, SOCK_STREAM, 0, kernel) == 0);
    ask(IORING_OP_POLL_ADD, s, NULL, 0, 1);
    ask(IORING_OP_RECV, kernel[1], buf + 50, 50, 2);
    ask(IORING_OP_SEND, c, "by the ring", 11, 3);
    NEED(answered(3) == 11);
    NEED(answered(1) & POLLIN);
    ask(IORING_OP_RECV, s, buf, 50, 4);
    NEED(answered(4) == 11 && memcmp(buf, "by the ring", 11) == 0);
    NEED(write(kernel[0], "other", 5) == 5);
    NEED(answered(2) == 5);
    /* A read that waits is woken by the end. */
    ask(IORING_OP_RECV, s, buf, 50, 5);
    NEED(d2tp_shutdown(c, SHUT_WR) == 0);
    NEED(answered(5) == 0);
    ask(IORING_OP_CLOSE, s, NULL, 0, 6);
    NEED(answered(6) == 0);
    NEED(d2tp_recv(c, buf, sizeof buf, 0) == 0);
    puts("ok");
    return 0;
}
