"""Connections that move between networks and keep deadlines, as ordinary Python sockets.

    import d2tp
    sock = d2tp.connect("d2tp://host:4433/KEY", deadline=3600)
    sock.sendall(b"hello")

What `connect` and `Listener.accept` return is a `socket.socket`: its descriptor is the kernel's, so `select`,
`selectors`, `asyncio.open_connection(sock=...)`, `makefile` and `ssl` work on it. `Datagrams` are messages. Plain
ctypes over libd2tp: the bytes of streams never pass through here, so there is nothing to compile. Options are
those of docs/sockets.md.

Importing this is an ImportError where libd2tp is not found. OSError has the cause in words where the library
knows it.
"""

import asyncio
import contextlib
import ctypes
import datetime
import errno
import math
import os
import select
import socket
import struct
import time
import typing


def _library():
    """What is said, else what a wheel brings along, else the system's."""
    beside = os.path.join(os.path.dirname(os.path.abspath(__file__)), "libd2tp.so.1")
    return os.environ.get("D2TP_LIBRARY") or (beside if os.path.exists(beside) else "libd2tp.so.1")


def _load(path):
    try:
        return ctypes.CDLL(path, use_errno=True)
    except OSError as error:
        hint = "install libd2tp (docs/sockets.md), or name its file in $D2TP_LIBRARY"
        raise ImportError(f"{error}: {hint}") from error


_lib = _load(_library())
for _call in ("d2tp_send", "d2tp_sendto", "d2tp_recvfrom"):
    getattr(_lib, _call).restype = ctypes.c_ssize_t

_SOL_D2TP = 0xD2
_DEADLINE, _ESIZE, _POLICY, _BUDGET, _PRIORITY, _IFLATE, _INFO = range(1, 8)
_ERROR, _PEERKEY, _PROXY, _HOSTKEY, _RCVBUFTH, _PERSIST, _EXPIRY, _ROUTE = range(8, 16)
_TEXT_BYTES = 512
_TOKEN_BYTES = 32

POLICIES = ("free-only", "free-first", "balanced", "fast", "any")
IF_LATE = ("cell", "wait", "fail")
PERSIST = ("no", "written", "open")
ROUTES = ("any", "steadiest", "each")
STATES = ("idle", "connecting", "connected", "over")
REASONS = (None, "no-path", "path-cost")
COSTS = ("free", "metered", "roaming")
PATH_STATES = ("opening", "works", "silent")

# struct d2tp_info, its paths in the middle.
_INFO_HEAD = struct.Struct("=IIIIQQQqII")
_INFO_PATH = struct.Struct("=16sIIIIQQQ")
_INFO_TAIL = struct.Struct("=Q")
_PATHS_MAX = 8
_INFO_BYTES = _INFO_HEAD.size + _PATHS_MAX * _INFO_PATH.size + _INFO_TAIL.size


class Path(typing.NamedTuple):
    """A path of a connection's session, which others may share."""

    #: As the system calls it; empty where that is not known.
    link: str
    #: One of COSTS.
    cost: str
    #: One of PATH_STATES.
    state: str
    #: Seconds, smoothed.
    rtt: float
    #: Seconds, the least.
    rtt_min: float
    #: Payload of the whole session.
    bytes_received: int
    #: The same, what was sent again included.
    bytes_sent: int
    #: Bytes a second lately; None where that is not known.
    rate: typing.Optional[int]


class Info(typing.NamedTuple):
    """What a connection and its paths do now."""

    #: One of STATES.
    state: str
    #: Why nothing moves, one of REASONS: None is nothing known.
    reason: typing.Optional[str]
    #: Taken from the program.
    bytes_sent: int
    #: Of those, what the peer has.
    bytes_acked: int
    bytes_received: int
    #: Of those, what the program has not read.
    bytes_ahead: int
    #: Seconds until the deadline; None without one.
    slack: typing.Optional[float]
    paths: typing.Tuple[Path, ...]


class _AddrInfo(ctypes.Structure):
    _fields_ = [
        ("flags", ctypes.c_int),
        ("family", ctypes.c_int),
        ("socktype", ctypes.c_int),
        ("protocol", ctypes.c_int),
        ("addrlen", ctypes.c_uint),
        ("addr", ctypes.c_void_p),
        ("canonname", ctypes.c_char_p),
        ("next", ctypes.c_void_p),
    ]


def _check(result, words=None):
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, words or os.strerror(number))
    return result


def _told(fd, result):
    """The same, with the cause that the socket has."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, _text(fd, _ERROR) or os.strerror(number))
    return result


def _set(fd, name, value):
    _told(fd, _lib.d2tp_setsockopt(fd, _SOL_D2TP, name, value, len(value)))


def _get(fd, level, name, size):
    value = ctypes.create_string_buffer(size)
    length = ctypes.c_uint(size)
    _check(_lib.d2tp_getsockopt(fd, level, name, value, ctypes.byref(length)))
    return value.raw[: length.value]


def _text(fd, name):
    return _get(fd, _SOL_D2TP, name, _TEXT_BYTES).rstrip(b"\0").decode()


def _index(option, names, word):
    if word not in names:
        raise ValueError(f"{option}: {word!r} is none of {', '.join(names)}")
    return names.index(word)


def _set_number(fd, option, name, code, value):
    """Errors name the option and its value."""
    try:
        value_bytes = struct.pack(code, value)
    except struct.error as error:
        raise ValueError(f"{option}: {value!r} is no number that it takes ({error})") from error
    try:
        _set(fd, name, value_bytes)
    except OSError as error:
        raise OSError(error.errno, f"{option}: {value!r}: {error.strerror}") from error


def _whole(span):
    """Seconds, rounded up: a time that was given is not cut short."""
    return math.ceil(span.total_seconds() if isinstance(span, datetime.timedelta) else span)


def _thresholds(low, high, rate=0):
    """A struct d2tp_rcvbufth."""
    if isinstance(low, datetime.timedelta):
        milli = datetime.timedelta(milliseconds=1)
        return struct.pack("=QQII", low // milli, high // milli, 1, rate)
    return struct.pack("=QQII", low, high, 0, rate)


def _set_all(
    fd,
    deadline=None,
    size=None,
    policy=None,
    budget=None,
    priority=None,
    if_late=None,
    proxy=None,
    persist=None,
    buffer=None,
    expiry=None,
    route=None,
):
    if deadline is not None:
        _set_number(fd, "deadline", _DEADLINE, "=q", _whole(deadline))
    if size is not None:
        _set_number(fd, "size", _ESIZE, "=Q", size)
    if policy is not None:
        _set_number(fd, "policy", _POLICY, "=i", _index("policy", POLICIES, policy))
    if budget is not None:
        _set_number(fd, "budget", _BUDGET, "=Q", budget)
    if priority is not None:
        _set_number(fd, "priority", _PRIORITY, "=i", priority)
    if if_late is not None:
        _set_number(fd, "if_late", _IFLATE, "=i", _index("if_late", IF_LATE, if_late))
    if proxy is not None:
        try:
            _set(fd, _PROXY, proxy.encode())
        except OSError as error:
            raise ValueError(f"proxy: {proxy!r} is not d2tp://host:port/KEY") from error
    if persist is not None:
        _set_number(fd, "persist", _PERSIST, "=i", _index("persist", PERSIST, persist))
    if buffer is not None:
        _set(fd, _RCVBUFTH, _thresholds(*buffer))
    if expiry is not None:
        _set_number(fd, "expiry", _EXPIRY, "=i", round(expiry * 1000))
    if route is not None:
        _set_number(fd, "route", _ROUTE, "=i", _index("route", ROUTES, route))


class Socket(socket.socket):
    """A connected socket that knows what only D2TP knows."""

    def options(self, **options):
        """Changes options: deadline, size, policy, budget, if_late, buffer. OSError: EINVAL for what is none."""
        _set_all(self.fileno(), **options)

    @property
    def info(self):
        """An Info: what the connection and its paths do now. Asking an agent takes two seconds at most."""
        value = _get(self.fileno(), _SOL_D2TP, _INFO, _INFO_BYTES)
        _, _, state, reason, sent, acked, received, slack_ms, count, _ = _INFO_HEAD.unpack_from(value)
        paths = []
        for at in range(min(count, _PATHS_MAX)):
            link, cost, path_state, rtt, rtt_min, bytes_in, bytes_out, rate = _INFO_PATH.unpack_from(
                value, _INFO_HEAD.size + at * _INFO_PATH.size
            )
            link = link.split(b"\0")[0].decode()
            numbers = (rtt / 1e6, rtt_min / 1e6, bytes_in, bytes_out, rate or None)
            paths.append(Path(link, COSTS[cost], PATH_STATES[path_state], *numbers))
        (ahead,) = _INFO_TAIL.unpack_from(value, _INFO_BYTES - _INFO_TAIL.size)
        slack = None if slack_ms < 0 else slack_ms / 1000
        # A later library may know more reasons.
        reason = REASONS[reason] if reason < len(REASONS) else None
        return Info(STATES[state], reason, sent, acked, received, ahead, slack, tuple(paths))

    @property
    def deadline(self):
        """Seconds left, or None."""
        (left,) = struct.unpack("=q", _get(self.fileno(), _SOL_D2TP, _DEADLINE, 8))
        return left or None

    @property
    def token(self):
        """By what the connection is opened again (persist="open"), or None: to be kept like a password."""
        value = _get(self.fileno(), _SOL_D2TP, _PERSIST, _TOKEN_BYTES)
        return value if len(value) == _TOKEN_BYTES else None

    def end(self):
        """Closes it for good; `close` leaves a connection of persist="open" to be opened again once this process has
        ended."""
        _check(_lib.d2tp_close(self.detach()))

    @property
    def cause(self):
        """Why the connection broke, in words; empty if it did not."""
        return _text(self.fileno(), _ERROR)

    def flush(self, timeout=None):
        """Waits until the peer has all that was sent; BlockingIOError if it has not in so many seconds."""
        fd = self.fileno()
        _told(fd, _lib.d2tp_flush(fd, -1 if timeout is None else int(timeout * 1000)))


def network_changed():
    """The networks changed in a way that this process may not have seen: every link is tried at once, by an agent too
    where one carries connections. Calling it often does no harm."""
    _check(_lib.d2tp_network_changed())


@contextlib.contextmanager
def dlock():
    """While in it the machine is woken for connections of this process that wait for a network, and kept awake while they
    move. Such locks are counted."""
    _check(_lib.d2tp_dlock_acquire())
    try:
        yield
    finally:
        _check(_lib.d2tp_dlock_release())


def _open(family=socket.AF_INET):
    return Socket(fileno=_check(_lib.d2tp_socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC, 0)))


_NOT_REOPENED = {
    errno.ENOENT: "no connection of this token is kept: it was ended or let go, or its agent ended",
    errno.EBUSY: "the process that has this connection is still there",
    errno.EOPNOTSUPP: "no agent answers that keeps connections: start `cedos agent`",
    errno.EINVAL: f"a token has {_TOKEN_BYTES} bytes",
}


def reopen(token):
    """A connection of persist="open" whose process has ended, with everything that was not read.

    OSError: ENOENT (FileNotFoundError) where none of this token is kept, EBUSY while the process that has it is there,
    EOPNOTSUPP without an agent, else why the connection broke meanwhile.
    """
    fd = _lib.d2tp_reopen(token, len(token), socket.SOCK_CLOEXEC)
    return Socket(fileno=_check(fd, _NOT_REOPENED.get(ctypes.get_errno()) if fd < 0 else None))


def _parts(address):
    """The node of an address, and its service unless the node says all."""
    if isinstance(address, str):
        return address, None
    host, port = address[0], address[1]
    return (host[1:-1] if host.startswith("[") and host.endswith("]") else host), str(port)


def _family(address):
    """Of the socket that leads there: only one of IPv6 takes such an address in numbers."""
    node, service = _parts(address)
    return socket.AF_INET6 if service is not None and ":" in node else socket.AF_INET


@contextlib.contextmanager
def _found(address):
    """Where an address leads, as a pointer and a length of C."""
    node, service = _parts(address)
    found = ctypes.POINTER(_AddrInfo)()
    service = None if service is None else service.encode()
    if _lib.d2tp_getaddrinfo(node.encode(), service, None, ctypes.byref(found)) != 0:
        raise OSError(errno.EINVAL, f"neither d2tp://host:port/KEY nor (host, port): {address!r}")
    try:
        yield ctypes.c_void_p(found.contents.addr), found.contents.addrlen
    finally:
        _lib.d2tp_freeaddrinfo(found)


@contextlib.contextmanager
def _connecting(address, options):
    """A socket that waits for nothing and is being connected: it is writable once that is over, and `_made` says how it ended.
    Whatever is raised meanwhile ends it: an agent is left with nothing that was never made."""
    sock = _open(_family(address))
    try:
        sock.setblocking(False)
        _set_all(sock.fileno(), **options)
        with _found(address) as to:
            said = _lib.d2tp_connect(sock.fileno(), *to)
            if said < 0 and ctypes.get_errno() != errno.EINPROGRESS:
                _told(sock.fileno(), said)
        yield sock
    except BaseException:
        if sock.fileno() >= 0:
            sock.end()
        raise


def _made(sock):
    (number,) = struct.unpack("=i", _get(sock.fileno(), socket.SOL_SOCKET, socket.SO_ERROR, 4))
    if number != 0:
        raise OSError(number, _text(sock.fileno(), _ERROR) or os.strerror(number))


def _too_late(address, timeout):
    return TimeoutError(errno.ETIMEDOUT, f"no connection to {address!r} within {timeout} s")


def connect(address, timeout=None, **options):
    """To a D2TP server ("d2tp://host:port/KEY"), or to any (host, port) through the proxy.

    Without a timeout (seconds) it waits for a network, four hours at most; after it, TimeoutError. Options: deadline (seconds,
    rounded up, or a timedelta), size (bytes), policy (one of POLICIES), budget (bytes), priority (0 to 7; higher goes first),
    if_late (one of IF_LATE), proxy, persist (one of PERSIST; else than "no" it needs an agent: EOPNOTSUPP), buffer:
    (low, high), bytes or timedeltas, and the rate of reading in bytes a second where it is known. OSError says why not, with
    the cause in words; ValueError what is no value of an option.
    """
    with _connecting(address, options) as sock:
        writable = select.poll()
        writable.register(sock.fileno(), select.POLLOUT)
        # Python's own poll lets signals be handled, and what they raise ends this.
        if not writable.poll(None if timeout is None else math.ceil(timeout * 1000)):
            raise _too_late(address, timeout)
        _made(sock)
        sock.settimeout(timeout)
    return sock


async def open_connection(address, timeout=None, limit=2**16, **options):
    """Streams of asyncio: `reader, writer`. Arguments and errors are those of `connect`. Nothing but the event loop waits, so
    whoever is cancelled leaves nothing behind."""
    with _connecting(address, options) as sock:
        try:
            await asyncio.wait_for(_writable(sock.fileno()), timeout)
        except asyncio.TimeoutError as error:
            raise _too_late(address, timeout) from error
        _made(sock)
        return await asyncio.open_connection(sock=sock, limit=limit)


async def _writable(fd):
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_writer(fd, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_writer(fd)


def _place(host, port):
    """A struct sockaddr_in."""
    return struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(host) + bytes(8)


def _bind(fd, host, port):
    """Takes a UDP address; which port it is."""
    at = _place(host, port)
    _check(_lib.d2tp_bind(fd, at, len(at)))
    name = ctypes.create_string_buffer(16)
    length = ctypes.c_uint(16)
    _check(_lib.d2tp_getsockname(fd, name, ctypes.byref(length)))
    return struct.unpack("!H", name.raw[2:4])[0]


class Listener:
    """A D2TP server: `address` is what others connect to, `port` the UDP port. It lets anybody in."""

    def __init__(self, host="127.0.0.1", port=0, backlog=128, **options):
        """At an IPv4 address; port 0 is one of the system's choice. Options are those that accepted connections begin
        with. OSError: EADDRINUSE, or ENOKEY where the device's key cannot be had."""
        self._sock = _open()
        try:
            fd = self._sock.fileno()
            _set_all(fd, **options)
            self.port = _bind(fd, host, port)
            _check(_lib.d2tp_listen(fd, backlog))
            self.address = f"d2tp://{host}:{self.port}/{_text(fd, _HOSTKEY)}"
        except BaseException:
            self.close()
            raise

    def fileno(self):
        """For select and event loops."""
        return self._sock.fileno()

    def accept(self):
        """The next connection."""
        return Socket(fileno=_check(_lib.d2tp_accept4(self.fileno(), None, None, socket.SOCK_CLOEXEC)))

    def close(self):
        """No more are taken; the address is free again when those that were are over."""
        if self._sock.fileno() >= 0:
            _check(_lib.d2tp_close(self._sock.detach()))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Datagrams(socket.socket):
    """A datagram socket: messages of some 1,100 bytes fit everywhere, unreliable and never cut, as private as streams.
    `connect_datagrams` and `bind_datagrams` make one.

    What is sent while there is no network waits as long as it is worth it (`options(expiry=...)`), 64 messages at most.
    """

    #: What others connect to, of a server.
    address = None

    def options(self, **options):
        """Changes options: deadline (seconds), expiry (seconds that a message is worth sending: 0.001 to a day, 1 unless
        said), route (one of ROUTES: which paths carry what is sent)."""
        _set_all(self.fileno(), **options)

    def send(self, data, flags=0):
        """Sends a message. OSError: EMSGSIZE where no packet carries it, ECONNRESET or ETIME where the session is over,
        EDESTADDRREQ of a server."""
        data = bytes(data)
        return self._moved(select.POLLOUT, lambda now: _lib.d2tp_send(self.fileno(), data, _size(data), flags | now))

    def sendto(self, data, to):
        """Answers the device that spoke by this name, whatever networks it is at now. OSError: ECONNREFUSED where it is
        gone, ENOTCONN where nobody spoke by it."""
        data, at = bytes(data), _place(*to)
        return self._moved(
            select.POLLOUT, lambda now: _lib.d2tp_sendto(self.fileno(), data, _size(data), now, at, len(at))
        )

    def recvfrom(self, size, flags=0):
        """The next message, of which `size` bytes are kept, and who sent it: for a server the name of a device's session, an
        address of 127.1.0.0/16 that stays the same when the device moves; else the server's, or 0.0.0.0 where that is a name.
        OSError: ECONNRESET or ETIME where the session is over."""
        data = ctypes.create_string_buffer(size)
        name = ctypes.create_string_buffer(128)
        length = ctypes.c_uint()

        def call(now):
            length.value = len(name)
            room = ctypes.c_size_t(size)
            return _lib.d2tp_recvfrom(self.fileno(), data, room, flags | now, name, ctypes.byref(length))

        count = self._moved(select.POLLIN, call)
        (family,) = struct.unpack("=H", name.raw[:2])
        port, host = struct.unpack("!H4s", name.raw[2:8]) if family == socket.AF_INET else (0, bytes(4))
        return data.raw[: min(count, size)], (socket.inet_ntoa(host), port)

    def recv(self, size, flags=0):
        """The next message, of which `size` bytes are kept."""
        return self.recvfrom(size, flags)[0]

    def close(self):
        """Its last words are still sent; a server's address is free again."""
        if self.fileno() >= 0:
            _check(_lib.d2tp_close(self.detach()))

    @property
    def cause(self):
        """Why the session is over, in words; empty if it is not."""
        return _text(self.fileno(), _ERROR)

    def _moved(self, event, call):
        """What a call says that waits as long as `settimeout` allows: a timeout makes Python's descriptors such as wait for
        nothing."""
        within = self.gettimeout()
        until = None if within is None else time.monotonic() + within
        while True:
            result = call(socket.MSG_DONTWAIT)
            if result >= 0:
                return result
            number = ctypes.get_errno()
            if number not in (errno.EAGAIN, errno.EINTR) or within == 0:
                raise OSError(number, self.cause or os.strerror(number))
            if number == errno.EAGAIN:
                left = None if until is None else max(0, until - time.monotonic())
                ready = select.poll()
                ready.register(self.fileno(), event)
                if not ready.poll(None if left is None else left * 1000 + 1) and left is not None:
                    raise socket.timeout("timed out")


def _size(data):
    return ctypes.c_size_t(len(data))


def _datagrams(options):
    flags = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
    sock = Datagrams(fileno=_check(_lib.d2tp_socket(socket.AF_INET, flags, 0)))
    try:
        sock.options(**options)
    except BaseException:
        sock.close()
        raise
    return sock


def connect_datagrams(address, **options):
    """`Datagrams` to and from the D2TP server "d2tp://host:port/KEY", at once, whether or not there is a network. Options are
    those of `Datagrams.options`. They do not go through the proxy and travel on free networks."""
    sock = _datagrams(options)
    try:
        with _found(address) as to:
            _told(sock.fileno(), _lib.d2tp_connect(sock.fileno(), *to))
    except BaseException:
        sock.close()
        raise
    return sock


def bind_datagrams(host="127.0.0.1", port=0, **options):
    """`Datagrams` of a server at an IPv4 address; `address` is what others connect to. It lets anybody in. OSError:
    EADDRINUSE, or ENOKEY where the device's key cannot be had."""
    sock = _datagrams(options)
    try:
        port = _bind(sock.fileno(), host, port)
        sock.address = f"d2tp://{host}:{port}/{_text(sock.fileno(), _HOSTKEY)}"
    except BaseException:
        sock.close()
        raise
    return sock


def requests_session(**options):
    """A `requests.Session` whose connections are D2TP's, with these options of `connect`."""
    import requests
    from requests.adapters import HTTPAdapter
    from urllib3.connection import HTTPConnection, HTTPSConnection
    from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
    from urllib3.exceptions import ConnectTimeoutError, NewConnectionError

    def over_d2tp(kind):
        class Over(kind):
            def _new_conn(self):
                timeout = self.timeout if isinstance(self.timeout, (int, float)) else None
                try:
                    return connect((self.host, self.port), timeout, **options)
                except TimeoutError as error:
                    raise ConnectTimeoutError(self, str(error)) from error
                except OSError as error:
                    raise NewConnectionError(self, str(error)) from error

        return Over

    class HttpPool(HTTPConnectionPool):
        ConnectionCls = over_d2tp(HTTPConnection)

    class HttpsPool(HTTPSConnectionPool):
        ConnectionCls = over_d2tp(HTTPSConnection)

    class Adapter(HTTPAdapter):
        def init_poolmanager(self, *args, **kwargs):
            super().init_poolmanager(*args, **kwargs)
            self.poolmanager.pool_classes_by_scheme = {"http": HttpPool, "https": HttpsPool}

    session = requests.Session()
    # What the environment says of HTTP proxies is not for connections that have one already.
    session.trust_env = False
    for scheme in ("http://", "https://"):
        session.mount(scheme, Adapter())
    return session


def httpx_transport(verify=True, **options):
    """For `httpx.Client(transport=...)`: connections are D2TP's, with these options of `connect`."""
    import httpcore
    import httpx
    from httpcore._backends.sync import SyncStream

    class Backend(httpcore.NetworkBackend):
        def connect_tcp(self, host, port, timeout=None, local_address=None, socket_options=None):
            with _httpcore_errors(httpcore):
                return SyncStream(connect((host, port), timeout, **options))

    transport = httpx.HTTPTransport(verify=verify, trust_env=False)
    transport._pool = httpcore.ConnectionPool(
        ssl_context=httpx.create_ssl_context(verify=verify, trust_env=False), network_backend=Backend()
    )
    return transport


def httpx_async_transport(verify=True, **options):
    """The same for `httpx.AsyncClient`, on asyncio."""
    import httpcore
    import httpx

    class Stream(httpcore.AsyncNetworkStream):
        def __init__(self, reader, writer):
            self._reader, self._writer = reader, writer

        async def read(self, max_bytes, timeout=None):
            return await self._within(self._reader.read(max_bytes), timeout, httpcore.ReadTimeout, httpcore.ReadError)

        async def write(self, buffer, timeout=None):
            self._writer.write(buffer)
            await self._within(self._writer.drain(), timeout, httpcore.WriteTimeout, httpcore.WriteError)

        async def aclose(self):
            self._writer.close()

        async def start_tls(self, ssl_context, server_hostname=None, timeout=None):
            upgraded = self._writer.start_tls(ssl_context, server_hostname=server_hostname)
            await self._within(upgraded, timeout, httpcore.ConnectTimeout, httpcore.ConnectError)
            return self

        def get_extra_info(self, info):
            names = {"ssl_object": "ssl_object", "socket": "socket", "server_addr": "peername"}
            return self._writer.get_extra_info(names[info]) if info in names else None

        @staticmethod
        async def _within(waited, timeout, late, broken):
            try:
                return await asyncio.wait_for(waited, timeout)
            except (asyncio.TimeoutError, TimeoutError) as error:
                raise late(str(error)) from error
            except OSError as error:
                raise broken(str(error)) from error

    class Backend(httpcore.AsyncNetworkBackend):
        async def connect_tcp(self, host, port, timeout=None, local_address=None, socket_options=None):
            with _httpcore_errors(httpcore):
                return Stream(*await open_connection((host, port), timeout, **options))

        async def sleep(self, seconds):
            await asyncio.sleep(seconds)

    transport = httpx.AsyncHTTPTransport(verify=verify, trust_env=False)
    transport._pool = httpcore.AsyncConnectionPool(
        ssl_context=httpx.create_ssl_context(verify=verify, trust_env=False), network_backend=Backend()
    )
    return transport


@contextlib.contextmanager
def _httpcore_errors(httpcore):
    try:
        yield
    except OSError as error:
        late = error.errno in (errno.ETIMEDOUT, errno.ETIME)
        raise (httpcore.ConnectTimeout if late else httpcore.ConnectError)(str(error)) from error
