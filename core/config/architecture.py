"""What a model computes: frozen values that say nothing about where it runs (contract 1).

Units: sizes count elements; `rate` and coefficients are per optimizer step. Sources stand beside the values in `models/`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Score = Literal["softmax", "softmax_after_top_k", "sigmoid", "sqrt_softplus"]
AuxScope = Literal["microbatch", "sequence", "global_batch"]


@dataclass(frozen=True, kw_only=True)
class RMSNorm:
    """Root-mean-square norm with a learned gain; `eps` is added to the mean square."""

    eps: float


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding with base `theta`."""

    theta: float


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """Rotary embedding stretched by YaRN (arXiv 2309.00071).

    With m(s) = 0.1 * s * ln(factor) + 1, cosine and sine are multiplied by m(mscale) / m(mscale_all_dim), and the softmax
    scale of the attention by m(mscale_all_dim) ** 2 (DeepSeek-V3's form; Qwen's is mscale=1, mscale_all_dim=0).
    """

    theta: float
    factor: float
    trained_tokens: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True, kw_only=True)
class GQA:
    """Grouped-query attention; `head_norm` normalises every query and key head before the rotation (Qwen3)."""

    heads: int
    kv_heads: int
    head_dim: int
    head_norm: RMSNorm | None = None


@dataclass(frozen=True, kw_only=True)
class MLA:
    """Multi-head latent attention (arXiv 2412.19437 section 2.1.1); `query_rank=None` leaves the query uncompressed."""

    heads: int
    query_rank: int | None
    latent_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    latent_norm: RMSNorm


Attention = GQA | MLA


@dataclass(frozen=True, kw_only=True)
class AuxLoss:
    """Load-balancing loss: balanced routing gives exactly `coefficient`, whatever the mapping and the scope."""

    scope: AuxScope
    coefficient: float


@dataclass(frozen=True, kw_only=True)
class ZLoss:
    """coefficient * mean over tokens of logsumexp(router logits) ** 2."""

    coefficient: float


@dataclass(frozen=True, kw_only=True)
class ExpertBias:
    """Balancing without a loss: a bias on the selection scores, moved by `rate` against the load once per optimizer step."""

    rate: float


@dataclass(frozen=True, kw_only=True)
class QuantileBias:
    """Balancing without a loss or a rate: experts are chosen by logit minus a threshold, read off the logits once per optimizer step.

    With a_t the (top_k + 1)-th highest of token t's logits less thresholds, q_e is the (floor(tokens * top_k / experts) + 1)-th
    highest of logit_te - a_t over the tokens of a microbatch: above it lie as many tokens as balanced experts have. The mean of q over
    the microbatches of the global batch becomes the threshold, `ema` of the old one being kept, less its mean over experts.
    """

    ema: float = 0.0


Balance = AuxLoss | ZLoss | ExpertBias | QuantileBias


@dataclass(frozen=True, kw_only=True)
class TopK:
    """Every token takes its top_k highest experts."""


@dataclass(frozen=True, kw_only=True)
class Sinkhorn:
    """In training, the top_k of scores that optimal transport has evened out over tokens and experts (S-BASE, arXiv 2202.01169).

    Rows and columns of exp(logits) of a whole microbatch are scaled in turn until the columns' factors change by at most `tolerance`
    in the mean, for at most `rounds` rounds. Weights are the router's scores: sigmoid with top_k=1, otherwise softmax, not
    normalised. In evaluation a token takes its top_k highest scores: it looks at no other token.
    """

    tolerance: float = 1e-4
    rounds: int = 1000


@dataclass(frozen=True, kw_only=True)
class ExpertChoice:
    """In training every expert takes its ceil(top_k * tokens / experts) best tokens of a microbatch (arXiv 2202.09368).

    A token has top_k experts in the mean, and 0 to all of them. Whether an expert takes it depends on the tokens behind it: a language
    model so trained has looked ahead, and its training loss is too good by as much. In evaluation and generation a token takes
    its top_k highest scores: it looks at no other token.
    """


Selection = TopK | Sinkhorn | ExpertChoice


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Group-limited routing: `total` contiguous groups of experts, of which a token may use `kept`.

    A group counts as much as its `best` highest selection scores together: two in DeepSeek-V3's published code, whatever
    top-k is.
    """

    total: int
    kept: int
    best: int = 2


@dataclass(frozen=True, kw_only=True)
class Router:
    """How a token's experts and their weights are chosen.

    score: `softmax` over all experts, `softmax_after_top_k` over the chosen ones, `sigmoid`, or the square root of the softplus.
    normalise: divide the chosen weights by their sum. scale: factor on the weights afterwards. dtype: of logits and scores,
    whatever the model's is. jitter: in training the router sees its input times numbers uniform in [1 - jitter, 1 + jitter].
    selection: who chooses whom.
    """

    score: Score
    normalise: bool
    groups: Groups | None = None
    scale: float = 1.0
    balance: tuple[Balance, ...] = ()
    dtype: Literal["float32", "float64"] = "float32"
    jitter: float | None = None
    selection: Selection = TopK()

    @property
    def biased(self) -> bool:
        """Whether the choice of experts carries a bias, which is saved with the weights."""
        return any(isinstance(balance, (ExpertBias, QuantileBias)) for balance in self.balance)


@dataclass(frozen=True, kw_only=True)
class SharedExperts:
    """`count` experts that every token passes, as one MLP of width count * expert_ffn.

    gated: a token takes of their output the share sigmoid(token @ gate), as in Qwen2's models.
    """

    count: int
    gated: bool = False


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """An expert takes at most ceil(factor * top_k * tokens / experts) rows of a microbatch of `tokens` tokens; the others are dropped.

    drop: which it keeps: those of the highest router `weight`, or of the earliest `position` in the microbatch. A dropped choice
    adds nothing to its token; the weights of the remaining ones stay as they are (arXiv 2101.03961).
    pad: in training rows of zeros fill what an expert has left, so that all shapes are known beforehand and the host waits for none
    of them. Which choices are dropped, outputs and gradients stay the same.
    """

    factor: float
    drop: Literal["weight", "position"] = "weight"
    pad: bool = False


@dataclass(frozen=True, kw_only=True)
class SwiGLU:
    """silu(gate) * up (arXiv 2002.05202)."""


@dataclass(frozen=True, kw_only=True)
class GeGLU:
    """gelu(gate) * up (arXiv 2002.05202); tanh: with gelu's approximation by a hyperbolic tangent."""

    tanh: bool


@dataclass(frozen=True, kw_only=True)
class ClampedSwiGLU:
    """(up + shift) * gate * sigmoid(alpha * gate), gate cut off above `limit` and up at both its signs (arXiv 2508.10925)."""

    limit: float
    alpha: float
    shift: float


@dataclass(frozen=True, kw_only=True)
class SquaredReLU:
    """max(x, 0) ** 2, without a gate (arXiv 2109.08668)."""


Activation = SwiGLU | GeGLU | ClampedSwiGLU | SquaredReLU
SWIGLU = SwiGLU()


def num_halves(activation: Activation) -> int:
    """How many matrices of [ffn, hidden] stand before an activation: gate and up, or only one where nothing gates."""
    return 1 if isinstance(activation, SquaredReLU) else 2


@dataclass(frozen=True, kw_only=True)
class Dense:
    """An MLP of width `ffn`."""

    ffn: int
    activation: Activation = SWIGLU


@dataclass(frozen=True, kw_only=True)
class MoE:
    """`experts` experts of width `expert_ffn`, of which every token uses `top_k`.

    activation: of the routed and of the shared experts. bias: both matrices of every routed expert have one.
    latent: routed experts see a projection of the token to so many features, and their sum is projected back (LatentMoE,
    report section 7.3); router and shared experts see the whole token.
    """

    experts: int
    top_k: int
    expert_ffn: int
    router: Router
    shared: SharedExperts | None = None
    capacity: Capacity | None = None
    latent: int | None = None
    activation: Activation = SWIGLU
    bias: bool = False

    def routed_width(self, hidden: int) -> int:
        """The features that a routed expert sees of a token."""
        return hidden if self.latent is None else self.latent

    def expert_parameters(self, hidden: int) -> int:
        """How many parameters one routed expert has in a model of width `hidden`."""
        width, halves = self.routed_width(hidden), num_halves(self.activation)
        biases = halves * self.expert_ffn + width if self.bias else 0
        return (halves + 1) * width * self.expert_ffn + biases


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One transformer layer."""

    attention: Attention
    mlp: Dense | MoE


@dataclass(frozen=True, kw_only=True)
class MultiToken:
    """Multi-token prediction (arXiv 2412.19437 section 2.2): `depth` further modules, each one layer like the last one.

    `loss_weight` is shared evenly between the depths.
    """

    depth: int
    loss_weight: float


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A whole language model.

    max_tokens: the longest sequence it is declared for. init_std: of every matrix at the start; embedding_std: of the
    embedding, where it is another one. A small model needs it: layers of width 256 add about 0.1 to a residual stream
    that starts at 0.02, all tokens look alike to the routers, and experts collapse before they have learned anything.
    """

    vocab: int
    hidden: int
    max_tokens: int
    norm: RMSNorm
    rope: Rope | Yarn
    layers: tuple[Layer, ...]
    tied_embeddings: bool = False
    init_std: float = 0.02
    embedding_std: float | None = None
    predict_ahead: MultiToken | None = None

    def mtp_layers(self) -> tuple[Layer, ...]:
        """The layers inside the multi-token prediction modules: copies of the last layer's declaration."""
        return (self.layers[-1],) * self.predict_ahead.depth if self.predict_ahead else ()

    def all_layers(self) -> Iterator[tuple[str, Layer]]:
        """Every layer with its canonical path: `layers.0` … and `mtp.0.layer` … (contract 5)."""
        yield from ((f"layers.{i}", layer) for i, layer in enumerate(self.layers))
        yield from ((f"mtp.{i}.layer", layer) for i, layer in enumerate(self.mtp_layers()))


def repeat(count: int, layer: Layer) -> tuple[Layer, ...]:
    """`count` equal layers."""
    return (layer,) * count
