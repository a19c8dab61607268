"""Connections that move between networks and keep deadlines, as ordinary Python sockets.

    import d2tp
    sock = d2tp.connect("d2tp://host:4433/KEY", deadline=3600)
    sock.sendall(b"hello")

What `connect` and `Listener.accept` return is a `socket.socket`: its descriptor is the kernel's, so `select`,
`selectors`, `asyncio.open_connection(sock=...)`, `makefile` and `ssl` work on it. Plain ctypes over libd2tp:
the bytes never pass through here, so there is nothing to compile. Options are those of docs/sockets.md.
"""

import asyncio
import contextlib
import ctypes
import datetime
import errno
import os
import socket
import struct



def _library():
    """What is said, else what a wheel brings along, else the system's."""
    beside = os.path.join(os.path.dirname(os.path.abspath(__file__)), "libd2tp.so.1")
    return os.environ.get("D2TP_LIBRARY") or (beside if os.path.exists(beside) else "libd2tp.so.1")


_lib = ctypes.CDLL(_library(), use_errno=True)

_SOL_D2TP = 0xD2
_DEADLINE, _ESIZE, _POLICY, _BUDGET, _PRIORITY, _IFLATE = range(1, 7)
_ERROR, _PEERKEY, _PROXY, _HOSTKEY, _RCVBUFTH, _PERSIST = range(8, 14)
_TEXT_BYTES = 512
_TOKEN_BYTES = 32

POLICIES = ("free-only", "free-first", "balanced", "fast", "any")
IF_LATE = ("cell", "wait", "fail")
PERSIST = ("no", "written", "open")


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


def _check(result):
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _set(fd, name, value):
    _check(_lib.d2tp_setsockopt(fd, _SOL_D2TP, name, value, len(value)))


def _get(fd, level, name, size):
    value = ctypes.create_string_buffer(size)
    length = ctypes.c_uint(size)
    _check(_lib.d2tp_getsockopt(fd, level, name, value, ctypes.byref(length)))
    return value.raw[: length.value]


def _text(fd, name):
    return _get(fd, _SOL_D2TP, name, _TEXT_BYTES).rstrip(b"\0").decode()


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
):
    if deadline is not None:
        _set(fd, _DEADLINE, struct.pack("=q", deadline))
    if size is not None:
        _set(fd, _ESIZE, struct.pack("=Q", size))
    if policy is not None:
        _set(fd, _POLICY, struct.pack("=i", POLICIES.index(policy)))
    if budget is not None:
        _set(fd, _BUDGET, struct.pack("=Q", budget))
    if priority is not None:
        _set(fd, _PRIORITY, struct.pack("=i", priority))
    if if_late is not None:
        _set(fd, _IFLATE, struct.pack("=i", IF_LATE.index(if_late)))
    if proxy is not None:
        _set(fd, _PROXY, proxy.encode())
    if persist is not None:
        _set(fd, _PERSIST, struct.pack("=i", PERSIST.index(persist) if isinstance(persist, str) else persist))
    if buffer is not None:
        _set(fd, _RCVBUFTH, _thresholds(*buffer))


class Socket(socket.socket):
    """A connected socket that knows what only D2TP knows."""

    def options(self, **options):
        """Changes options: deadline, size, policy, budget, if_late, buffer."""
        _set_all(self.fileno(), **options)

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
        """Closes it for good; `close` leaves a connection of persist="open" to be opened again."""
        _check(_lib.d2tp_close(self.detach()))

    @property
    def cause(self):
        """Why the connection broke, in words; empty if it did not."""
        return _text(self.fileno(), _ERROR)

    def flush(self, timeout=None):
        """Waits until the peer has all that was sent; BlockingIOError if it has not in time."""
        _check(_lib.d2tp_flush(self.fileno(), -1 if timeout is None else int(timeout * 1000)))


def _open(timeout):
    fd = _check(_lib.d2tp_socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC, 0))
    sock = Socket(fileno=fd)
    if timeout is not None:
        # Of connect; afterwards Python's own timeout counts.
        seconds, micros = int(timeout), int(timeout % 1 * 1e6)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", seconds, micros))
    return sock


def reopen(token):
    """A connection of persist="open" whose process has ended, with everything that was not read."""
    return Socket(fileno=_check(_lib.d2tp_reopen(token, len(token), socket.SOCK_CLOEXEC)))


def connect(address, timeout=None, **options):
    """To a D2TP server ("d2tp://host:port/KEY"), or to any (host, port) through the proxy.

    Without a timeout it waits for a network. Options: deadline (seconds), size, policy, budget, priority,
    if_late, proxy, persist ("written", "open"), buffer: (low, high), bytes or timedeltas, and the rate of reading where it is known.
    OSError says why not, with the cause in words.
    """
    node, service = (address, None) if isinstance(address, str) else (address[0], str(address[1]).encode())
    found = ctypes.POINTER(_AddrInfo)()
    if _lib.d2tp_getaddrinfo(node.encode(), service, None, ctypes.byref(found)) != 0:
        raise OSError(f"not an address: {address!r}")
    sock = _open(timeout)
    try:
        _set_all(sock.fileno(), **options)
        info = found.contents
        if _lib.d2tp_connect(sock.fileno(), ctypes.c_void_p(info.addr), info.addrlen) < 0:
            number = ctypes.get_errno()
            raise OSError(number, sock.cause or os.strerror(number))
    except BaseException:
        sock.close()
        raise
    finally:
        _lib.d2tp_freeaddrinfo(found)
    sock.settimeout(timeout)
    return sock


async def open_connection(address, timeout=None, limit=2**16, **options):
    """Streams of asyncio: `reader, writer`. Connecting waits in a thread, not in the event loop."""
    loop = asyncio.get_running_loop()
    connecting = loop.run_in_executor(None, lambda: connect(address, timeout, **options))
    try:
        sock = await asyncio.shield(connecting)
    except asyncio.CancelledError:
        # It is closed when it comes; nobody else has it.
        connecting.add_done_callback(_let_go)
        raise
    sock.setblocking(False)
    return await asyncio.open_connection(sock=sock, limit=limit)


def _let_go(connecting):
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().close()


class Listener:
    """A D2TP server: `address` is what others connect to."""

    def __init__(self, host="127.0.0.1", port=0, backlog=128, **options):
        self._sock = _open(None)
        fd = self._sock.fileno()
        _set_all(fd, **options)
        at = struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(host) + bytes(8)
        _check(_lib.d2tp_bind(fd, at, len(at)))
        _check(_lib.d2tp_listen(fd, backlog))
        name = ctypes.create_string_buffer(16)
        length = ctypes.c_uint(16)
        _check(_lib.d2tp_getsockname(fd, name, ctypes.byref(length)))
        (self.port,) = struct.unpack("!H", name.raw[2:4])
        self.address = f"d2tp://{host}:{self.port}/{_text(fd, _HOSTKEY)}"

    def fileno(self):
        """For select and event loops."""
        return self._sock.fileno()

    def accept(self):
        """The next connection."""
        return Socket(fileno=_check(_lib.d2tp_accept4(self.fileno(), None, None, socket.SOCK_CLOEXEC)))

    def close(self):
        """No more are taken."""
        _check(_lib.d2tp_close(self._sock.detach()))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def requests_session(**options):
    """A `requests.Session` whose connections are D2TP's, with these options of `connect`."""
    import requests
    from requests.adapters import HTTPAdapter
    from urllib3.connection import HTTPConnection, HTTPSConnection
    from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

    def over_d2tp(kind):
        class Over(kind):
            def _new_conn(self):
                timeout = self.timeout if isinstance(self.timeout, (int, float)) else None
                return connect((self.host, self.port), timeout, **options)

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
        late = error.errno in (errno.EINPROGRESS, errno.ETIMEDOUT, errno.ETIME)
        raise (httpcore.ConnectTimeout if late else httpcore.ConnectError)(str(error)) from error
