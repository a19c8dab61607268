package d2tp

/*
#include <arpa/inet.h>
#include <d2tp.h>
#include <stdio.h>
#include <stdlib.h>

// The far end in words, which has room for it.
static int far_end(int fd, char *words, size_t room) {
    struct sockaddr_storage at;
    socklen_t len = sizeof at;
    char host[INET6_ADDRSTRLEN] = "";
    if (d2tp_getpeername(fd, (struct sockaddr *)&at, &len) < 0)
        return -1;
    if (at.ss_family == AF_INET) {
        struct sockaddr_in *v4 = (struct sockaddr_in *)&at;
        inet_ntop(AF_INET, &v4->sin_addr, host, sizeof host);
        snprintf(words, room, "%s:%d", host, ntohs(v4->sin_port));
    } else if (at.ss_family == AF_INET6) {
        struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&at;
        inet_ntop(AF_INET6, &v6->sin6_addr, host, sizeof host);
        snprintf(words, room, "[%s]:%d", host, ntohs(v6->sin6_port));
    } else if (at.ss_family == AF_D2TP) {
        struct sockaddr_d2tp *name = (struct sockaddr_d2tp *)&at;
        snprintf(words, room, "%.*s:%d", (int)sizeof name->sd_host, name->sd_host, ntohs(name->sd_port));
    }
    return 0;
}
*/
import "C"

import (
	"net"
	"syscall"
	"unsafe"
)

// TokenBytes is how long a token is.
const TokenBytes = C.D2TP_TOKEN_BYTES

// Token is by what a connection of PersistOpen is opened again; nil for others. Whoever is the same user and has it may
// have the connection: keep it in a file that nobody else may read.
func (c *Conn) Token() ([]byte, error) {
	token := make([]byte, TokenBytes)
	length := C.socklen_t(TokenBytes)
	err := c.control(func(fd C.int) error {
		said, errno := C.d2tp_getsockopt(fd, C.SOL_D2TP, C.D2TP_SO_PERSIST, unsafe.Pointer(&token[0]), &length)
		if said != 0 {
			return errno
		}
		return nil
	})
	if err != nil || length != TokenBytes {
		return nil, err
	}
	return token, nil
}

// Reopen gives a connection of PersistOpen whose process has ended to this one: reading goes on with the first byte that
// it had not read, and the token stays the same. ENOENT: none of this token is kept; EBUSY: the process that has it is
// there, though it closed the connection; EOPNOTSUPP: no agent; else why the connection broke meanwhile.
func Reopen(token []byte) (*Conn, error) {
	refuse := func(err error) error { return &net.OpError{Op: "reopen", Net: "d2tp", Err: err} }
	if len(token) != TokenBytes {
		return nil, refuse(notReopened(syscall.EINVAL))
	}
	fd, errno := C.d2tp_reopen(unsafe.Pointer(&token[0]), TokenBytes, C.SOCK_CLOEXEC|C.SOCK_NONBLOCK)
	if fd < 0 {
		return nil, refuse(notReopened(errno))
	}
	conn, err := polled(fd, farEnd(fd))
	if err != nil {
		// Not d2tp_close, which would end it.
		syscall.Close(int(fd))
		return nil, refuse(err)
	}
	return conn, nil
}

func notReopened(err error) error {
	errno, ok := err.(syscall.Errno)
	if !ok {
		return err
	}
	words := ""
	switch errno {
	case syscall.ENOENT:
		words = "no connection of this token is kept: it was ended or let go, or its agent ended"
	case syscall.EBUSY:
		words = "the process that has this connection is still there"
	case syscall.EOPNOTSUPP:
		words = "no agent answers that keeps connections: start `cedos agent`"
	case syscall.EINVAL:
		words = "a token has 32 bytes"
	default:
		words = "the connection cannot be opened again: " + errno.Error()
	}
	return &Error{errno, words}
}

// farEnd is who is at the far end, as an address; empty where nobody knows.
func farEnd(fd C.int) string {
	words := (*C.char)(C.calloc(1, 128))
	defer C.free(unsafe.Pointer(words))
	C.far_end(fd, words, 128)
	return C.GoString(words)
}
