"""Framing: header and body frames, epochs and versions checked. Used by both ends of the socket."""

import msgspec

from headrace.configs.errors import EngineDeadError
from headrace.engine_core.messages import PROTOCOL_VERSION, FromCore, Header, ToCore


class Codec:
    """Encodes and decodes the two frames of a message for one engine epoch. Not thread-safe."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._encoder = msgspec.msgpack.Encoder()
        self._header = self._encoder.encode(Header(PROTOCOL_VERSION, epoch))
        self._header_decoder = msgspec.msgpack.Decoder(Header)
        self._to_core: msgspec.msgpack.Decoder[ToCore] = msgspec.msgpack.Decoder(ToCore)
        self._from_core: msgspec.msgpack.Decoder[FromCore] = msgspec.msgpack.Decoder(FromCore)

    def encode(self, message: ToCore | FromCore) -> list[bytes]:
        return [self._header, self._encoder.encode(message)]

    def decode_to_core(self, frames: list[bytes]) -> ToCore | None:
        """The message, or None if it is of another epoch."""
        return self._to_core.decode(frames[1]) if self._is_current(frames) else None

    def decode_from_core(self, frames: list[bytes]) -> FromCore | None:
        """The message, or None if it is of another epoch."""
        return self._from_core.decode(frames[1]) if self._is_current(frames) else None

    def _is_current(self, frames: list[bytes]) -> bool:
        if len(frames) != 2:
            raise EngineDeadError(f"expected 2 frames in a message, got {len(frames)}")
        header = self._header_decoder.decode(frames[0])
        if header.version != PROTOCOL_VERSION:
            raise EngineDeadError(
                f"engine core and front end speak different protocols ({header.version} and "
                f"{PROTOCOL_VERSION}); install one version of headrace for both"
            )
        return header.epoch == self._epoch
