package d2tp

/*
#include <arpa/inet.h>
#include <d2tp.h>
#include <fcntl.h>
#include <stdlib.h>

// At an address in numbers; the port that it is in the end, or -1.
static int listen_at(int fd, int domain, const char *ip, int port, int backlog) {
    struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_port = htons(port)};
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_port = htons(port)};
    struct sockaddr *at = domain == AF_INET ? (struct sockaddr *)&v4 : (struct sockaddr *)&v6;
    socklen_t len = domain == AF_INET ? sizeof v4 : sizeof v6;
    inet_pton(domain, ip, domain == AF_INET ? (void *)&v4.sin_addr : (void *)&v6.sin6_addr);
    if (d2tp_bind(fd, at, len) < 0 || d2tp_listen(fd, backlog) < 0 || d2tp_getsockname(fd, at, &len) < 0)
        return -1;
    return ntohs(domain == AF_INET ? v4.sin_port : v6.sin6_port);
}

static int twin_of(int fd) { return fcntl(fd, F_DUPFD_CLOEXEC, 0); }
*/
import "C"

import (
	"fmt"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"
)

// backlog is how many connections the kernel lets wait to be accepted; others wait in the engine.
const backlog = 128

// Listener is a D2TP server, as a net.Listener. It lets anybody in, as TCP does.
type Listener struct {
	file   *os.File // Go polls it
	at     place
	closed atomic.Bool
}

// Listen makes this process a D2TP server at a UDP address ("host:port"; port 0 is one of the system's choice). The
// network is "tcp", "tcp4", "tcp6" or "d2tp". EADDRINUSE: somebody has the address; ENOKEY: the device's key cannot be
// read or made.
func Listen(network, address string) (*Listener, error) {
	refuse := func(err error) error {
		return &net.OpError{Op: "listen", Net: network, Addr: place(address), Err: err}
	}
	if !strings.HasPrefix(network, "tcp") && network != "d2tp" {
		return nil, refuse(net.UnknownNetworkError(network))
	}
	// "udp4" and "udp6" as "tcp4" and "tcp6".
	at, err := net.ResolveUDPAddr("udp"+strings.TrimPrefix(strings.TrimPrefix(network, "tcp"), "d2tp"), address)
	if err != nil {
		return nil, refuse(err)
	}
	if at.Zone != "" {
		return nil, refuse(fmt.Errorf("no addresses with zones: %s", at))
	}
	domain := C.int(C.AF_INET)
	if at.IP == nil {
		at.IP = net.IPv4zero
		if network == "tcp6" {
			at.IP = net.IPv6unspecified
		}
	}
	if at.IP.To4() == nil {
		domain = C.AF_INET6
	}
	fd, errno := C.d2tp_socket(domain, C.SOCK_STREAM|C.SOCK_CLOEXEC|C.SOCK_NONBLOCK, 0)
	if fd < 0 {
		return nil, refuse(errno)
	}
	ip := C.CString(at.IP.String())
	defer C.free(unsafe.Pointer(ip))
	port, errno := C.listen_at(fd, domain, ip, C.int(at.Port), backlog)
	if port < 0 {
		C.d2tp_close(fd)
		return nil, refuse(errno)
	}
	key := (*[64]C.char)(C.calloc(1, 64))
	defer C.free(unsafe.Pointer(key))
	length := C.socklen_t(len(key))
	if said, errno := C.d2tp_getsockopt(fd, C.SOL_D2TP, C.D2TP_SO_HOSTKEY, unsafe.Pointer(key), &length); said != 0 {
		C.d2tp_close(fd)
		return nil, refuse(errno)
	}
	at.Port = int(port)
	where := fmt.Sprintf("d2tp://%s/%s", at, C.GoString(&key[0]))
	return &Listener{file: os.NewFile(uintptr(fd), where), at: place(where)}, nil
}

// Addr is what others dial: d2tp://host:port/KEY.
func (l *Listener) Addr() net.Addr { return l.at }

// Accept waits for the next connection, a *Conn. After Close it is net.ErrClosed.
func (l *Listener) Accept() (net.Conn, error) {
	conn, err := l.accept()
	if err != nil {
		// As files say it, that is no error which others know.
		if l.closed.Load() {
			err = net.ErrClosed
		}
		return nil, &net.OpError{Op: "accept", Net: "d2tp", Addr: l.at, Err: err}
	}
	return conn, nil
}

func (l *Listener) accept() (*Conn, error) {
	raw, err := l.file.SyscallConn()
	if err != nil {
		return nil, err
	}
	var fd C.int
	var said error
	err = raw.Read(func(at uintptr) bool {
		for {
			fd, said = C.d2tp_accept4(C.int(at), nil, nil, C.SOCK_CLOEXEC|C.SOCK_NONBLOCK)
			switch {
			case fd >= 0:
				return true
			case said == syscall.EAGAIN:
				return false
			case said != syscall.EINTR && said != syscall.ECONNABORTED:
				return true
			}
		}
	})
	if err != nil {
		return nil, err
	}
	if fd < 0 {
		return nil, said
	}
	conn, err := polled(fd, farEnd(fd))
	if err != nil {
		C.d2tp_close(fd)
		return nil, err
	}
	return conn, nil
}

// SetDeadline is when Accept gives up, with os.ErrDeadlineExceeded; the zero time is never.
func (l *Listener) SetDeadline(when time.Time) error { return l.file.SetReadDeadline(when) }

// Close takes no more connections; those that were taken go on, and when they are over the address is free.
func (l *Listener) Close() error {
	if l.closed.Swap(true) {
		return &net.OpError{Op: "close", Net: "d2tp", Addr: l.at, Err: net.ErrClosed}
	}
	raw, err := l.file.SyscallConn()
	if err != nil {
		return err
	}
	fd := C.int(-1)
	if err := raw.Control(func(at uintptr) { fd = C.twin_of(C.int(at)) }); err != nil {
		return err
	}
	err = l.file.Close()
	// By the library, last: when it returns nobody listens.
	if fd >= 0 {
		C.d2tp_close(fd)
	}
	return err
}
