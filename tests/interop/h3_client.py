"""An HTTP/3 client that is not ours: aioquic with a client certificate. Prints one JSON object per request.

usage: h3_client.py HOST PORT SERVER_NAME CA_FILE CREDENTIAL_FILE METHOD PATH [METHOD PATH ...]
CREDENTIAL_FILE may be `-` for no client certificate.
"""

import asyncio
import json
import re
import ssl
import sys

from aioquic.asyncio.client import connect
from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.h3.connection import H3_ALPN, H3Connection
from aioquic.h3.events import DataReceived, HeadersReceived
from aioquic.quic.configuration import QuicConfiguration
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509 import load_pem_x509_certificate

DEADLINE_SECONDS = 15


class Http3Client(QuicConnectionProtocol):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.http = H3Connection(self._quic)
        self.answers = {}

    def quic_event_received(self, event):
        for got in self.http.handle_event(event):
            answer = self.answers.get(getattr(got, "stream_id", None))
            if answer is None:
                continue
            if isinstance(got, HeadersReceived):
                answer["headers"].update((k.decode(), v.decode()) for k, v in got.headers)
            elif isinstance(got, DataReceived):
                answer["body"] += got.data
            if getattr(got, "stream_ended", False) and not answer["done"].done():
                answer["done"].set_result(None)

    async def request(self, method, authority, path):
        stream = self._quic.get_next_available_stream_id()
        done = asyncio.get_running_loop().create_future()
        self.answers[stream] = {"headers": {}, "body": b"", "done": done}
        head = [
            (b":method", method.encode()),
            (b":scheme", b"https"),
            (b":authority", authority.encode()),
            (b":path", path.encode()),
            (b"user-agent", b"aioquic"),
        ]
        body = b"{ this is not an envelope" if method == "POST" else b""
        if body:
            head.append((b"content-type", b"application/json"))
        self.http.send_headers(stream, head, end_stream=not body)
        if body:
            self.http.send_data(stream, body, end_stream=True)
        self.transmit()
        await asyncio.wait_for(done, DEADLINE_SECONDS)
        answer = self.answers.pop(stream)
        return {
            "status": int(answer["headers"][":status"]),
            "content_type": answer["headers"].get("content-type", ""),
            "body": json.loads(answer["body"]) if answer["body"] else None,
        }


def load_credential(settings, path):
    """One file holds the key and the chain, in any order."""
    with open(path, "rb") as file:
        blocks = re.finditer(rb"-----BEGIN ([A-Z ]+)-----.*?-----END \1-----\n?", file.read(), re.S)
    chain = []
    for block in blocks:
        if block[1] == b"CERTIFICATE":
            chain.append(load_pem_x509_certificate(block[0]))
        else:
            settings.private_key = load_pem_private_key(block[0], password=None)
    settings.certificate, settings.certificate_chain = chain[0], chain[1:]


async def main():
    host, port, server_name, ca, credential, *requests = sys.argv[1:]
    settings = QuicConfiguration(is_client=True, alpn_protocols=H3_ALPN, server_name=server_name)
    settings.verify_mode = ssl.CERT_REQUIRED
    settings.load_verify_locations(ca)
    if credential != "-":
        load_credential(settings, credential)
    async with connect(host, int(port), configuration=settings, create_protocol=Http3Client) as client:
        for method, path in zip(requests[::2], requests[1::2]):
            print(json.dumps(await client.request(method, server_name, path)), flush=True)


asyncio.run(asyncio.wait_for(main(), 2 * DEADLINE_SECONDS))
