"""What left-to-right generation remembers, so that a token costs one position of the prefix encoder and one of the decoder.

The suffix encoder reads only what is given: it runs once. The prefix encoder is causal: position t is encoded when x_t is known, and a
layer reads only its own few keys. Each decoder layer keeps its keys and values of both sides, prefix slots first, then suffix slots,
and a query reads every s-th of them.

The caller holds the cache; the model keeps nothing.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tracformer import native
from tracformer.attention import Layout
from tracformer.geometry import paired_encoder_layer
from tracformer.model.likelihood import logits_of
from tracformer.model.linear import FEW
from tracformer.model.rotary import Angles, rotary_angles

if TYPE_CHECKING:
    from tracformer.model.tracformer import Tracformer

GATHERED_AT_ONCE = 2**24  # elements of keys: 64 MiB in float32


class Slots:
    """Keys and values of one layer, (B, slots, d) each, read and written by flat index b * slots + slot."""

    def __init__(self, like: Tensor, batch: int, slots: int) -> None:
        self.slots = slots
        self.keys, self.values = (like.new_zeros(batch * slots, like.shape[-1]) for _ in range(2))

    def write(self, index: Tensor, k: Tensor, v: Tensor) -> None:
        """k, v: (N, H, D)"""
        self.keys.index_copy_(0, index, k.flatten(-2))
        self.values.index_copy_(0, index, v.flatten(-2))

    def attend(self, q: Tensor, index: Tensor, present: Tensor) -> Tensor:
        """Each query of q (N, H, D) over its own keys `index` (N, K), where `present`; zero for a query without any."""
        N, K = index.shape
        size = max(1, GATHERED_AT_ONCE // max(1, K * self.keys.shape[-1]))
        parts = [self._attend(q[i : i + size], index[i : i + size], present[i : i + size]) for i in range(0, N, size)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend(self, q: Tensor, index: Tensor, present: Tensor) -> Tensor:
        N, H, D = q.shape
        K = index.shape[1]
        if K == 0:
            return torch.zeros_like(q)
        k, v = (x.index_select(0, index.flatten()).view(N, K, H, D).transpose(1, 2) for x in (self.keys, self.values))
        mixed = scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=present[:, None, None])[:, :, 0]
        return mixed.masked_fill(~present.any(1)[:, None, None], 0.0)

    def select(self, rows: Tensor) -> Self:
        chosen = object.__new__(type(self))
        chosen.slots = self.slots
        chosen.keys, chosen.values = (x.unflatten(0, (-1, self.slots))[rows].flatten(0, 1) for x in (self.keys, self.values))
        return chosen


class Cache:
    """Generation from left to right in `car` or `ar` mode, over a batch of sequences with their own contexts and lengths.

    `reveal` tells it a token; `logits` answers for any position all of whose predecessors are known, encoding on the way whatever has
    become known since: a long given prefix in one parallel pass when the cache is made, given stretches between targets together.
    """

    @torch.no_grad()
    def __init__(self, model: "Tracformer", tokens: Tensor, context: Tensor, mode: str, lengths: Tensor) -> None:
        B, T = tokens.shape
        self.model, self.lengths, self.length, self.mode = model, lengths, T, mode
        self.tokens = tokens.clone()
        self.encoded = torch.zeros_like(lengths)  # how many positions the prefix encoder has read, of each sequence
        weight = model.embedding.weight
        sides = 1 if mode == "ar" else 2
        self.angles = self._angles(torch.arange(T, device=tokens.device))
        self.encoder = [Slots(weight, B, T) for _ in model.encoder]
        self.decoder = [Slots(weight, B, sides * T) for _ in model.decoder]
        self.offsets = [torch.tensor(range(T) if layer.offsets is None else layer.offsets, device=tokens.device) for layer in model.encoder]
        if sides == 2:
            self._read_suffix(context)
        inside = torch.arange(T, device=tokens.device) < lengths[:, None]
        self._read_prefix((context & inside).cumprod(1).sum(1))

    @property
    def batch(self) -> int:
        return len(self.lengths)

    def reveal(self, rows: Tensor, positions: Tensor, tokens: Tensor) -> None:
        self.tokens[rows, positions] = tokens.to(self.tokens.dtype)

    @torch.no_grad()
    def logits(self, rows: Tensor, positions: Tensor) -> Tensor:
        """(N, vocab_size) at one position in each of some sequences, every token before it being known."""
        self._advance(rows, positions)
        return self._decode(rows, positions)

    def select(self, rows: Tensor | Sequence[int]) -> Self:
        """A cache of some of the sequences, in any order and number; what happens to it does not touch this one."""
        index = torch.as_tensor(rows, device=self.tokens.device)
        chosen = object.__new__(type(self))
        chosen.model, chosen.length, chosen.mode, chosen.angles, chosen.offsets = (
            self.model,
            self.length,
            self.mode,
            self.angles,
            self.offsets,
        )
        chosen.lengths, chosen.tokens, chosen.encoded = (x[index].clone() for x in (self.lengths, self.tokens, self.encoded))
        chosen.encoder = [slots.select(index) for slots in self.encoder]
        chosen.decoder = [slots.select(index) for slots in self.decoder]
        return chosen

    # ---- whole passes

    def _read_suffix(self, context: Tensor) -> None:
        """The suffix encoder over what is given, mirrored; its features go to the decoder's suffix slots."""
        model, T = self.model, self.length
        layout = Layout(self.lengths, T, readings=1, rows=self.lengths[:0])
        given = self.tokens.masked_fill(~context, model.config.mask_id)
        inside = torch.arange(T, device=given.device) < self.lengths[:, None]
        reading = given.masked_fill(~inside, model.config.mask_id).gather(1, layout.mirror)
        rows = torch.arange(self.batch, device=given.device)[:, None]
        slots = (rows * 2 * T + T + layout.mirror).flatten()  # slot T + t holds the feature at t
        x = model.embedding(reading)
        for number, layer in enumerate(model.encoder, start=1):
            x = layer(x, self._angles(layout.mirror), layout, model.attention)
            self._keep(number, slots, x.flatten(0, 1), layout.mirror.flatten())

    def _read_prefix(self, known: Tensor) -> None:
        """The prefix encoder over each sequence's first `known` tokens, in parallel."""
        model, P = self.model, int(known.max())
        if P == 0:
            return
        layout = Layout(known.clamp(min=1), P, readings=1, rows=known[:0])
        positions = torch.arange(P, device=known.device)
        rows = torch.arange(self.batch, device=known.device)[:, None]
        slots, places = (rows * self.length + positions).flatten(), positions.repeat(self.batch)
        decoder_slots = (rows * self.decoder[0].slots + positions).flatten()
        inside = positions < known[:, None]
        x = model.embedding(self.tokens[:, :P].masked_fill(~inside, model.config.mask_id))
        angles = self._angles(positions)
        for number, layer in enumerate(model.encoder, start=1):
            q, k, v = layer.project(x, angles)  # type: ignore[operator]
            self.encoder[number - 1].write(slots, k.flatten(0, 1), v.flatten(0, 1))
            x = layer.finish(x, model.attention.encode(q, k, v, layer.offsets, layout))  # type: ignore[operator,arg-type]
            self._keep(number, decoder_slots, x.flatten(0, 1), places)
        self.encoded = known.clone()

    # ---- one step

    def _advance(self, rows: Tensor, positions: Tensor) -> None:
        """The prefix encoder over all that lies between what it has read and `positions`: a flat list of (row, position) pairs."""
        start = self.encoded[rows]
        counts = (positions - start).clamp(min=0)
        total = int(counts.sum())
        if total == 0:
            return
        row = rows.repeat_interleave(counts)
        first = (counts.cumsum(0) - counts).repeat_interleave(counts)
        place = start.repeat_interleave(counts) + torch.arange(total, device=row.device) - first
        model, angles = self.model, self._at(place)
        slot, decoder_slot = row * self.length + place, row * self.decoder[0].slots + place
        x = model.embedding(self.tokens[row, place])
        self.encoded[rows] = torch.maximum(start, positions)
        if self._compiled(x):
            return self._compiled_advance(x, row, place, decoder_slot, angles)
        for number, layer in enumerate(model.encoder, start=1):
            kept = self.encoder[number - 1]
            q, k, v = layer.project(x, angles)  # type: ignore[operator]
            kept.write(slot, k, v)
            behind = place[:, None] - self._reachable(number, place)
            present = behind >= 0
            x = layer.finish(x, kept.attend(q, row[:, None] * self.length + behind.clamp(min=0), present))  # type: ignore[operator]
            self._keep(number, decoder_slot, x, place)

    def _decode(self, rows: Tensor, positions: Tensor) -> Tensor:
        model, angles = self.model, self._at(positions)
        x = model.embedding.weight.new_zeros(len(rows), model.config.d_model)
        if self._compiled(x):
            x = self._compiled_decode(x, rows, positions, angles)
            return logits_of(model.norm(x), model.head)
        for layer, kept in zip(model.decoder, self.decoder, strict=True):
            index, present = self._decoder_keys(rows, positions, int(layer.stride), kept.slots)  # type: ignore[arg-type]
            x = layer.finish(x, kept.attend(layer.query(x, angles), index, present))  # type: ignore[operator]
        return logits_of(model.norm(x), model.head)

    def _decoder_keys(self, rows: Tensor, positions: Tensor, stride: int, slots: int) -> tuple[Tensor, Tensor]:
        """Flat slots (N, K) that each query reads (Eqs. 5 and 6), and which of them exist: first the prefix, then the suffix."""
        before = (positions + stride - 1) // stride
        after = torch.zeros_like(before) if self.mode == "ar" else (self.lengths[rows] - 1 - positions + stride - 1) // stride
        count = before + after
        i = torch.arange(int(count.max()), device=rows.device)
        prefix = positions[:, None] - 1 - stride * i
        suffix = self.length + positions[:, None] + 1 + stride * (i - before[:, None])
        index = torch.where(i < before[:, None], prefix, suffix)
        present = i < count[:, None]
        return rows[:, None] * slots + index.masked_fill(~present, 0), present

    # ---- the same in compiled code, a layer a call

    def _compiled(self, x: Tensor) -> bool:
        return len(x) <= FEW and x.device.type == "cpu" and x.dtype == torch.float32 and native.ready()

    def _compiled_advance(self, x: Tensor, rows: Tensor, places: Tensor, decoder_slots: Tensor, angles: Angles) -> None:
        heads, ops = self.model.config.n_head, torch.ops.tracformer
        for number, (layer, kept, offsets) in enumerate(zip(self.model.encoder, self.encoder, self.offsets, strict=True), start=1):
            weights = layer.step_weights()  # type: ignore[operator]
            x = ops.encoder_step(x, weights, kept.keys, kept.values, rows, places, offsets, self.length, *angles, heads)
            decoder_layer = paired_encoder_layer(number, len(self.decoder)) - 1
            reader, slots = self.model.decoder[decoder_layer], self.decoder[decoder_layer]
            ops.keys_step(x, reader.key_weights(), slots.keys, slots.values, decoder_slots, *angles, heads)  # type: ignore[operator]

    def _compiled_decode(self, x: Tensor, rows: Tensor, places: Tensor, angles: Angles) -> Tensor:
        heads, ops = self.model.config.n_head, torch.ops.tracformer
        lengths = torch.zeros_like(rows) if self.mode == "ar" else self.lengths[rows]
        for layer, kept in zip(self.model.decoder, self.decoder, strict=True):
            weights, stride = layer.step_weights(), layer.stride  # type: ignore[operator]
            x = ops.decoder_step(x, weights, kept.keys, kept.values, rows, places, lengths, stride, self.length, *angles, heads)
        return x

    def _reachable(self, number: int, place: Tensor) -> Tensor:
        """The layer's offsets, less those that reach before the first position from everywhere."""
        offsets = self.offsets[number - 1]
        return offsets[: int(torch.searchsorted(offsets, place.max(), right=True))]

    def _keep(self, encoder_layer: int, slots: Tensor, features: Tensor, positions: Tensor) -> None:
        """Keys and values for the decoder layer that reads this encoder layer (the pairing is its own inverse)."""
        number = paired_encoder_layer(encoder_layer, len(self.decoder))
        k, v = self.model.decoder[number - 1].keys(features, self._at(positions))  # type: ignore[operator]
        self.decoder[number - 1].write(slots, k, v)

    def _angles(self, positions: Tensor) -> Angles:
        config = self.model.config
        return rotary_angles(positions, config.head_size, config.rotary_base, self.model.embedding.weight.dtype)

    def _at(self, positions: Tensor) -> Angles:
        return Angles(self.angles.cos[positions], self.angles.sin[positions])
