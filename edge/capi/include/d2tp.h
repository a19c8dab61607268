/*
 * libd2tp: the BSD socket calls over D2TP, with real descriptors. docs/sockets.md explains them.
 *
 * Every call takes any descriptor: one that is no D2TP socket goes to the kernel as it is. Errors are
 * errno's. No thread is started before the first socket, and no SIGPIPE is raised by these calls.
 *
 * Generated from the sources of the library by `cargo xtask header`: edit those.
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

/* A name and, where it is not all zero, the key of the D2TP server there: struct sockaddr_d2tp. Fits a
 * sockaddr_storage. As a domain of d2tp_socket it takes addresses of every family. Not one of the kernel's
 * families, which end below 64. */
#define AF_D2TP 210

/* The level of the options. "any time" is before connect and while connected; accepted sockets begin with
 * their listener's. */
#define SOL_D2TP 210

/* int or int64_t: seconds from now, 0 for none; struct timespec: a time of day. Then both ends drop the
 * connection (ETIME). Reads as int64_t: seconds left. Any time. */
#define D2TP_SO_DEADLINE 1

/* uint64_t: bytes expected in all, 0 when not known. Any time. */
#define D2TP_SO_ESIZE 2

/* int: which networks may be paid for. Any time. */
#define D2TP_SO_POLICY 3

/* D2TP_SO_POLICY: none. */
#define D2TP_POLICY_FREE_ONLY 0

/* D2TP_SO_POLICY: when the deadline needs it (the default). */
#define D2TP_POLICY_FREE_FIRST 1

/* D2TP_SO_POLICY: when the deadline needs it, with twice the slack. */
#define D2TP_POLICY_BALANCED 2

/* D2TP_SO_POLICY: all, at any time. */
#define D2TP_POLICY_FAST 3

/* D2TP_SO_POLICY: all, when no free one works. */
#define D2TP_POLICY_ANY 4

/* uint64_t: bytes that networks which cost may carry, UINT64_MAX for no limit. Any time. When it is used up and
 * no free network works the connection ends (EDQUOT), unless it is D2TP_IFLATE_WAIT. */
#define D2TP_SO_BUDGET 4

/* int: 0 (the default) to 7; higher goes first. Before connect. */
#define D2TP_SO_PRIORITY 5

/* int: what to do when free networks will not make the deadline. Any time. */
#define D2TP_SO_IFLATE 6

/* D2TP_SO_IFLATE: pay, up to the budget (the default). */
#define D2TP_IFLATE_CELL 0

/* D2TP_SO_IFLATE: be late; the connection outlives its deadline. */
#define D2TP_IFLATE_WAIT 1

/* D2TP_SO_IFLATE: do not pay, and end at the deadline. */
#define D2TP_IFLATE_FAIL 2

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

/* struct d2tp_rcvbufth: what is to be held ahead of the program, up to 64 MiB of memory; all 0, the default, is
 * what the kernel holds. Free networks fill it; those that cost are used from dr_low on, up to dr_high. Any time. */
#define D2TP_SO_RCVBUFTH 12

/* dr_unit of struct d2tp_rcvbufth: bytes. */
#define D2TP_RCVBUFTH_BYTES 0

/* dr_unit of struct d2tp_rcvbufth: milliseconds at the rate that the program reads. */
#define D2TP_RCVBUFTH_MS 1

/* int: what goes on after this process has ended, carried by the user's agent; without one EOPNOTSUPP. Before
 * connect. Where that is all, reads into 32 bytes or more after connect: the token that d2tp_reopen takes. */
#define D2TP_SO_PERSIST 13

/* D2TP_SO_PERSIST: nothing (the default). */
#define D2TP_PERSIST_NO 0

/* D2TP_SO_PERSIST: what was written goes on to the peer. */
#define D2TP_PERSIST_WRITTEN 1

/* D2TP_SO_PERSIST: the connection stays, for a day at most, until d2tp_reopen or d2tp_close. */
#define D2TP_PERSIST_OPEN 2

/* Bytes of the token that d2tp_reopen takes. */
#define D2TP_TOKEN_BYTES 32

/* int, milliseconds, 1 to a day: how long a datagram is worth sending (default: 1000). Any time; also for one
 * message, as a control message of sendmsg. */
#define D2TP_SO_EXPIRY 14

/* int: which paths carry what is sent. Any time; also for one message, as a control message of sendmsg. */
#define D2TP_SO_ROUTE 15

/* D2TP_SO_ROUTE: whichever is fastest (the default). */
#define D2TP_ROUTE_ANY 0

/* D2TP_SO_ROUTE: the one least likely to fail. */
#define D2TP_ROUTE_STEADIEST 1

/* D2TP_SO_ROUTE: a copy on each; the first to arrive counts. */
#define D2TP_ROUTE_EACH 2

/* Paths in struct d2tp_info at most. */
#define D2TP_PATHS_MAX 8

/* The address of AF_D2TP. */
struct sockaddr_d2tp {
    /* AF_D2TP. */
    sa_family_t sd_family;
    /* In network byte order. */
    in_port_t sd_port;
    /* The server's public key; all 0: none. */
    uint8_t sd_key[32];
    /* The name, which ends with 0. */
    char sd_host[92];
};

/* The value of D2TP_SO_RCVBUFTH. */
struct d2tp_rcvbufth {
    /* Networks that cost begin when no more than this is ahead. */
    uint64_t dr_low;
    /* Networks that cost end at this: 64 MiB or a day at most, and no less than dr_low. */
    uint64_t dr_high;
    /* D2TP_RCVBUFTH_BYTES or D2TP_RCVBUFTH_MS. */
    uint32_t dr_unit;
    /* The rate that the program reads at, in bytes a second; 0: as it is measured. */
    uint32_t dr_rate;
};

/* A path of a connection. */
struct d2tp_path_info {
    /* The link, as the system calls it. */
    char dpi_link[16];
    /* 0 free, 1 metered, 2 roaming. */
    uint32_t dpi_class;
    /* 0 opening, 1 works, 2 silent. */
    uint32_t dpi_state;
    /* Smoothed round trip. */
    uint32_t dpi_rtt_us;
    /* Least round trip measured. */
    uint32_t dpi_rtt_min_us;
    /* Payload of the whole session. */
    uint64_t dpi_bytes_received;
    /* Payload of the whole session, what was sent again included. */
    uint64_t dpi_bytes_sent;
    /* Bytes a second lately, 0 when not known. */
    uint64_t dpi_rate;
};

/* The value of D2TP_SO_INFO: what a socket does. */
struct d2tp_info {
    /* 1. */
    uint32_t di_version;
    /* Bytes of the whole, as the library knows it. */
    uint32_t di_size;
    /* 0 no connection, 1 connecting, 2 connected, 3 over. */
    uint32_t di_state;
    /* Why nothing moves: 0 nothing known, 1 no_path, 2 path_cost. */
    uint32_t di_reason;
    /* Taken from the program. */
    uint64_t di_bytes_sent;
    /* Sent bytes that the peer has. */
    uint64_t di_bytes_acked;
    uint64_t di_bytes_received;
    /* Until the deadline; -1 without one. */
    int64_t di_slack_ms;
    uint32_t di_paths_count;
    uint32_t di_reserved;
    struct d2tp_path_info di_paths[D2TP_PATHS_MAX];
    /* Received bytes that the program has not read. */
    uint64_t di_bytes_ahead;
};

#ifdef __cplusplus
extern "C" {
#endif

/* Where the socket is: the UDP address that it was bound to. One that only connected has no address of
 * its own, for it moves; the port then tells sockets of one process apart. */
int d2tp_getsockname(int fd, struct sockaddr *address, socklen_t *len);

/* Who is at the far end: as `connect` named it, or where the device of an accepted flow is now. */
int d2tp_getpeername(int fd, struct sockaddr *address, socklen_t *len);

/* getaddrinfo(3) for D2TP: `d2tp://host:port/KEY`, a numeric address, or a name, which is not looked up
 * here but by the proxy. */
int d2tp_getaddrinfo(const char *node, const char *service, const struct addrinfo *hints, struct addrinfo **found);

/* Gives back what `d2tp_getaddrinfo` found. */
void d2tp_freeaddrinfo(struct addrinfo *found);

/* A socket over D2TP: AF_INET, AF_INET6 or AF_D2TP, which takes the addresses of all; SOCK_STREAM or SOCK_DGRAM,
 * with SOCK_NONBLOCK and SOCK_CLOEXEC. */
int d2tp_socket(int domain, int kind, int protocol);

/* Takes a UDP address to listen at. */
int d2tp_bind(int fd, const struct sockaddr *address, socklen_t len);

/* Lets others' flows come to the socket's address. */
int d2tp_listen(int fd, int backlog);

/* The next connection. */
int d2tp_accept(int fd, struct sockaddr *address, socklen_t *len);

/* Accepts a connection, with SOCK_NONBLOCK and SOCK_CLOEXEC in `flags`. */
int d2tp_accept4(int fd, struct sockaddr *address, socklen_t *len, int flags);

/* Connects to a D2TP server where its key is known (sockaddr_d2tp, D2TP_SO_PEERKEY), else to any host and port
 * through the proxy. */
int d2tp_connect(int fd, const struct sockaddr *address, socklen_t len);

/* Opens a connection that is D2TP_PERSIST_OPEN and whose process has ended: reading goes on with the first byte that
 * it had not read. ENOENT: none of this token; EBUSY: its process is there. flags: SOCK_NONBLOCK, SOCK_CLOEXEC. */
int d2tp_reopen(const void *token, socklen_t len, int flags);

/* Ends one direction or both. */
int d2tp_shutdown(int fd, int how);

/* Gives the descriptor back. With SO_LINGER it waits until the peer has what was written. */
int d2tp_close(int fd);

/* setsockopt(2) */
int d2tp_setsockopt(int fd, int level, int name, const void *value, socklen_t len);

/* getsockopt(2) */
int d2tp_getsockopt(int fd, int level, int name, void *value, socklen_t *len);

/* fcntl(2) */
int d2tp_fcntl(int fd, int command, ...);

/* send(2) */
ssize_t d2tp_send(int fd, const void *buffer, size_t len, int flags);

/* recv(2) */
ssize_t d2tp_recv(int fd, void *buffer, size_t len, int flags);

/* sendto(2); a connected stream ignores the address, as the kernel does. */
ssize_t d2tp_sendto(int fd, const void *buffer, size_t len, int flags, const struct sockaddr *to, socklen_t to_len);

/* recvfrom(2) */
ssize_t d2tp_recvfrom(int fd, void *buffer, size_t len, int flags, struct sockaddr *from, socklen_t *from_len);

/* sendmsg(2) */
ssize_t d2tp_sendmsg(int fd, const struct msghdr *message, int flags);

/* recvmsg(2) */
ssize_t d2tp_recvmsg(int fd, struct msghdr *message, int flags);

/* read(2) */
ssize_t d2tp_read(int fd, void *buffer, size_t len);

/* write(2), and no SIGPIPE where it is a socket. */
ssize_t d2tp_write(int fd, const void *buffer, size_t len);

/* readv(2) */
ssize_t d2tp_readv(int fd, const struct iovec *pieces, int count);

/* writev(2), and no SIGPIPE where it is a socket. */
ssize_t d2tp_writev(int fd, const struct iovec *pieces, int count);

/* Waits until the peer has everything that was written so far: `timeout_ms` milliseconds, or as long as
 * it takes where that is below zero. EAGAIN: not yet. */
int d2tp_flush(int fd, int timeout_ms);

/* select(2), over any descriptors. */
int d2tp_select(int count, fd_set *read, fd_set *write, fd_set *except, struct timeval *timeout);

/* poll(2), over any descriptors. */
int d2tp_poll(struct pollfd *fds, nfds_t count, int timeout_ms);

/* The networks changed and this process may not have seen it: every link is tried at once. */
int d2tp_network_changed(void);

/* Takes a D-Lock. While one is held the machine is woken for connections of this process that wait for a network, and
 * kept awake while they move. Returns how many are held. */
int d2tp_dlock_acquire(void);

/* Gives a D-Lock back. Returns how many are still held. */
int d2tp_dlock_release(void);

#ifdef __cplusplus
}
#endif

#endif  /* D2TP_H */
