"""A line to a server on loopback: it counts bytes, and stands still or breaks when it is told."""

import contextlib
import socket
import threading


class Proxy:
    """Forwards to a server's port; calls what `after` is given just before a count is reached."""

    def __init__(self, server_port):
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.sent = self.received = 0
        self._lock, self._flows = threading.Lock(), threading.Event()
        self._flows.set()
        self._sockets, self._due = {self._listener}, None
        threading.Thread(target=self._accept, daemon=True).start()

    def after(self, received, action):
        """Call `action` once so many more bytes have come from the server."""
        with self._lock:
            self._due = (self.received + received, action)

    def freeze(self):
        """Hand nothing on from now on; connections stay open and can be made."""
        self._flows.clear()

    def thaw(self):
        self._flows.set()

    def close(self):
        """Break all connections."""
        self._flows.set()
        with self._lock:
            sockets, self._sockets = self._sockets, None
        for one in sockets or ():
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _accept(self):
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                client = self._listener.accept()[0]
                try:
                    server = socket.create_connection(("127.0.0.1", self._server_port))
                except OSError:  # as if the server's own port had been tried
                    client.close()
                    continue
                with self._lock:
                    if self._sockets is None:
                        client.close()
                        return server.close()
                    self._sockets |= {client, server}
                for pair in ((client, server), (server, client)):
                    threading.Thread(
                        target=self._forward, args=(*pair, server), daemon=True
                    ).start()

    def _forward(self, source, sink, server):
        with contextlib.suppress(OSError):  # either side is gone
            while data := source.recv(1 << 16):
                action = self._count(len(data), source is server)
                if action:
                    action()
                self._flows.wait()
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def _count(self, size, from_server):
        with self._lock:
            if not from_server:
                self.sent += size
                return None
            self.received += size
            if self._due is None or self.received < self._due[0]:
                return None
            action, self._due = self._due[1], None
            return action
