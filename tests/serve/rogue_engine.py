"""An engine that says Ready and then something that is no message. What, is its first argument."""

from __future__ import annotations

import socket
import sys
import time

from octavo.frontend.messages import EngineInfo, EngineStats, FrameReader, Heartbeat, Ready, encode

WORDS = {
    "garbage": len(b"\xc1garbage").to_bytes(4, "little") + b"\xc1garbage",
    "unknown_tag": len(b"\x81\xa4type\xa4evil").to_bytes(4, "little") + b"\x81\xa4type\xa4evil",
    "too_long": (1 << 30).to_bytes(4, "little") + b"x" * 100,
    "old_protocol": b"",
}


def main(kind: str, connection: int) -> None:
    with socket.socket(fileno=connection) as sock:
        frames = FrameReader()
        while not frames.feed(sock.recv(1 << 16)):
            pass
        info = EngineInfo(
            device="rogue",
            dtype="none",
            attention_backend="none",
            vocab_size=4096,
            max_model_len=2048,
            max_logprobs=20,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            enable_prefix_caching=False,
            block_size=16,
            num_blocks=64,
        )
        sock.sendall(encode(Ready(info, protocol=0) if kind == "old_protocol" else Ready(info)))
        sock.sendall(encode(Heartbeat(0, False, EngineStats())))
        while not frames.feed(sock.recv(1 << 16)):  # a request
            pass
        sock.sendall(WORDS[kind])
        time.sleep(60)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
