"""The node's HTTP server: the status page for people, and the data pipeline's requests."""

from __future__ import annotations

from warren.node.broker import Broker
from warren.node.pipeline_api import PipelineApi
from warren.node.status_page import StatusServer


class HttpServer:
    """Both of them on one port, inside of the running loop."""

    def __init__(self, broker: Broker) -> None:
        self._pipeline = PipelineApi(broker)
        config = broker.config
        self._server = StatusServer(
            config.host,
            config.http_port,
            broker.status,
            lambda: broker.ready,
            down=lambda: broker.vhosts_down() if broker.started else {},
            routes=self._pipeline.routes(),
            certificate=config.tls.http_files,
        )
        self._host = config.host
        self._scheme = "https" if config.tls.http else "http"

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def url(self) -> str:
        """For clients on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host)
        return f"{self._scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    async def start(self) -> None:
        """Listen; what needs the broker is refused until that has started. Raises ListenError."""
        await self._server.start()

    def announce(self) -> None:
        """The broker has started."""
        self._pipeline.listening(self.url)

    async def stop(self) -> None:
        await self._server.stop()
        await self._pipeline.stop()
