// Package d2tp has connections that move between networks and keep deadlines, as ordinary net.Conns.
//
//	conn, err := (&d2tp.Dialer{Deadline: time.Hour}).Dial("tcp", "d2tp://host:4433/KEY")
//	client := http.Client{Transport: &http.Transport{DialContext: (&d2tp.Dialer{}).DialContext}}
//
// What Dial, Reopen and a Listener return is a connection of the kernel, which Go's own poller waits for; only making
// it and its options go through libd2tp, by cgo. Options are those of docs/sockets.md. Errors hold an *Error, and so
// compare with a syscall.Errno by errors.Is.
//
// To build it takes cgo, a C compiler and pkg-config's d2tp, which edge/capi/install.sh PREFIX puts into
// PREFIX/lib/pkgconfig: where "Package d2tp was not found", name that folder in $PKG_CONFIG_PATH. Where a program then
// says that libd2tp.so.1 is missing, ldconfig or $LD_LIBRARY_PATH tells it of PREFIX/lib.
package d2tp

/*
#cgo pkg-config: d2tp
#include <d2tp.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>

static int twin(int fd) { return fcntl(fd, F_DUPFD_CLOEXEC, 0); }

static int dial(int fd, const char *node, const char *service) {
    struct addrinfo *found;
    int why = d2tp_getaddrinfo(node, service, NULL, &found);
    if (why != 0) {
        errno = EINVAL;
        return why == EAI_SYSTEM ? -1 : -2;
    }
    int said = d2tp_connect(fd, found->ai_addr, found->ai_addrlen);
    int kept = errno;
    d2tp_freeaddrinfo(found);
    errno = kept;
    return said;
}
*/
import "C"

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"strings"
	"syscall"
	"time"
	"unsafe"
)

// Policy says which networks may be paid for.
type Policy int32

// Policies. The zero value of a Dialer is FreeFirst.
const (
	FreeFirst Policy = iota
	FreeOnly
	Balanced
	Fast
	Any
)

// Numbers of d2tp.h, in the order above.
var policies = [...]int32{1, 0, 2, 3, 4}

// IfLate says what to do when free networks will not make the deadline.
type IfLate int32

// Pay, be late, or end at the deadline.
const (
	Cell IfLate = iota
	Wait
	Fail
)

// Buffer has the thresholds of what is held ahead of the program: metered networks are used from Low on, up to
// High, which is 64 MiB or a day at most and no less than Low: else EINVAL. The zero value is none.
type Buffer struct {
	Low, High uint64 // bytes, or milliseconds of what the program reads
	Millis    bool
	Rate      uint32 // bytes a second that it reads, 0 as it is measured
}

// Persist says what goes on when the program has ended, carried by the user's agent (cedos agent). Where none
// answers, dialling is EOPNOTSUPP.
type Persist int32

// Nothing goes on (the default); what was written goes on to the peer; or the connection stays, for a day at most, until
// Reopen or Conn.End.
const (
	PersistNo Persist = iota
	PersistWritten
	PersistOpen
)

// Dialer connects to D2TP servers ("d2tp://host:port/KEY") and, through the proxy, to any host and port.
type Dialer struct {
	Deadline time.Duration // finish within, whole seconds; then both ends drop the connection. 0: no deadline
	Size     uint64        // bytes expected both ways, 0 when not known
	Policy   Policy
	Budget   uint64 // bytes that metered networks may carry, 0 for no limit
	Priority int32  // 0 to 7; higher goes first
	IfLate   IfLate
	Proxy    string // d2tp://host:port/KEY, else $CEDOS_PROX
	Persist  Persist
	Buffer   Buffer
}

// Error is why a connection was not made or broke.
type Error struct {
	Errno syscall.Errno
	Words string // as the library says it, or empty
}

func (e *Error) Error() string {
	if e.Words == "" {
		return e.Errno.Error()
	}
	return e.Words
}

// Unwrap lets errors.Is compare with a syscall.Errno.
func (e *Error) Unwrap() error { return e.Errno }

// Timeout is true when a deadline has passed, as net.Error asks.
func (e *Error) Timeout() bool { return e.Errno == syscall.ETIME || e.Errno.Timeout() }

// Temporary is what net.Error asks for, too.
func (e *Error) Temporary() bool { return e.Errno.Temporary() }

// Dial connects. The network is "tcp" in any form, or "d2tp".
func (d *Dialer) Dial(network, address string) (net.Conn, error) {
	return d.DialContext(context.Background(), network, address)
}

// DialContext connects, and gives up when the context ends. Without a network it waits for one.
func (d *Dialer) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	refuse := func(err error) error {
		return &net.OpError{Op: "dial", Net: network, Addr: place(address), Err: err}
	}
	if !strings.HasPrefix(network, "tcp") && network != "d2tp" {
		return nil, refuse(net.UnknownNetworkError(network))
	}
	node, service := address, ""
	if !strings.HasPrefix(address, "d2tp://") {
		var err error
		if node, service, err = net.SplitHostPort(address); err != nil {
			return nil, refuse(err)
		}
	}
	family := C.int(C.AF_INET)
	if service != "" && strings.Contains(node, ":") {
		// Only a socket of IPv6 takes such an address in numbers.
		family = C.AF_INET6
	}
	fd, errno := C.d2tp_socket(family, C.SOCK_STREAM|C.SOCK_CLOEXEC|C.SOCK_NONBLOCK, 0)
	if fd < 0 {
		return nil, refuse(errno)
	}
	conn, err := d.connect(ctx, fd, address, node, service)
	if err != nil {
		C.d2tp_close(fd)
		return nil, refuse(err)
	}
	return conn, nil
}

func (d *Dialer) connect(ctx context.Context, fd C.int, address, node, service string) (net.Conn, error) {
	if err := d.set(fd); err != nil {
		return nil, err
	}
	cNode, cService := C.CString(node), (*C.char)(nil)
	defer C.free(unsafe.Pointer(cNode))
	if service != "" {
		cService = C.CString(service)
		defer C.free(unsafe.Pointer(cService))
	}
	said, errno := C.dial(fd, cNode, cService)
	switch {
	case said == -2:
		return nil, fmt.Errorf("not an address: %s", address)
	case said != 0 && errno != syscall.EINPROGRESS:
		return nil, failure(fd, errno)
	}
	if err := await(ctx, fd); err != nil {
		return nil, err
	}
	var pending C.int
	length := C.socklen_t(unsafe.Sizeof(pending))
	C.d2tp_getsockopt(fd, C.SOL_SOCKET, C.SO_ERROR, unsafe.Pointer(&pending), &length)
	if pending != 0 {
		return nil, failure(fd, syscall.Errno(pending))
	}
	conn, err := polled(fd, address)
	if err != nil {
		return nil, err
	}
	return conn, nil
}

// polled gives the descriptor up for a copy that Go polls; if it fails the descriptor is still the caller's.
func polled(fd C.int, address string) (*Conn, error) {
	twin, errno := C.twin(fd)
	if twin < 0 {
		return nil, errno
	}
	file := os.NewFile(uintptr(twin), address)
	defer file.Close()
	inner, err := net.FileConn(file)
	if err != nil {
		return nil, err
	}
	syscall.Close(int(fd))
	return &Conn{inner.(*net.TCPConn), place(address)}, nil
}

// await waits until the descriptor is connected or has failed.
func await(ctx context.Context, fd C.int) error {
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		// A connection that is being made is not Go's to poll yet.
		one := C.struct_pollfd{fd: fd, events: C.POLLOUT}
		if ready, _ := C.d2tp_poll(&one, 1, 50); ready > 0 {
			return nil
		}
	}
}

func (d *Dialer) set(fd C.int) error {
	if d.Policy < 0 || int(d.Policy) >= len(policies) {
		return fmt.Errorf("no policy has the number %d", d.Policy)
	}
	if d.Deadline > 0 {
		seconds := int64((d.Deadline + time.Second - 1) / time.Second)
		if err := setsockopt(fd, C.D2TP_SO_DEADLINE, unsafe.Pointer(&seconds), 8); err != nil {
			return err
		}
	}
	if d.Budget > 0 {
		if err := setsockopt(fd, C.D2TP_SO_BUDGET, unsafe.Pointer(&d.Budget), 8); err != nil {
			return err
		}
	}
	if d.Persist != PersistNo {
		if err := setsockopt(fd, C.D2TP_SO_PERSIST, unsafe.Pointer(&d.Persist), 4); err != nil {
			return fmt.Errorf("a connection that outlives its program: %w", failure(fd, err))
		}
	}
	if err := d.Buffer.set(fd); err != nil {
		return err
	}
	if d.Proxy != "" {
		proxy := C.CString(d.Proxy)
		defer C.free(unsafe.Pointer(proxy))
		err := setsockopt(fd, C.D2TP_SO_PROXY, unsafe.Pointer(proxy), len(d.Proxy))
		if err != nil {
			return fmt.Errorf("not a proxy: %s", d.Proxy)
		}
	}
	for name, value := range map[C.int]int32{
		C.D2TP_SO_POLICY:   policies[d.Policy],
		C.D2TP_SO_PRIORITY: d.Priority,
		C.D2TP_SO_IFLATE:   int32(d.IfLate),
	} {
		if err := setsockopt(fd, name, unsafe.Pointer(&value), 4); err != nil {
			return err
		}
	}
	return setsockopt(fd, C.D2TP_SO_ESIZE, unsafe.Pointer(&d.Size), 8)
}

func (b Buffer) set(fd C.int) error {
	levels := C.struct_d2tp_rcvbufth{
		dr_low:  C.uint64_t(b.Low),
		dr_high: C.uint64_t(b.High),
		dr_rate: C.uint32_t(b.Rate),
	}
	if b.Millis {
		levels.dr_unit = C.D2TP_RCVBUFTH_MS
	}
	return setsockopt(fd, C.D2TP_SO_RCVBUFTH, unsafe.Pointer(&levels), int(unsafe.Sizeof(levels)))
}

func setsockopt(fd C.int, name C.int, value unsafe.Pointer, length int) error {
	if said, errno := C.d2tp_setsockopt(fd, C.SOL_D2TP, name, value, C.socklen_t(length)); said != 0 {
		return errno
	}
	return nil
}

func failure(fd C.int, errno error) error {
	number, ok := errno.(syscall.Errno)
	if !ok {
		return errno
	}
	words := (*[512]C.char)(C.calloc(1, 512))
	defer C.free(unsafe.Pointer(words))
	length := C.socklen_t(512)
	C.d2tp_getsockopt(fd, C.SOL_D2TP, C.D2TP_SO_ERROR, unsafe.Pointer(words), &length)
	return &Error{number, C.GoString(&words[0])}
}

// Conn is a connection. Its Close leaves one of PersistOpen to be opened again, once the process has ended.
type Conn struct {
	*net.TCPConn
	far place
}

type place string

func (place) Network() string  { return "d2tp" }
func (p place) String() string { return string(p) }

// RemoteAddr is what was dialled: the far end may move.
func (c *Conn) RemoteAddr() net.Addr { return c.far }

// Read is net.Conn's; what broke the connection is said as it was.
func (c *Conn) Read(into []byte) (int, error) {
	n, err := c.TCPConn.Read(into)
	return n, c.told(err)
}

// Write is net.Conn's.
func (c *Conn) Write(bytes []byte) (int, error) {
	n, err := c.TCPConn.Write(bytes)
	return n, c.told(err)
}

// WriteTo is io.WriterTo, by Read: what io.Copy says of a broken connection is what Read says.
func (c *Conn) WriteTo(to io.Writer) (int64, error) {
	return io.Copy(to, struct{ io.Reader }{c})
}

// ReadFrom is io.ReaderFrom.
func (c *Conn) ReadFrom(from io.Reader) (int64, error) {
	n, err := c.TCPConn.ReadFrom(from)
	return n, c.told(err)
}

// told asks the library why, where the kernel only knows that.
func (c *Conn) told(err error) error {
	if err == nil || !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
		return err
	}
	op := "read"
	var said *net.OpError
	if errors.As(err, &said) {
		op = said.Op
	}
	whole := err
	_ = c.control(func(fd C.int) error {
		if why, ok := failure(fd, reason(fd)).(*Error); ok && why.Words != "" {
			whole = &net.OpError{Op: op, Net: "d2tp", Addr: c.far, Err: why}
		}
		return nil
	})
	return whole
}

// reason is why a connection broke, as the library knows it: a flush says so, at once unless an agent is asked.
func reason(fd C.int) syscall.Errno {
	said, errno := C.d2tp_flush(fd, 100)
	if why, ok := errno.(syscall.Errno); ok && said != 0 && why != syscall.EAGAIN && why != syscall.ENOTCONN {
		return why
	}
	return syscall.ECONNRESET
}

func (c *Conn) control(with func(fd C.int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	if err := raw.Control(func(fd uintptr) { inner = with(C.int(fd)) }); err != nil {
		return err
	}
	return inner
}

// Finish changes the deadline of the connection, in whole seconds from now, which both ends keep; 0 takes it away.
// Deadlines of reads and writes are net.Conn's.
func (c *Conn) Finish(within time.Duration) error {
	seconds := int64((within + time.Second - 1) / time.Second)
	return c.option(C.D2TP_SO_DEADLINE, unsafe.Pointer(&seconds), 8)
}

// SetSize changes how many bytes are expected both ways; 0 when that is not known.
func (c *Conn) SetSize(bytes uint64) error {
	return c.option(C.D2TP_SO_ESIZE, unsafe.Pointer(&bytes), 8)
}

// SetPolicy changes which networks may be paid for.
func (c *Conn) SetPolicy(policy Policy) error {
	if policy < 0 || int(policy) >= len(policies) {
		return fmt.Errorf("no policy has the number %d", policy)
	}
	return c.option(C.D2TP_SO_POLICY, unsafe.Pointer(&policies[policy]), 4)
}

// SetBudget changes what metered networks may carry in all, what they did carry included; 0 for no limit.
func (c *Conn) SetBudget(bytes uint64) error {
	if bytes == 0 {
		bytes = math.MaxUint64
	}
	return c.option(C.D2TP_SO_BUDGET, unsafe.Pointer(&bytes), 8)
}

// SetIfLate changes what is done when free networks will not make the deadline.
func (c *Conn) SetIfLate(ifLate IfLate) error {
	return c.option(C.D2TP_SO_IFLATE, unsafe.Pointer(&ifLate), 4)
}

// SetBuffer changes what is held ahead of the program; the zero value is what the kernel holds.
func (c *Conn) SetBuffer(buffer Buffer) error {
	return c.control(buffer.set)
}

func (c *Conn) option(name C.int, value unsafe.Pointer, length int) error {
	return c.control(func(fd C.int) error { return setsockopt(fd, name, value, length) })
}

// twin is a descriptor of the same connection, for a call that waits: it holds up no Close.
func (c *Conn) twin() (fd C.int, err error) {
	err = c.control(func(of C.int) error {
		twin, errno := C.twin(of)
		if twin < 0 {
			return errno
		}
		fd = twin
		return nil
	})
	return fd, err
}

// Flush waits until the peer has all that was written: so long, to the millisecond, or as long as it takes if that is
// below zero. EAGAIN: not yet.
func (c *Conn) Flush(timeout time.Duration) error {
	fd, err := c.twin()
	if err != nil {
		return err
	}
	defer syscall.Close(int(fd))
	milliseconds := min32(int64((timeout + time.Millisecond - 1) / time.Millisecond))
	if timeout < 0 {
		milliseconds = -1
	}
	if said, errno := C.d2tp_flush(fd, C.int(milliseconds)); said != 0 {
		return failure(fd, errno)
	}
	return nil
}

func min32(number int64) int64 {
	if number > math.MaxInt32 {
		return math.MaxInt32
	}
	return number
}

// End closes the connection for everybody: one of PersistOpen is not to be opened again. What was written is still sent.
func (c *Conn) End() error {
	fd, err := c.twin()
	if err != nil {
		return err
	}
	err = c.Close()
	if said, errno := C.d2tp_close(fd); said != 0 {
		return errno
	}
	return err
}
