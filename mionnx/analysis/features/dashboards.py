"""`FeatureDashboards`: what some features stand for, on one page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InputError
from mionnx.machine.brief import count, spelled
from mionnx.machine.typed import typed
from mionnx.view import Bars, Columns, Each, Examples, Lines, Series, Shown, Table, View, readable


@dataclass(frozen=True, eq=False, repr=False)
@typed(InputError)
class FeatureDashboards(Shown):
    """What some features stand for, by a harvest and by the unembedding.

    Attributes:
        features: names, "layer_feature" of transcoders, numbers of an SAE; `hooks`: what each one reads.
        tokens: number of tokens that were looked at.
        counts: [features], at how many of them it is active; `largest`, `means`: its largest activation, and the mean
            where it is active.
        edges: [bins + 1], of the histogram; `histogram`: [features, bins], how many activations are in each.
        windows: texts around largest activations, each of another text of the harvest, by feature and then from the
            largest on; `values`: [windows, width], the feature's activations there, NaN behind the end.
        of: [windows], the place of each one's feature; `peaks`: [windows], where in a window the largest is.
        raised, lowered: tokens whose logits each feature raises, and lowers, most by itself; none of features that do
            not write to the residual stream (neurons, heads' values, what a norm gives).
    """

    features: tuple[str, ...]
    hooks: tuple[str, ...]
    tokens: int
    counts: NDArray[np.int64]
    largest: NDArray[np.float32]
    means: NDArray[np.float32]
    edges: NDArray[np.float64]
    histogram: NDArray[np.int64]
    windows: tuple[tuple[str, ...], ...]
    values: NDArray[np.float32]
    of: NDArray[np.int64]
    peaks: NDArray[np.int64]
    raised: tuple[tuple[str, ...], ...]
    lowered: tuple[tuple[str, ...], ...]

    def texts(self, feature: str, k: int = 3) -> list[str]:
        """The texts that excite a feature most, the token with the largest activation in brackets.

        Args:
            feature: its name; a node of an attribution graph is that of its feature.
            k: number of texts at most.

        Raises:
            InputError: a feature that is not here.
        """
        name = "_".join(feature.split("_")[:2])
        if name not in self.features:
            raise InputError(f"no feature {feature!r} among {', '.join(self.features[:20])}")
        texts = []
        for i in np.flatnonzero(self.of == self.features.index(name))[:k].tolist():
            words = [f"[{word}]" if at == self.peaks[i] else word for at, word in enumerate(self.windows[i])]
            spaced = any(word.startswith((" ", "\u2581", "\u0120")) for word in words)
            texts.append(("" if spaced else " ").join(words))
        return texts

    def _facts(self) -> Iterator[str]:
        yield from (count(len(self.features), "feature"), f"{self.tokens:,} tokens")

    def _lines(self) -> Iterator[str]:
        for i, name in enumerate(self.features[:8]):
            share = spelled(float(self.counts[i]) / max(self.tokens, 1))
            best = self.texts(name, 1)
            yield f"{name}: active at {share} of the tokens; {best[0] if best else 'never active'}"

    def _columns(self) -> Columns:
        best = [self.texts(name, 1) for name in self.features]
        return {
            "feature": [*self.features],
            "hook": [*self.hooks],
            "share": self.counts / max(self.tokens, 1),
            "largest": self.largest,
            "mean": self.means,
            "raises": [" ".join(words) for words in self.raised],
            "lowers": [" ".join(words) for words in self.lowered],
            "text": [one[0] if one else "" for one in best],
        }

    def view(self) -> View:
        """A table to choose a feature from, its histogram, and its texts."""
        on_page = {"chooses": True, "styles": {"raises": "token"}}
        table = Table("feature", "share of tokens", "largest", "raises", on_page=on_page)
        for i, name in enumerate(self.features):
            share = float(self.counts[i]) / max(self.tokens, 1)
            words = "  ".join(repr(word) for word in self.raised[i][:4])
            table.add_row(name, readable(share), readable(float(self.largest[i])), words)
        curves, examples = [], []
        for i, name in enumerate(self.features):
            words = f"raises {', '.join(self.raised[i])}; lowers {', '.join(self.lowered[i])}"
            heading = f"{name}: {words}" if self.raised[i] else name
            bins = np.flatnonzero(self.histogram[i])
            low, high = (max(int(bins[0]) - 1, 0), int(bins[-1]) + 2) if len(bins) else (0, 2)
            labels = [readable(float(edge)) for edge in self.edges[low:high]]
            numbers = self.histogram[i, low:high].astype(np.float64)
            series = [Series("tokens", numbers[: len(labels)])]
            curves.append(Lines(labels[: len(numbers)], series, "activation, from", "tokens", 0, heading=heading))
            own = np.flatnonzero(self.of == i).tolist()
            examples.append(
                [(self.windows[n], self.values[n, : len(self.windows[n])], int(self.peaks[n])) for n in own]
            )
        title = f"What {count(len(self.features), 'feature')} stand for"
        about = (
            f"{self.tokens:,} tokens. Choose a feature in the table: how large its activations are, from each number "
            "up to the next, and the texts that excite it most, each token coloured by its activation."
        )
        often = self.counts / max(self.tokens, 1)
        bars = Bars(self.features, often, "share of tokens", heading="How often they are active", order="given")
        panels = [table, Each(curves), Examples(examples, heading="Texts of the largest activations"), bars]
        return View(title, panels, meaning=about, choice="feature", options=self.features)
