"""HOST:PORT as the configuration writes it. Nothing is resolved here."""

from __future__ import annotations


class HostPort(str):
    """A checked `host:port` (IPv6 hosts in brackets); prints as it was written. ValueError says what is wrong."""

    __slots__ = ()

    def __new__(cls, text: str) -> HostPort:
        host, colon, port = text.rpartition(":")
        inner = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if not colon or not inner:
            raise ValueError(f"expected HOST:PORT, got {text!r}")
        if ":" in inner and inner == host:
            raise ValueError(f"expected an IPv6 host in brackets, as [::1]:8080, got {text!r}")
        try:
            inner.encode("idna")  # as the resolver will; an empty or overlong label is no name
        except UnicodeError:
            raise ValueError(f"expected the name or address of a host before the port, got {text!r}") from None
        if not (port.isascii() and port.isdigit() and int(port) <= 65535):
            raise ValueError(f"expected a port from 0 to 65535, got {port!r} in {text!r}")
        return super().__new__(cls, text)

    @property
    def host(self) -> str:
        """Name or address, without brackets."""
        return self.rpartition(":")[0].removeprefix("[").removesuffix("]")

    @property
    def port(self) -> int:
        """0 lets the system choose one (listeners only)."""
        return int(self.rpartition(":")[2])
