"""The KV cache of left-to-right generation (modes `car` and `ar`).

With it, a new token costs one position of the prefix encoder and one of the decoder:

- The suffix encoder reads only given tokens, so it runs once per sequence.
- The prefix encoder is causal: position t is encoded as soon as x_t is known.
- Each decoder layer keeps its keys and values of both sides, prefix slots first and then suffix
  slots; a query reads every s-th of them.

`Slots` holds the keys and values of one layer; `Cache` those of a model. A cache has a fixed number
of rows, one per sequence. Sequences enter (`admit`) and leave (`release`) while others are being
filled; nothing is moved or reallocated. Where the C++ step is compiled, it does the work on the CPU
(`model.fast_step`).
"""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tracformer.attention import Layout
from tracformer.geometry import paired_encoder_layer
from tracformer.model.batch import Batch
from tracformer.model.blocks import Angles, rotary_angles
from tracformer.model.fast_step import compiled_step
from tracformer.model.likelihood import logits_of

if TYPE_CHECKING:
    from tracformer.model.tracformer import Tracformer


GATHERED_AT_ONCE = 2**24  # elements of keys: 64 MiB in float32


class Slots:
    """Keys and values of one layer, (rows, slots, d) each.

    They are read and written by flat indices row * slots + slot.
    """

    def __init__(self, like: Tensor, rows: int, slots: int) -> None:
        self.slots = slots
        # not zeroed: memory is used only as rows fill
        self.keys, self.values = (like.new_empty(rows * slots, like.shape[-1]) for _ in range(2))
        for x in (self.keys, self.values):
            # keys that do not exist are read from slot 0, with weight zero
            x.view(rows, slots, -1)[:, 0] = 0.0

    def write(self, index: Tensor, k: Tensor, v: Tensor) -> None:
        """Store keys and values (N, H, D) at flat indices (N,)."""
        self.keys.index_copy_(0, index, k.flatten(-2))
        self.values.index_copy_(0, index, v.flatten(-2))

    def attend(self, q: Tensor, index: Tensor, present: Tensor) -> Tensor:
        """Return the attention (N, H, D) of queries, each over its own keys.

        Args:
            q: (N, H, D) queries.
            index: (N, K) flat indices of each query's keys.
            present: (N, K) bool, False where an entry of `index` is only a filler. A query without
                any key gets zero.
        """
        N, K = index.shape
        size = max(1, GATHERED_AT_ONCE // max(1, K * self.keys.shape[-1]))
        parts = [
            self._attend(q[i : i + size], index[i : i + size], present[i : i + size])
            for i in range(0, N, size)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend(self, q: Tensor, index: Tensor, present: Tensor) -> Tensor:
        N, H, D = q.shape
        K = index.shape[1]
        if K == 0:
            return torch.zeros_like(q)
        k, v = (
            x.index_select(0, index.flatten()).view(N, K, H, D).transpose(1, 2)
            for x in (self.keys, self.values)
        )
        mixed = scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=present[:, None, None])[
            :, :, 0
        ]
        return mixed.masked_fill(~present.any(1)[:, None, None], 0.0)

    def copy(self, sources: Tensor, index: Tensor) -> None:
        """Copy the entries at flat indices `sources` to `index`."""
        for x in (self.keys, self.values):
            x.index_copy_(0, index, x.index_select(0, sources))

    def select(self, rows: Tensor) -> Self:
        """Return a copy with some of the rows."""
        chosen = object.__new__(type(self))
        chosen.slots = self.slots
        chosen.keys, chosen.values = (
            x.unflatten(0, (-1, self.slots))[rows].flatten(0, 1) for x in (self.keys, self.values)
        )
        return chosen


BRIEF = 256  # tokens: a given text up to this length is read by the compiled step


class Cache:
    """The state of left-to-right generation for several sequences.

    `admit` reads new sequences, `reveal` sets a token, `logits` predicts a position all of whose
    predecessors are known, and `release` frees rows. A given prefix is encoded when its sequence is
    admitted; later tokens are encoded together at the next call of `logits` that needs them.

    Args:
        model: Model to generate with. It keeps no reference to the cache.
        mode: `car` or `ar`.
        rows: Number of sequences that fit.
        length: Longest sequence, in tokens.
    """

    def __init__(self, model: "Tracformer", mode: str, rows: int, length: int) -> None:
        self.model, self.mode, self.length = model, mode, length
        weight = model.embedding.weight
        sides = 1 if mode == "ar" else 2
        self.free = list(range(rows))  # ascending
        self.tokens = torch.zeros(rows, length, dtype=torch.int64, device=weight.device)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=weight.device)
        # number of positions that the prefix encoder has read, for each row
        self.encoded = [0] * rows
        self.angles = self._angles(torch.arange(length, device=weight.device))
        self.encoder = [Slots(weight, rows, length) for _ in model.encoder]
        self.decoder = [Slots(weight, rows, sides * length) for _ in model.decoder]
        self.offsets = [
            torch.tensor(
                range(length) if layer.offsets is None else layer.offsets, device=weight.device
            )
            for layer in model.encoder
        ]
        self.step = compiled_step(model, self.offsets)

    @torch.no_grad()
    def admit(self, batch: Batch) -> Tensor:
        """Read new sequences into free rows and return these rows (N,), ascending.

        Equal sequences (several samples of one prompt) are read once. Tokens at targets are
        ignored.
        """
        batch.check_length(self.model.config)
        lengths, N, T = batch.lengths, len(batch), int(batch.lengths.max())
        tokens, context = batch.tokens[:, :T], batch.given()[:, :T]
        if N > len(self.free) or T > self.length:
            raise ValueError(
                f"{N} sequences of {T} tokens do not fit: {len(self.free)} rows are free, each of "
                f"{self.length} tokens"
            )
        taken = self.free[:N]
        rows = torch.tensor(taken, device=tokens.device)
        known = context.cumprod(1).sum(1)  # the given prefix of each
        self.tokens[rows, :T], self.lengths[rows] = tokens.to(self.tokens.dtype), lengths
        new, source = _first_of_equals(tokens.masked_fill(~context, -1), lengths)
        # tokens after the first target; suffix features before it are never read
        after = lengths - 1 - known
        given = tokens.masked_fill(~context, self.model.config.mask_id)
        if self.mode != "ar":
            self._read(new, after, rows, given, lengths)
        self._read(new, known, rows, given)
        if len(new) < N:
            again = [i for i, first in enumerate(source) if first != i]
            self._copy(rows[[source[i] for i in again]], rows[again], known[again])
        for row, count in zip(taken, known.tolist(), strict=True):
            self.encoded[row] = count
        self.free = self.free[N:]
        return rows

    def release(self, rows: Tensor | Sequence[int]) -> None:
        """Free rows, so that new sequences can take them."""
        gone = torch.as_tensor(rows).tolist()
        if wrong := [row for row in gone if row in self.free or not 0 <= row < len(self.encoded)]:
            raise ValueError(f"row {wrong[0]} holds no sequence")
        self.free = sorted([*self.free, *gone])

    def reveal(self, rows: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Set one token in each of some rows."""
        self.tokens[rows, positions] = tokens.to(self.tokens.dtype)

    @torch.no_grad()
    def logits(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return logits (N, vocab_size) at one position of each of some rows.

        Every token before that position must be known, and it must not lie in the given prefix.
        """
        self._advance(rows, positions)
        return self._decode(rows, positions)

    def select(self, rows: Tensor | Sequence[int]) -> Self:
        """Return an independent cache that holds copies of some rows, in any order and number."""
        index = torch.as_tensor(rows, device=self.tokens.device)
        chosen = object.__new__(type(self))
        for name in ("model", "length", "mode", "angles", "offsets", "step"):
            setattr(chosen, name, getattr(self, name))
        chosen.free, chosen.encoded = [], [self.encoded[row] for row in index.tolist()]
        chosen.lengths, chosen.tokens = (x[index].clone() for x in (self.lengths, self.tokens))
        chosen.encoder = [slots.select(index) for slots in self.encoder]
        chosen.decoder = [slots.select(index) for slots in self.decoder]
        return chosen

    def rearrange(self, sources: Sequence[int], since: int) -> None:
        """Let row i continue row sources[i], for rows that differ only from position `since` on.

        Only what differs is copied.
        """
        stop, count = max(self.encoded), len(sources)
        index = torch.tensor(sources, device=self.tokens.device)
        for slots in (*self.encoder, *self.decoder):
            for x in (slots.keys, slots.values):
                part = x.unflatten(0, (-1, slots.slots))[:, since:stop]
                part[:count] = part[index]
        self.tokens[:count, since:] = self.tokens[index, since:]
        self.encoded[:count] = [self.encoded[row] for row in sources]

    # ---- reading given tokens

    def _read(
        self,
        new: Sequence[int],
        counts: Tensor,
        rows: Tensor,
        given: Tensor,
        lengths: Tensor | None = None,
    ) -> None:
        """Run the prefix encoder over the first `counts` tokens of the sequences `new`.

        With `lengths`, run the suffix encoder over their last `counts` tokens instead. Short texts
        go through the compiled step, because a whole pass has the overhead of many calls.
        """
        sizes = counts.tolist()
        brief = [i for i in new if 0 < sizes[i] <= BRIEF] if self.step is not None else []
        if brief:
            number, place = torch.tensor(
                [(i, place) for i in brief for place in range(sizes[i])]
            ).T.contiguous()
            end = torch.zeros_like(place) if lengths is None else lengths[number]
            position = torch.where(end > 0, end - 1 - place, place)
            self._compiled_encode(given[number, position], rows[number], place, end)
        for some in _alike(sizes, [i for i in new if i not in brief]):
            if lengths is None:
                self._read_prefix(rows[some], given[some], counts[some])
            else:
                self._read_suffix(rows[some], given[some], counts[some], lengths[some])

    def _read_suffix(self, rows: Tensor, given: Tensor, after: Tensor, lengths: Tensor) -> None:
        """Run the suffix encoder over the last `after` tokens of each sequence, from the end.

        `given` holds masks at targets. The features go to the decoder's suffix slots.
        """
        model, P = self.model, int(after.max())
        layout = Layout(after, P, readings=1, rows=after[:0])
        # places beyond `after` are never read
        places = (lengths[:, None] - 1 - torch.arange(P, device=rows.device)).clamp(min=0)
        # slot length + t holds the feature at t
        slots = (rows[:, None] * 2 * self.length + self.length + places).flatten()
        angles = self._at(places)
        x = model.embed(given.gather(1, places), places)
        for number, layer in enumerate(model.encoder, start=1):
            x = layer(x, angles, layout, model.attention)
            self._keep(number, slots, x.flatten(0, 1), places.flatten())

    def _read_prefix(self, rows: Tensor, given: Tensor, known: Tensor) -> None:
        """Run the prefix encoder over each sequence's first `known` tokens, in parallel."""
        model, P = self.model, int(known.max())
        layout = Layout(known, P, readings=1, rows=known[:0])
        positions = torch.arange(P, device=known.device)
        slots, places = (
            (rows[:, None] * self.length + positions).flatten(),
            positions.repeat(len(rows)),
        )
        decoder_slots = (rows[:, None] * self.decoder[0].slots + positions).flatten()
        x = model.embed(given[:, :P], positions)
        angles = self._at(positions)
        for number, layer in enumerate(model.encoder, start=1):
            q, k, v = layer.project(x, angles)  # type: ignore[operator]
            self.encoder[number - 1].write(slots, k.flatten(0, 1), v.flatten(0, 1))
            x = layer.finish(x, model.attention.encode(q, k, v, layer.offsets, layout))  # type: ignore[operator,arg-type]
            self._keep(number, decoder_slots, x.flatten(0, 1), places)

    def _copy(self, sources: Tensor, rows: Tensor, known: Tensor) -> None:
        """Copy what was read for some rows to others with the same given tokens."""
        places = torch.arange(self.length, device=rows.device)
        prefix = places < known[:, None]
        suffix = (places > known[:, None]) & (places < self.lengths[rows, None])
        for layers, held in (
            (self.encoder, prefix),
            (self.decoder, prefix if self.mode == "ar" else torch.cat([prefix, suffix], 1)),
        ):
            number, slot = held.nonzero(as_tuple=True)
            width = held.shape[1]
            for kept in layers:
                kept.copy(sources[number] * width + slot, rows[number] * width + slot)

    # ---- one step

    def _advance(self, rows: Tensor, positions: Tensor) -> None:
        """Encode the tokens between those already encoded and `positions`, for some rows."""
        behind, ahead = rows.tolist(), positions.tolist()
        if all(
            self.encoded[row] == position - 1 for row, position in zip(behind, ahead, strict=True)
        ):
            self._encode(rows, positions - 1)  # one token in each row, as usual
        else:
            pairs = [
                (row, place)
                for row, position in zip(behind, ahead, strict=True)
                for place in range(self.encoded[row], position)
            ]
            if not pairs:
                return
            # positions ascend within each row, so that a query's keys are written before it reads
            self._encode(*torch.tensor(pairs, device=self.tokens.device).T.contiguous())
        for row, position in zip(behind, ahead, strict=True):
            self.encoded[row] = max(self.encoded[row], position)

    def _encode(self, row: Tensor, place: Tensor) -> None:
        """Run the prefix encoder at (row, place) pairs, (N,) each."""
        if self.step is not None:
            return self._compiled_encode(self.tokens[row, place], row, place, torch.zeros_like(row))
        model, angles = self.model, self._at(place)
        slot, decoder_slot = row * self.length + place, row * self.decoder[0].slots + place
        x = model.embed(self.tokens[row, place], place)
        for number, layer in enumerate(model.encoder, start=1):
            kept = self.encoder[number - 1]
            q, k, v = layer.project(x, angles)  # type: ignore[operator]
            kept.write(slot, k, v)
            key = place[:, None] - self._reachable(number, place)
            present = key >= 0
            x = layer.finish(
                x, kept.attend(q, row[:, None] * self.length + key.clamp(min=0), present)
            )  # type: ignore[operator]
            self._keep(number, decoder_slot, x, place)

    def _decode(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return logits (N, vocab_size) at (row, position) pairs."""
        if self.step is not None:
            return self._compiled_decode(rows, positions)
        model, angles = self.model, self._at(positions)
        x = model.queries(positions)
        for layer, kept in zip(model.decoder, self.decoder, strict=True):
            index, present = self._decoder_keys(rows, positions, int(layer.stride), kept.slots)  # type: ignore[arg-type]
            x = layer.finish(x, kept.attend(layer.query(x, angles), index, present))  # type: ignore[operator]
        return logits_of(model.final(model.norm(x), positions), model.head)

    def _decoder_keys(
        self, rows: Tensor, positions: Tensor, stride: int, slots: int
    ) -> tuple[Tensor, Tensor]:
        """Return the flat slots (N, K) that each query reads, and which of them exist.

        Prefix slots come first (Eq. 5), then suffix slots (Eq. 6).
        """
        before = (positions + stride - 1) // stride
        after = (
            torch.zeros_like(before)
            if self.mode == "ar"
            else (self.lengths[rows] - 1 - positions + stride - 1) // stride
        )
        count = before + after
        i = torch.arange(int(count.max()), device=rows.device)
        prefix = positions[:, None] - 1 - stride * i
        suffix = self.length + positions[:, None] + 1 + stride * (i - before[:, None])
        index = torch.where(i < before[:, None], prefix, suffix)
        present = i < count[:, None]
        return rows[:, None] * slots + index.masked_fill(~present, 0), present

    # ---- the same in compiled code, all layers in one call

    def _compiled_encode(self, tokens: Tensor, rows: Tensor, places: Tensor, ends: Tensor) -> None:
        self.step.encode(tokens.long(), rows, places, ends, *self.angles, *self._encoder_slots)

    def _compiled_decode(self, rows: Tensor, places: Tensor) -> Tensor:
        lengths = torch.zeros_like(rows) if self.mode == "ar" else self.lengths[rows]
        logits: Tensor = self.step.decode(rows, places, lengths, *self.angles, *self._decoder_slots)
        return logits

    @cached_property
    def _encoder_slots(self) -> tuple[int, list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
        readers = [
            self.decoder[paired_encoder_layer(number, len(self.decoder)) - 1]
            for number in range(1, len(self.encoder) + 1)
        ]
        sides = self.decoder[0].slots // self.length
        return sides, *_keys_and_values(self.encoder), *_keys_and_values(readers)

    @cached_property
    def _decoder_slots(self) -> tuple[int, list[Tensor], list[Tensor]]:
        return self.decoder[0].slots // self.length, *_keys_and_values(self.decoder)

    def _reachable(self, number: int, place: Tensor) -> Tensor:
        """Return the layer's offsets that have a key from at least one of the places."""
        offsets = self.offsets[number - 1]
        return offsets[: int(torch.searchsorted(offsets, place.max(), right=True))]

    def _keep(self, encoder_layer: int, slots: Tensor, features: Tensor, positions: Tensor) -> None:
        """Store keys and values of the decoder layer that reads this encoder layer."""
        number = paired_encoder_layer(encoder_layer, len(self.decoder))  # its own inverse
        k, v = self.model.decoder[number - 1].keys(features, self._at(positions))  # type: ignore[operator]
        self.decoder[number - 1].write(slots, k, v)

    def _angles(self, positions: Tensor) -> Angles:
        config = self.model.config
        return rotary_angles(
            positions, config.head_size, config.rotary_base, self.model.embedding.weight.dtype
        )

    def _at(self, positions: Tensor) -> Angles:
        return Angles(self.angles.cos[positions], self.angles.sin[positions])


def _keys_and_values(layers: Sequence[Slots]) -> tuple[list[Tensor], list[Tensor]]:
    return [kept.keys for kept in layers], [kept.values for kept in layers]


def _first_of_equals(tokens: Tensor, lengths: Tensor) -> tuple[list[int], list[int]]:
    """Return the rows that equal no earlier one, and for every row the first that equals it."""
    firsts: dict[tuple[int, bytes], int] = {}
    source = [
        firsts.setdefault((length, row.tobytes()), number)
        for number, (length, row) in enumerate(
            zip(lengths.tolist(), tokens.cpu().numpy(), strict=True)
        )
    ]
    return list(firsts.values()), source


def _alike(sizes: Sequence[int], numbers: Sequence[int]) -> list[list[int]]:
    """Group `numbers` by their size, less those of size zero: passes then have little padding."""
    groups: list[list[int]] = []
    for i in sorted((i for i in numbers if sizes[i] > 0), key=lambda i: sizes[i]):
        if groups and sizes[i] <= 1.25 * sizes[groups[-1][0]] + 8:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups
