"""What one context costs to fetch, decode and recompute on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from hf_cachegen.artifact.manifest import Manifest
from hf_cachegen.streaming.rates import MachineRates

PROMPT_TOKENS = 32
"""Tokens that are expected to follow a context until it is known how many do."""

PASS_MARGIN = 1.25
"""Factor on the seconds of a pass of the model that a policy reckons with: it shares the processor
with decoders and with what else runs, of which its estimate knows nothing."""


class StreamCosts:
    """The seconds that a policy reckons with.

    Parameters
    ----------
    manifest
        The artefact.
    rates
        What was measured on this machine; learns from this stream.
    location
        Of the artefact; streams from one server share what they know of its link.
    workers
        Decoding threads.

    Attributes
    ----------
    prompt_tokens
        Tokens that will follow the context.
    """

    def __init__(
        self, manifest: Manifest, rates: MachineRates, location: str, workers: int
    ) -> None:
        self.prompt_tokens = PROMPT_TOKENS
        self._manifest = manifest
        self._rates = rates
        self._link = _server(location)
        self._workers = workers
        self._sizes = [manifest.read_bytes(chunk) for chunk in range(len(manifest.chunks))]
        channels = [layer.channels for layer in manifest.identity.layout.layers]
        self._values = [
            [(chunk.end - chunk.first_token(i)) * n for i, n in enumerate(channels)]
            for chunk in manifest.chunks
        ]

    def decode_s(self) -> list[list[float]]:
        """Seconds to decode with all threads, ``[chunk][level]``."""
        return [
            [
                self._rates.decode_s(level, sum(values), n_bytes) / self._workers
                for level, n_bytes in zip(self._manifest.levels, sizes, strict=True)
            ]
            for values, sizes in zip(self._values, self._sizes, strict=True)
        ]

    def recompute_s(self) -> list[float] | None:
        """Seconds to recompute each chunk; None before the model's speed is known."""
        seconds = [
            self._rates.prefill_s(chunk.start, chunk.n_tokens) for chunk in self._manifest.chunks
        ]
        return [s for s in seconds if s is not None] or None

    def segment_s(self) -> float:
        """Seconds to decode the last segment, of whatever level."""
        return max(map(self._rates.segment_s, self._manifest.levels))

    def tail_s(self, overlap_s: float) -> float:
        """Seconds to allow from the last byte to the first token: its segment, the prompt's pass.

        Parameters
        ----------
        overlap_s
            Seconds over which the last chunk's layers arrive and the pass can follow them from one
            to the next. The last layer's part of it is always left.
        """
        n_tokens, n_layers = self._manifest.tokens.n, self._manifest.n_layers
        pass_s = PASS_MARGIN * (self._rates.prefill_s(n_tokens, self.prompt_tokens) or 0.0)
        return self.segment_s() + pass_s - min(pass_s, overlap_s) * (n_layers - 1) / n_layers

    def link_bytes_per_s(self) -> list[float]:
        """The link's rates in earlier streams, oldest first."""
        return self._rates.link_bytes_per_s(self._link)

    def note_transfer(self, bytes_per_s: float) -> None:
        """Learn from a transfer."""
        self._rates.note_link(self._link, bytes_per_s)

    def note_decode(
        self, chunk: int, level: int, layers: Sequence[int], n_bytes: int, seconds: float
    ) -> None:
        """Learn from a segment of ``n_bytes`` that carried ``layers``."""
        n_values = sum(self._values[chunk][layer] for layer in layers)
        if n_values:
            self._rates.note_decode(self._manifest.levels[level], n_values, n_bytes, seconds)

    def note_recompute(self, chunk: int, seconds: float) -> None:
        """Learn from a recomputed chunk."""
        record = self._manifest.chunks[chunk]
        self.note_pass(record.start, record.n_tokens, seconds)

    def note_pass(self, start: int, n_tokens: int, seconds: float) -> None:
        """Learn from a pass of the model over tokens that follow ``start`` others."""
        self._rates.note_prefill(start, n_tokens, seconds)


def _server(location: str) -> str:
    """What a location's bytes come from: a host, the Hub, or a folder by itself."""
    parts = urlsplit(location)
    return parts.netloc if parts.scheme.startswith("http") else parts.scheme or location
