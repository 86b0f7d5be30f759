"""Sockets that the servers listen at."""

import asyncio
import contextlib
import socket

from absl.testing import parameterized

from glm5_jax import config
from glm5_jax.http_server import listening
from tests import environment


class ListeningTest(parameterized.TestCase):
    def test_small_pieces_are_sent_at_once(self):
        """Else an event may wait 40 ms for the acknowledgement of the one before."""

        async def accepted():
            found = asyncio.get_running_loop().create_future()
            with contextlib.closing(listening.bind("127.0.0.1", 0)) as bound:
                server = await asyncio.start_server(
                    lambda _, writer: found.set_result(writer), sock=bound
                )
                async with server:
                    port = bound.getsockname()[1]
                    _, client = await asyncio.open_connection("127.0.0.1", port)
                    writer = await found
                    option = writer.get_extra_info("socket").getsockopt(
                        socket.IPPROTO_TCP, socket.TCP_NODELAY
                    )
                    for one in (client, writer):
                        one.close()
                        await one.wait_closed()
            return option

        self.assertTrue(asyncio.run(accepted()))

    @parameterized.parameters("127..0.0.1", "a" * 64)
    def test_a_name_that_no_resolver_takes_is_one_message(self, host):
        with self.assertRaisesRegex(config.InputError, f"^--host={host} .* cannot be"):
            listening.bind(host, 0)


if __name__ == "__main__":
    environment.main()
