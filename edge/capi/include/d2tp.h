/*
 * libd2tp: the BSD socket calls over D2TP, with real descriptors. docs/sockets.md explains them.
 *
 * Every call takes any descriptor: one that is no D2TP socket goes to the kernel as it is. Errors are
 * errno's. No thread is started before the first socket, and no SIGPIPE is raised by these calls.
 */
#ifndef D2TP_H
#define D2TP_H

#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>

/* As <netdb.h> has it, which strict C hides unless _POSIX_C_SOURCE is 200112L or more. */
struct addrinfo;

#ifdef __cplusplus
extern "C" {
#endif

/* A name and, where it is not all zero, the key of the D2TP server there. Fits a sockaddr_storage. As a domain of
 * d2tp_socket it takes addresses of every family. */
#define AF_D2TP 210

struct sockaddr_d2tp {
    sa_family_t sd_family;  /* AF_D2TP */
    in_port_t sd_port;      /* network byte order */
    uint8_t sd_key[32];
    char sd_host[92];       /* ends with 0 */
};

/* Options. "any time": before connect and while connected; accepted sockets begin with their listener's. */
#define SOL_D2TP 0xd2

/* int or int64_t: seconds from now, 0 for none; struct timespec: a time of day. Then both ends drop the
 * connection (ETIME). Reads as int64_t: seconds left. Any time. */
#define D2TP_SO_DEADLINE 1
/* uint64_t: bytes expected in all, 0 when not known. Any time. */
#define D2TP_SO_ESIZE 2
/* int: which networks may be paid for. Any time. */
#define D2TP_SO_POLICY 3
#define D2TP_POLICY_FREE_ONLY 0  /* none */
#define D2TP_POLICY_FREE_FIRST 1 /* when the deadline needs it (the default) */
#define D2TP_POLICY_BALANCED 2   /* the same, with twice the slack */
#define D2TP_POLICY_FAST 3       /* all, at any time */
#define D2TP_POLICY_ANY 4        /* all, when no free one works */
/* uint64_t: bytes that networks which cost may carry, UINT64_MAX for no limit. Any time. When it is used up and
 * no free network works the connection ends (EDQUOT), unless it is D2TP_IFLATE_WAIT. */
#define D2TP_SO_BUDGET 4
/* int: 0 goes first (the default), 7 last. Before connect. */
#define D2TP_SO_PRIORITY 5
/* int: what to do when free networks will not make the deadline. Any time. */
#define D2TP_SO_IFLATE 6
#define D2TP_IFLATE_CELL 0 /* pay, up to the budget (the default) */
#define D2TP_IFLATE_WAIT 1 /* be late: the connection outlives its deadline */
#define D2TP_IFLATE_FAIL 2 /* do not pay, and end at the deadline */
/* struct d2tp_info, to be read. */
#define D2TP_SO_INFO 7
/* Text, to be read: why the connection broke, empty if it did not. */
#define D2TP_SO_ERROR 8
/* 32 bytes, or 43 characters: the key of the D2TP server that connect is to find. Before connect. */
#define D2TP_SO_PEERKEY 9
/* Text: d2tp://host:port/KEY of the proxy; else $CEDOS_PROX. Before connect. */
#define D2TP_SO_PROXY 10
/* Text, to be read: this process's own public key. */
#define D2TP_SO_HOSTKEY 11
/* struct d2tp_rcvbufth: what is to be held ahead of the program, up to 64 MiB of memory; all 0, the default, is what
 * the kernel holds. Free networks fill it; those that cost are used from dr_low on, up to dr_high. Any time. */
#define D2TP_SO_RCVBUFTH 12
#define D2TP_RCVBUFTH_BYTES 0
#define D2TP_RCVBUFTH_MS 1
/* int: what goes on after this process has ended, carried by the user's agent; without one EOPNOTSUPP. Before connect.
 * Where that is all, reads into 32 bytes or more after connect: the token that d2tp_reopen takes. */
#define D2TP_SO_PERSIST 13
#define D2TP_PERSIST_NO 0      /* nothing (the default) */
#define D2TP_PERSIST_WRITTEN 1 /* what was written goes on to the peer */
#define D2TP_PERSIST_OPEN 2    /* the connection stays, for a day at most, until d2tp_reopen or d2tp_close */
#define D2TP_TOKEN_BYTES 32
/* int, milliseconds, 1 to a day: how long a datagram is worth sending (default: 1000). Any time; also for one
 * message, as a control message of sendmsg. */
#define D2TP_SO_EXPIRY 14
/* int: which paths carry what is sent. Any time; also for one message, as a control message of sendmsg. */
#define D2TP_SO_ROUTE 15
#define D2TP_ROUTE_ANY 0       /* whichever is fastest (the default) */
#define D2TP_ROUTE_STEADIEST 1 /* the one least likely to fail */
#define D2TP_ROUTE_EACH 2      /* a copy on each; the first to arrive counts */

struct d2tp_rcvbufth {
    uint64_t dr_low;  /* networks that cost begin when no more than this is ahead */
    uint64_t dr_high; /* and end here: 64 MiB or a day at most, and no less than dr_low */
    uint32_t dr_unit; /* D2TP_RCVBUFTH_BYTES, or _MS: milliseconds at the rate that the program reads */
    uint32_t dr_rate; /* that rate in bytes a second; 0: as it is measured */
};

#define D2TP_PATHS_MAX 8

struct d2tp_path_info {
    char dpi_link[16];           /* as the system calls it */
    uint32_t dpi_class;          /* 0 free, 1 metered, 2 roaming */
    uint32_t dpi_state;          /* 0 opening, 1 works, 2 silent */
    uint32_t dpi_rtt_us;         /* smoothed */
    uint32_t dpi_rtt_min_us;
    uint64_t dpi_bytes_received; /* payload of the whole session */
    uint64_t dpi_bytes_sent;     /* the same, what was sent again included */
    uint64_t dpi_rate;           /* bytes a second lately, 0 when not known */
};

struct d2tp_info {
    uint32_t di_version;       /* 1 */
    uint32_t di_size;          /* of the whole, as the library knows it */
    uint32_t di_state;         /* 0 no connection, 1 connecting, 2 connected, 3 over */
    uint32_t di_reason;        /* why nothing moves: 0 nothing known, 1 no_path, 2 path_cost */
    uint64_t di_bytes_sent;    /* taken from the program */
    uint64_t di_bytes_acked;   /* of those, what the peer has */
    uint64_t di_bytes_received;
    int64_t di_slack_ms;       /* until the deadline; -1 without one */
    uint32_t di_paths_count;
    uint32_t di_reserved;
    struct d2tp_path_info di_paths[D2TP_PATHS_MAX];
    uint64_t di_bytes_ahead;   /* of those received, what the program has not read */
};

/* AF_INET or AF_INET6, SOCK_STREAM or SOCK_DGRAM, with SOCK_NONBLOCK and SOCK_CLOEXEC. */
int d2tp_socket(int domain, int type, int protocol);
int d2tp_bind(int fd, const struct sockaddr *addr, socklen_t len);
int d2tp_listen(int fd, int backlog);
int d2tp_accept(int fd, struct sockaddr *addr, socklen_t *len);
int d2tp_accept4(int fd, struct sockaddr *addr, socklen_t *len, int flags);
/* To a D2TP server where its key is known (sockaddr_d2tp, D2TP_SO_PEERKEY), else to any host and port
 * through the proxy. */
int d2tp_connect(int fd, const struct sockaddr *addr, socklen_t len);
/* A connection that is D2TP_PERSIST_OPEN and whose process has ended: reading goes on with the first byte that it had
 * not read. ENOENT: none of this token; EBUSY: its process is there. flags: SOCK_NONBLOCK, SOCK_CLOEXEC. */
int d2tp_reopen(const void *token, socklen_t len, int flags);
int d2tp_shutdown(int fd, int how);
int d2tp_close(int fd);

ssize_t d2tp_send(int fd, const void *buf, size_t len, int flags);
ssize_t d2tp_recv(int fd, void *buf, size_t len, int flags);
ssize_t d2tp_sendto(int fd, const void *buf, size_t len, int flags, const struct sockaddr *to,
                    socklen_t tolen);
ssize_t d2tp_recvfrom(int fd, void *buf, size_t len, int flags, struct sockaddr *from,
                      socklen_t *fromlen);
ssize_t d2tp_sendmsg(int fd, const struct msghdr *msg, int flags);
ssize_t d2tp_recvmsg(int fd, struct msghdr *msg, int flags);
ssize_t d2tp_read(int fd, void *buf, size_t len);
ssize_t d2tp_write(int fd, const void *buf, size_t len);
ssize_t d2tp_readv(int fd, const struct iovec *iov, int count);
ssize_t d2tp_writev(int fd, const struct iovec *iov, int count);
/* Waits until the peer has all that was written: timeout_ms, or for ever if it is negative. */
int d2tp_flush(int fd, int timeout_ms);

int d2tp_getsockname(int fd, struct sockaddr *addr, socklen_t *len);
int d2tp_getpeername(int fd, struct sockaddr *addr, socklen_t *len);
int d2tp_getsockopt(int fd, int level, int name, void *value, socklen_t *len);
int d2tp_setsockopt(int fd, int level, int name, const void *value, socklen_t len);
int d2tp_fcntl(int fd, int cmd, ...);
/* node: d2tp://host:port/KEY, a numeric address, or a name, which the proxy looks up. */
int d2tp_getaddrinfo(const char *node, const char *service, const struct addrinfo *hints,
                     struct addrinfo **found);
void d2tp_freeaddrinfo(struct addrinfo *found);

int d2tp_select(int count, fd_set *read, fd_set *write, fd_set *except, struct timeval *timeout);
int d2tp_poll(struct pollfd *fds, nfds_t count, int timeout_ms);

/* The networks changed and this process may not have seen it. */
int d2tp_network_changed(void);
/* While one is held the machine is woken for connections of this process that wait for a network, and kept awake while
 * they move: each returns how many are held. */
int d2tp_dlock_acquire(void);
int d2tp_dlock_release(void);

#ifdef __cplusplus
}
#endif

#endif
