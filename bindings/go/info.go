package d2tp

// #include <d2tp.h>
import "C"

import (
	"sync"
	"time"
	"unsafe"
)

// State is how far a connection is.
type State uint32

// None, being made, made, over.
const (
	Idle State = iota
	Connecting
	Connected
	Over
)

// Reason is why nothing moves.
type Reason uint32

// Nothing is known; there is no network; there are only metered networks, and they are not to be paid for now.
const (
	NoReason Reason = iota
	NoPath
	PathCost
)

// Cost is what a network costs.
type Cost uint32

// Nothing; by the byte; the same abroad.
const (
	Free Cost = iota
	Metered
	Roaming
)

// PathState is whether a path works.
type PathState uint32

// It is tried; it does; nothing was heard on it for some time.
const (
	Opening PathState = iota
	Works
	Silent
)

// Path is one of a connection's session, which others may share.
type Path struct {
	Link          string // as the system calls it; empty where that is not known
	Cost          Cost
	State         PathState
	RTT           time.Duration // smoothed
	RTTMin        time.Duration
	BytesReceived uint64 // payload of the whole session
	BytesSent     uint64 // the same, what was sent again included
	Rate          uint64 // bytes a second lately, 0 when not known
}

// Info is what a connection and its paths do now.
type Info struct {
	State         State
	Reason        Reason
	BytesSent     uint64 // taken from the program
	BytesAcked    uint64 // of those, what the peer has
	BytesReceived uint64
	BytesAhead    uint64        // of those, what the program has not read
	Slack         time.Duration // until the deadline, below 0 without one
	Paths         []Path
}

// Info asks the engine, and where an agent carries the connection that, which takes two seconds at most.
func (c *Conn) Info() (Info, error) {
	var is C.struct_d2tp_info
	length := C.socklen_t(unsafe.Sizeof(is))
	err := c.control(func(fd C.int) error {
		said, errno := C.d2tp_getsockopt(fd, C.SOL_D2TP, C.D2TP_SO_INFO, unsafe.Pointer(&is), &length)
		if said != 0 {
			return errno
		}
		return nil
	})
	if err != nil {
		return Info{}, err
	}
	info := Info{
		State:         State(is.di_state),
		Reason:        Reason(is.di_reason),
		BytesSent:     uint64(is.di_bytes_sent),
		BytesAcked:    uint64(is.di_bytes_acked),
		BytesReceived: uint64(is.di_bytes_received),
		BytesAhead:    uint64(is.di_bytes_ahead),
		Slack:         time.Duration(is.di_slack_ms) * time.Millisecond,
	}
	for _, path := range is.di_paths[:is.di_paths_count] {
		info.Paths = append(info.Paths, Path{
			Link:          C.GoString(&path.dpi_link[0]),
			Cost:          Cost(path.dpi_class),
			State:         PathState(path.dpi_state),
			RTT:           time.Duration(path.dpi_rtt_us) * time.Microsecond,
			RTTMin:        time.Duration(path.dpi_rtt_min_us) * time.Microsecond,
			BytesReceived: uint64(path.dpi_bytes_received),
			BytesSent:     uint64(path.dpi_bytes_sent),
			Rate:          uint64(path.dpi_rate),
		})
	}
	return info, nil
}

// NetworkChanged says that the networks changed in a way that this process may not have seen: every link is tried at
// once, by an agent too where one carries connections. Calling it often does no harm.
func NetworkChanged() error {
	if said, errno := C.d2tp_network_changed(); said != 0 {
		return errno
	}
	return nil
}

// AcquireDLock has the machine woken for connections of this process that wait for a network, and kept awake while they
// move, until release is called. Such locks are counted.
func AcquireDLock() (release func(), err error) {
	if said, errno := C.d2tp_dlock_acquire(); said < 0 {
		return nil, errno
	}
	var once sync.Once
	return func() { once.Do(func() { C.d2tp_dlock_release() }) }, nil
}
