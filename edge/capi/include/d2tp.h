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

/* Address family of struct sockaddr_d2tp: a name and, unless it is all zero, the key of the D2TP
 * server there. The structure fits into a sockaddr_storage. As a domain of d2tp_socket it accepts
 * addresses of every family. It is none of the kernel's families, which end below 64. */
#define AF_D2TP 210

/* The level of D2TP's options. "Any time" means before connect and while connected; accepted
 * sockets inherit their listener's options. */
#define SOL_D2TP 210

/* int or int64_t: seconds from now, 0 for none; struct timespec: a time of day. At the deadline
 * both ends drop the connection (ETIME). Reads as int64_t: seconds left. Any time. */
#define D2TP_SO_DEADLINE 1

/* uint64_t: total bytes expected, 0 if unknown. Any time. */
#define D2TP_SO_ESIZE 2

/* int: which networks may be paid for, one of the D2TP_POLICY values. Any time. */
#define D2TP_SO_POLICY 3

/* D2TP_SO_POLICY: never use metered networks. */
#define D2TP_POLICY_FREE_ONLY 0

/* D2TP_SO_POLICY: use metered networks when the deadline needs it (the default). */
#define D2TP_POLICY_FREE_FIRST 1

/* D2TP_SO_POLICY: use metered networks when the deadline needs it, with twice the slack. */
#define D2TP_POLICY_BALANCED 2

/* D2TP_SO_POLICY: use all networks at any time. */
#define D2TP_POLICY_FAST 3

/* D2TP_SO_POLICY: use metered networks when no free one works. */
#define D2TP_POLICY_ANY 4

/* uint64_t: bytes that metered networks may carry, UINT64_MAX for no limit. Any time. When the
 * budget is used up and no free network works, the connection ends (EDQUOT), unless D2TP_SO_IFLATE
 * is D2TP_IFLATE_WAIT. */
#define D2TP_SO_BUDGET 4

/* int: priority, 0 (the default) to 7; higher goes first. Before connect. */
#define D2TP_SO_PRIORITY 5

/* int: what to do when free networks cannot meet the deadline. Any time. */
#define D2TP_SO_IFLATE 6

/* D2TP_SO_IFLATE: pay, up to the budget (the default). */
#define D2TP_IFLATE_CELL 0

/* D2TP_SO_IFLATE: be late; the connection continues after its deadline. */
#define D2TP_IFLATE_WAIT 1

/* D2TP_SO_IFLATE: do not pay, and end at the deadline. */
#define D2TP_IFLATE_FAIL 2

/* struct d2tp_info, read only: the state of the connection. */
#define D2TP_SO_INFO 7

/* Text, read only: why the connection broke; empty if it did not. */
#define D2TP_SO_ERROR 8

/* 32 bytes, or 43 characters: the key of the D2TP server to connect to. Before connect. */
#define D2TP_SO_PEERKEY 9

/* Text: d2tp://host:port/KEY of the proxy; the default is $CEDOS_PROX, or that of the settings. Before connect. */
#define D2TP_SO_PROXY 10

/* Text, read only: the public key of this process. */
#define D2TP_SO_HOSTKEY 11

/* struct d2tp_rcvbufth: how much to buffer ahead of the program, up to 64 MiB; all 0, the default:
 * only the kernel's buffers. Free networks fill the buffer; metered networks are used from
 * dr_low on, up to dr_high. Any time. */
#define D2TP_SO_RCVBUFTH 12

/* dr_unit of struct d2tp_rcvbufth: bytes. */
#define D2TP_RCVBUFTH_BYTES 0

/* dr_unit of struct d2tp_rcvbufth: milliseconds at the rate that the program reads. */
#define D2TP_RCVBUFTH_MS 1

/* int: what persists after this process has ended, carried by the user's agent; EOPNOTSUPP without
 * one. Before connect. With D2TP_PERSIST_OPEN, a read into 32 bytes or more after connect returns
 * the token for d2tp_reopen. */
#define D2TP_SO_PERSIST 13

/* D2TP_SO_PERSIST: nothing persists (the default). */
#define D2TP_PERSIST_NO 0

/* D2TP_SO_PERSIST: written data is still delivered to the peer. */
#define D2TP_PERSIST_WRITTEN 1

/* D2TP_SO_PERSIST: the connection stays open, for a day at most, until d2tp_reopen or d2tp_close. */
#define D2TP_PERSIST_OPEN 2

/* The size of the token for d2tp_reopen, in bytes. */
#define D2TP_TOKEN_BYTES 32

/* int, milliseconds, 1 to a day: after this time a datagram that could not be sent is dropped
 * (default: 1000). Any time; also for one message, as a control message of sendmsg. */
#define D2TP_SO_EXPIRY 14

/* int: which paths carry sent data. Any time; also for one message, as a control message of
 * sendmsg. */
#define D2TP_SO_ROUTE 15

/* D2TP_SO_ROUTE: the fastest path (the default). */
#define D2TP_ROUTE_ANY 0

/* D2TP_SO_ROUTE: the path that is least likely to fail. */
#define D2TP_ROUTE_STEADIEST 1

/* D2TP_SO_ROUTE: a copy on each path; the first to arrive counts. */
#define D2TP_ROUTE_EACH 2

/* The most paths in struct d2tp_info. */
#define D2TP_PATHS_MAX 8

/* The address of AF_D2TP. */
struct sockaddr_d2tp {
    /* The address family, `AF_D2TP`. */
    sa_family_t sd_family;
    /* The port in network byte order. */
    in_port_t sd_port;
    /* The server's public key; all 0: none. */
    uint8_t sd_key[32];
    /* The host name, after which ?stream=PORT may stand for a server with a key, terminated by 0. */
    char sd_host[92];
};

/* The value of D2TP_SO_RCVBUFTH. */
struct d2tp_rcvbufth {
    /* Metered networks are used from this level on: when no more than this is buffered. */
    uint64_t dr_low;
    /* Metered networks are used up to this level: at most 64 MiB or a day, and at least dr_low. */
    uint64_t dr_high;
    /* The unit of the levels: D2TP_RCVBUFTH_BYTES or D2TP_RCVBUFTH_MS. */
    uint32_t dr_unit;
    /* The rate at which the program reads, in bytes per second; 0: measured. */
    uint32_t dr_rate;
};

/* A path of a connection. */
struct d2tp_path_info {
    /* The name of the link's network device. */
    char dpi_link[16];
    /* The cost class: 0 free, 1 metered, 2 roaming. */
    uint32_t dpi_class;
    /* The state of the path: 0 opening, 1 works, 2 silent. */
    uint32_t dpi_state;
    /* The smoothed round trip, in microseconds. */
    uint32_t dpi_rtt_us;
    /* The smallest round trip measured, in microseconds. */
    uint32_t dpi_rtt_min_us;
    /* Payload bytes received by the whole session on this path. */
    uint64_t dpi_bytes_received;
    /* Payload bytes sent by the whole session on this path, retransmissions included. */
    uint64_t dpi_bytes_sent;
    /* The recent rate in bytes per second; 0 if unknown. */
    uint64_t dpi_rate;
};

/* The value of D2TP_SO_INFO: the state of a socket. */
struct d2tp_info {
    /* The version of this structure: 1. */
    uint32_t di_version;
    /* The size of the structure in bytes, as the library knows it. */
    uint32_t di_size;
    /* The state: 0 no connection, 1 connecting, 2 connected, 3 over. */
    uint32_t di_state;
    /* Why no data moves: 0 no known reason, 1 no_path, 2 path_cost. */
    uint32_t di_reason;
    /* Bytes taken from the program. */
    uint64_t di_bytes_sent;
    /* Sent bytes that the peer has acknowledged. */
    uint64_t di_bytes_acked;
    uint64_t di_bytes_received;
    /* Milliseconds until the deadline; -1 without a deadline. */
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

/* The socket's own address: the UDP address that it was bound to. A socket that only connected has
 * no address, because it moves; its port then distinguishes the sockets of a process. */
int d2tp_getsockname(int fd, struct sockaddr *address, socklen_t *len);

/* The address of the peer: as `connect` was given it, or the current one of an accepted
 * connection's device. */
int d2tp_getpeername(int fd, struct sockaddr *address, socklen_t *len);

/* getaddrinfo(3) for D2TP: `d2tp://host:port/KEY`, a numeric address, or a name, which is not
 * resolved here but by the proxy. */
int d2tp_getaddrinfo(const char *node, const char *service, const struct addrinfo *hints, struct addrinfo **found);

/* Frees the result of `d2tp_getaddrinfo`. */
void d2tp_freeaddrinfo(struct addrinfo *found);

/* Creates a socket over D2TP: AF_INET, AF_INET6 or AF_D2TP, each of which accepts addresses of all
 * three families; SOCK_STREAM or SOCK_DGRAM, with SOCK_NONBLOCK and SOCK_CLOEXEC. */
int d2tp_socket(int domain, int kind, int protocol);

/* Binds the socket to a UDP address for listening. */
int d2tp_bind(int fd, const struct sockaddr *address, socklen_t len);

/* Listens for connections at the socket's address. */
int d2tp_listen(int fd, int backlog);

/* Accepts a connection. */
int d2tp_accept(int fd, struct sockaddr *address, socklen_t *len);

/* Accepts a connection, with SOCK_NONBLOCK and SOCK_CLOEXEC in `flags`. */
int d2tp_accept4(int fd, struct sockaddr *address, socklen_t *len, int flags);

/* Connects to a D2TP server if its key is known (sockaddr_d2tp, D2TP_SO_PEERKEY), else to any host
 * and port through the proxy. */
int d2tp_connect(int fd, const struct sockaddr *address, socklen_t len);

/* Opens a connection again that has D2TP_PERSIST_OPEN and whose process has ended. Reading
 * continues with the first byte that it had not read. ENOENT: there is none with this token;
 * EBUSY: its process exists. flags: SOCK_NONBLOCK, SOCK_CLOEXEC. */
int d2tp_reopen(const void *token, socklen_t len, int flags);

/* Ends one direction of a connection or both. */
int d2tp_shutdown(int fd, int how);

/* Closes the descriptor. With SO_LINGER it first waits until the peer has received all written
 * data. */
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

/* sendto(2); a connected stream ignores the address, like the kernel's. */
ssize_t d2tp_sendto(int fd, const void *buffer, size_t len, int flags, const struct sockaddr *to, socklen_t to_len);

/* recvfrom(2) */
ssize_t d2tp_recvfrom(int fd, void *buffer, size_t len, int flags, struct sockaddr *from, socklen_t *from_len);

/* sendmsg(2) */
ssize_t d2tp_sendmsg(int fd, const struct msghdr *message, int flags);

/* recvmsg(2) */
ssize_t d2tp_recvmsg(int fd, struct msghdr *message, int flags);

/* read(2) */
ssize_t d2tp_read(int fd, void *buffer, size_t len);

/* write(2), without SIGPIPE for sockets. */
ssize_t d2tp_write(int fd, const void *buffer, size_t len);

/* readv(2) */
ssize_t d2tp_readv(int fd, const struct iovec *pieces, int count);

/* writev(2), without SIGPIPE for sockets. */
ssize_t d2tp_writev(int fd, const struct iovec *pieces, int count);

/* Waits until the peer has received everything written so far: at most `timeout_ms` milliseconds,
 * or without limit if that is negative. EAGAIN: not yet. */
int d2tp_flush(int fd, int timeout_ms);

/* select(2), over any descriptors. */
int d2tp_select(int count, fd_set *read, fd_set *write, fd_set *except, struct timeval *timeout);

/* poll(2), over any descriptors. */
int d2tp_poll(struct pollfd *fds, nfds_t count, int timeout_ms);

/* Tells the library that the networks changed in a way that it may not have seen: every link is
 * tried at once. */
int d2tp_network_changed(void);

/* Acquires a D-Lock. While one is held, the machine is woken for connections of this process that
 * wait for a network, and kept awake while they move data. Returns how many are held. */
int d2tp_dlock_acquire(void);

/* Releases a D-Lock. Returns how many are still held. */
int d2tp_dlock_release(void);

#ifdef __cplusplus
}
#endif

#endif  /* D2TP_H */
