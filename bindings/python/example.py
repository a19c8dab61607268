"""Blocking sockets, asyncio, datagrams, requests and httpx, each over D2TP. tests/python.rs runs it.

    example.py PROXY URL     PROXY: d2tp://host:port/KEY; URL: of an origin that it reaches

And a connection that is opened again, beside an agent; SERVER says everything back (bindings/tests/languages/reopen.rs):

    example.py keep SERVER FILE      is killed when it has said "kept"; FILE: the token
    example.py again FILE
"""

import asyncio
import contextlib
import errno
import faulthandler
import os
import signal
import socket
import sys
import threading
from datetime import timedelta
from urllib.parse import urlsplit

import d2tp


def echo(listener, connections):
    for _ in range(connections):
        with listener.accept() as sock:
            while data := sock.recv(65536):
                sock.sendall(data)


def blocking(address):
    with d2tp.connect(address, timeout=20, deadline=60, policy="free-only") as sock:
        assert 0 < sock.deadline <= 60
        sock.sendall(b"blocking")
        sock.flush(10)
        assert sock.recv(8) == b"blocking"
        sock.options(buffer=(200_000, 1_000_000))
        sock.options(buffer=(timedelta(seconds=2), timedelta(seconds=20), 80_000))
        try:
            sock.options(buffer=(2, 1))
            raise AssertionError("low above high")
        except OSError as error:
            assert error.errno == errno.EINVAL
        assert sock.token is None
        info = sock.info
        assert info.state == "connected" and info.bytes_acked == info.bytes_received == 8, info
        assert 0 < info.slack <= 60 and info.paths[0].state == "works", info
        sock.options(deadline=timedelta(seconds=2.5))
        assert 2 <= sock.deadline <= 3, "rounded up"
        sock.options(deadline=59.5)
        assert 58 < sock.deadline <= 60
        try:
            sock.options(deadline=-5)
            raise AssertionError("a deadline that was")
        except OSError as error:
            assert error.errno == errno.EINVAL and "deadline: -5" in str(error), error
        sock.options(deadline=0)
        assert sock.deadline is None and sock.info.slack is None and sock.cause == ""
        d2tp.network_changed()
        with d2tp.dlock(), d2tp.dlock():
            pass
    print("blocking ok")


def datagrams():
    with d2tp.bind_datagrams(expiry=60) as server, d2tp.connect_datagrams(server.address, expiry=60) as sock:
        sock.settimeout(20)
        server.settimeout(20)
        sock.send(b"where I am now")
        message, device = server.recvfrom(1500)
        assert message == b"where I am now" and device[0].startswith("127.1."), (message, device)
        server.sendto(b"heard", device)
        assert sock.recv(3) == b"hea", "the rest is lost"
        sock.options(route="each", expiry=30)
        sock.send(b"")
        assert server.recvfrom(10) == (b"", device)
        for attempt, number in (
            (lambda: sock.send(bytes(3000)), errno.EMSGSIZE),
            (lambda: sock.options(expiry=0), errno.EINVAL),
            (lambda: server.send(b"to whom"), errno.EDESTADDRREQ),
        ):
            try:
                attempt()
                raise AssertionError(os.strerror(number))
            except OSError as error:
                assert error.errno == number, error
        sock.settimeout(0.01)
        try:
            sock.recv(10)
            raise AssertionError("from where?")
        except socket.timeout:
            sock.settimeout(20)
        server.close()
        try:
            sock.recv(10)
            raise AssertionError("after the end")
        except ConnectionResetError as error:
            assert sock.cause in str(error), error
    print("datagrams ok")


async def streams(address):
    async def one(number):
        reader, writer = await d2tp.open_connection(address, timeout=20, deadline=60)
        message = bytes([number]) * 100_000
        writer.write(message)
        writer.write_eof()
        assert await reader.read() == message
        writer.close()

    await asyncio.gather(*(one(number) for number in range(5)))
    print("asyncio ok")


@contextlib.contextmanager
def silent(proxy):
    """An address of that proxy where nobody answers."""
    with socket.socket(type=socket.SOCK_DGRAM) as nobody:
        nobody.bind(("127.0.0.1", 0))
        yield f"d2tp://127.0.0.1:{nobody.getsockname()[1]}/{proxy.split('/')[-1]}"


def given_up(proxy):
    """Where nobody answers: whoever gives up leaves no thread behind, by a timeout, when cancelled, by a signal."""
    to = ("nobody.example", 80)

    async def cancelled():
        try:
            await asyncio.wait_for(d2tp.open_connection(to, proxy=absent), 0.2)
            raise AssertionError("who?")
        except asyncio.TimeoutError:
            assert threading.active_count() == 1, threading.enumerate()
        try:
            await d2tp.open_connection(to, timeout=0.2, proxy=absent)
            raise AssertionError("who?")
        except TimeoutError as error:
            assert "nobody.example" in str(error), error

    def alarm(*_):
        raise InterruptedError("by a signal")

    with silent(proxy) as absent:
        asyncio.run(cancelled())
        try:
            d2tp.connect(to, timeout=0.2, proxy=absent)
            raise AssertionError("who?")
        except TimeoutError as error:
            assert error.errno == errno.ETIMEDOUT, error
        before = signal.signal(signal.SIGALRM, alarm)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            d2tp.connect(to, proxy=absent)
            raise AssertionError("who?")
        except InterruptedError as error:
            assert "by a signal" in str(error), error
        signal.signal(signal.SIGALRM, before)
        with contextlib.suppress(ImportError):
            import requests

            try:
                d2tp.requests_session(proxy=absent).get("http://nobody.example/", timeout=0.2)
                raise AssertionError("who?")
            except requests.ConnectTimeout as error:
                assert "nobody.example" in str(error), error
    for options, words in (
        ({"policy": "cheap"}, "policy: 'cheap' is none of"),
        ({"proxy": "http://here"}, "proxy: 'http://here' is not d2tp://"),
        ({"size": 1.5}, "size: 1.5 is no number"),
    ):
        try:
            d2tp.connect(to, **options)
            raise AssertionError(words)
        except ValueError as error:
            assert words in str(error), error
    print("given up ok")


def fetch(proxy, url):
    # An address of IPv6 in numbers goes to the proxy as any other; what it makes of it is its own.
    port = urlsplit(url).port or 80
    for there in (("::1", port), ("[::1]", port)):
        try:
            with d2tp.connect(there, timeout=20, proxy=proxy) as sock:
                sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
                with sock.makefile("rb") as answer:
                    print("ipv6 ok:", answer.read().split(b"\r\n\r\n")[1].decode())
        except OSError as error:
            print("ipv6 refused:", error)
    try:
        session = d2tp.requests_session(proxy=proxy, deadline=60)
    except ImportError:
        print("requests is not installed")
        return
    answer = session.get(url)
    assert answer.status_code == 200, answer
    print("requests ok:", answer.text)


def fetch_by_httpx(proxy, url):
    try:
        import httpx
    except ImportError:
        print("httpx is not installed")
        return
    with httpx.Client(transport=d2tp.httpx_transport(proxy=proxy, deadline=60)) as client:
        answer = client.get(url)
        assert answer.status_code == 200, answer
        try:
            client.get("http://nobody.example/")
        except httpx.ConnectError as error:
            assert f"[Errno {errno.EHOSTUNREACH}]" in str(error), error

    async def on_asyncio():
        transport = d2tp.httpx_async_transport(proxy=proxy, deadline=60)
        async with httpx.AsyncClient(transport=transport) as client:
            return await client.get(url)

    assert asyncio.run(on_asyncio()).text == answer.text
    print("httpx ok:", answer.text)


def refused(proxy):
    for attempt in (lambda: d2tp.reopen(bytes(32)), lambda: d2tp.connect(("localhost", 1), proxy=proxy, persist="open")):
        try:
            attempt()
            raise AssertionError("there is no agent")
        except OSError as error:
            assert error.errno == errno.EOPNOTSUPP and "start `cedos agent`" in str(error), error
    try:
        d2tp.connect(("nobody.example", 80), proxy=proxy)
    except OSError as error:
        print("refused:", error)


def all_of(sock, count):
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        assert piece, "the end"
        data += piece
    return data


def keep(server, path):
    sock = d2tp.connect(server, persist="open")
    sock.sendall(b"first second")
    assert all_of(sock, 6) == b"first "
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        token = sock.token
        file.write(token)
    # That leaves it, to who comes after this process.
    sock.close()
    try:
        d2tp.reopen(token)
    except OSError as error:
        print("kept:", error.strerror, flush=True)
    sys.stdin.read()


def again(path):
    with open(path, "rb") as file:
        token = file.read()
    sock = d2tp.reopen(token)
    assert all_of(sock, 6) == b"second" and sock.token == token
    sock.sendall(b"third")
    assert all_of(sock, 5) == b"third"
    sock.flush(60)
    assert sock.info.bytes_acked == 17, sock.info
    sock.end()
    try:
        d2tp.reopen(token)
    except FileNotFoundError as error:
        print("ended:", error.strerror)


def everything(proxy, url):
    with d2tp.Listener() as listener:
        echoing = threading.Thread(target=echo, args=(listener, 6))
        echoing.start()
        blocking(listener.address)
        asyncio.run(streams(listener.address))
        echoing.join()
    datagrams()
    given_up(proxy)
    fetch(proxy, url)
    fetch_by_httpx(proxy, url)
    refused(proxy)


if sys.argv[1] == "keep":
    keep(*sys.argv[2:])
elif sys.argv[1] == "again":
    again(*sys.argv[2:])
else:
    faulthandler.dump_traceback_later(120, exit=True)
    everything(*sys.argv[1:])
