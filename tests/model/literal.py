"""The model once more, as the design states it: one position at a time, key sets written out, text
order, no batching, no mirroring.

It shares nothing with the package but the weights.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm

from tracformer import Tracformer


class Literal:
    def __init__(self, model: Tracformer) -> None:
        self.config = model.config
        self.weights = model.state_dict()

    def logits(self, tokens: list[int], given: list[bool], mode: str) -> Tensor:
        """(T, vocab_size) for one unpadded sequence."""
        T, mask = len(tokens), self.config.vocab_size
        seen = [token if g else mask for token, g in zip(tokens, given, strict=True)]
        prefix = self.encode(tokens if mode in ("car", "ar") else seen, back=True)
        suffix = self.encode(seen, back=False)
        states = [
            self.decode(t, T, prefix, None if mode == "ar" else suffix) for t in range(1, T + 1)
        ]
        hidden = self.norm("norm", torch.stack(states))
        logits = hidden @ self.weights["embedding.weight"][:mask].T
        if self.config.columns:
            head = self.weights["columns.head"].view(T, mask, -1)
            logits = torch.stack([x + head[t] @ hidden[t] for t, x in enumerate(logits)])
            logits += self.weights["columns.bias"].view(T, mask)
        return logits

    def encode(self, tokens: list[int], back: bool) -> list[list[Tensor]]:
        """features[l][t], layers from 0 (the embedding) and positions from 1;
        features[l][0] is unused.
        """
        T = len(tokens)
        zero = torch.zeros(0)
        inputs = self.weights["embedding.weight"][tokens]
        if self.config.columns:
            letters = self.weights["columns.letters.weight"].view(T, self.config.vocab_size + 1, -1)
            inputs = inputs + letters[range(T), tokens]
        features = [[zero, *inputs]]
        for layer in range(1, self.config.n_layer + 1):
            name, below = f"encoder.{layer - 1}", features[-1]
            normed = [zero] + [self.norm(f"{name}.norm_attention", x) for x in below[1:]]
            projected = [zero] + [self.linear(f"{name}.qkv", x) for x in normed[1:]]
            new = [zero]
            for t in range(1, T + 1):
                keys = [key for key in self.encoder_keys(layer, t, T, back) if 1 <= key <= T]
                mixed = self.attend(
                    self.rotate(self.heads(projected[t].chunk(3)[0]), t),
                    [self.rotate(self.heads(projected[key].chunk(3)[1]), key) for key in keys],
                    [self.heads(projected[key].chunk(3)[2]) for key in keys],
                )
                x = below[t] + self.linear(f"{name}.out", mixed)
                new.append(x + self.feedforward(name, x))
            features.append(new)
        return features

    def encoder_keys(self, layer: int, t: int, T: int, back: bool) -> list[int]:
        sign = -1 if back else 1
        if self.config.encoder == "full":
            return list(range(1, t + 1)) if back else list(range(t, T + 1))
        w, n_max = 2 ** (layer - 1), self.config.n_max
        if self.config.key_set == "rounded":
            distances = (
                set(range(w + 1))
                if w + 1 <= n_max
                else {math.floor(i * w / (n_max - 1) + 0.5) for i in range(n_max)}
            )
        elif w <= n_max:
            distances = set(range(w + 1))
        else:
            distances = {
                i * (w // (n_max - 1)) for i in range(w + 1) if i * (w // (n_max - 1)) <= w
            } | {w}
        return [t + sign * distance for distance in distances]

    def decode(
        self, t: int, T: int, prefix: list[list[Tensor]], suffix: list[list[Tensor]] | None
    ) -> Tensor:
        L = self.config.n_layer
        x = torch.zeros(self.config.d_model, dtype=torch.float64)
        if self.config.columns:
            x = self.weights["columns.queries.weight"][t - 1]
        for layer in range(1, L + 1):
            name, j = f"decoder.{layer - 1}", L - layer + 1
            s = 1 if self.config.decoder == "dense" else 2**j
            read = [(key, prefix[j][key]) for key in range(1, t) if key % s == (t - 1) % s]
            if suffix is not None:
                read += [
                    (key, suffix[j][key]) for key in range(t + 1, T + 1) if key % s == (t + 1) % s
                ]
            features = [(key, self.norm(f"{name}.norm_feature", feature)) for key, feature in read]
            mixed = self.attend(
                self.rotate(
                    self.heads(self.linear(f"{name}.q", self.norm(f"{name}.norm_query", x))), t
                ),
                [
                    self.rotate(self.heads(self.linear(f"{name}.k", feature)), key)
                    for key, feature in features
                ],
                [self.heads(self.linear(f"{name}.v", feature)) for _, feature in features],
            )
            x = x + self.linear(f"{name}.out", mixed)
            x = x + self.feedforward(name, x)
        return x

    def attend(self, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        if not keys:
            return torch.zeros(self.config.d_model, dtype=torch.float64)
        # (keys, H)
        scores = torch.stack([(q * key).sum(-1) for key in keys]) / math.sqrt(self.config.head_size)
        return (torch.softmax(scores, 0)[..., None] * torch.stack(values)).sum(0).flatten()

    def rotate(self, x: Tensor, t: int) -> Tensor:
        half = self.config.head_size // 2
        turned = torch.empty_like(x)
        for i in range(half):
            angle = (t - 1) * self.config.rotary_base ** (-2 * i / self.config.head_size)
            turned[:, i] = x[:, i] * math.cos(angle) - x[:, i + half] * math.sin(angle)
            turned[:, i + half] = x[:, i + half] * math.cos(angle) + x[:, i] * math.sin(angle)
        return turned

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.config.n_head, -1))

    def linear(self, name: str, x: Tensor) -> Tensor:
        return self.weights[f"{name}.weight"] @ x + self.weights[f"{name}.bias"]

    def norm(self, name: str, x: Tensor) -> Tensor:
        return layer_norm(
            x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        )

    def feedforward(self, name: str, x: Tensor) -> Tensor:
        normed = self.norm(f"{name}.norm_feedforward", x)
        return self.linear(
            f"{name}.feedforward.out", gelu(self.linear(f"{name}.feedforward.up", normed))
        )
