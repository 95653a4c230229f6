"""The line on which stores are put to the test: what it hands on, counts, and holds back."""

import socket
import threading

import pytest
from tcp_proxy import Proxy


@pytest.fixture
def echo():
    """The port of a server that sends back what it is sent, two points for each comma."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                connection = listener.accept()[0]
            except OSError:
                return
            with connection:
                while data := connection.recv(100):
                    connection.sendall(data.replace(b",", b".."))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(10)


def connect(proxy):
    return socket.create_connection(("127.0.0.1", proxy.port), 10)


def said(line, size):
    return line.recv(size, socket.MSG_WAITALL)


def test_bytes_are_handed_on_and_counted(echo):
    with Proxy(echo) as proxy, connect(proxy) as line:
        line.sendall(b"a,b")
        assert said(line, 4) == b"a..b"
        assert (proxy.sent, proxy.received) == (3, 4)


def test_a_frozen_line_hands_on_what_it_held_back_once_it_thaws(echo):
    with Proxy(echo) as proxy, connect(proxy) as line:
        proxy.freeze()
        line.sendall(b"late")
        line.settimeout(0.1)
        with pytest.raises(TimeoutError):
            line.recv(1)
        proxy.thaw()
        line.settimeout(10)
        assert said(line, 4) == b"late"


def test_something_happens_once_in_the_middle_of_an_answer(echo):
    happened = threading.Event()
    with Proxy(echo) as proxy, connect(proxy) as line:
        line.sendall(b"before")
        said(line, 6)
        proxy.after(3, happened.set)
        line.sendall(b"ab")
        said(line, 2)
        assert not happened.is_set()
        line.sendall(b"c")
        said(line, 1)
        assert happened.is_set()


def test_closing_breaks_connections_and_refuses_new_ones(echo):
    with Proxy(echo) as proxy, connect(proxy) as line:
        line.sendall(b"a")
        said(line, 1)
        proxy.close()
        assert line.recv(1) == b""
        with pytest.raises(ConnectionRefusedError):
            connect(proxy)


def test_a_server_that_is_gone_closes_the_line():
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    with Proxy(port) as proxy, connect(proxy) as line:
        assert line.recv(1) == b""
