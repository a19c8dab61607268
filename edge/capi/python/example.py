"""Blocking sockets, asyncio, requests and httpx, each over D2TP. tests/python.rs runs it.

    example.py PROXY URL     PROXY: d2tp://host:port/KEY; URL: of an origin that it reaches
"""

import asyncio
import errno
import sys
import threading
from datetime import timedelta

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
        sock.options(deadline=0)
        assert sock.deadline is None and sock.cause == ""
    print("blocking ok")


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


def fetch(proxy, url):
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
            assert "no such name" in str(error), error

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
            assert error.errno == errno.EOPNOTSUPP, error
    try:
        d2tp.connect(("nobody.example", 80), proxy=proxy)
    except OSError as error:
        print("refused:", error)


with d2tp.Listener() as listener:
    threading.Thread(target=echo, args=(listener, 6)).start()
    blocking(listener.address)
    asyncio.run(streams(listener.address))
fetch(sys.argv[1], sys.argv[2])
fetch_by_httpx(sys.argv[1], sys.argv[2])
refused(sys.argv[1])
