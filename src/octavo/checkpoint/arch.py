"""Arch: the frozen facts of a checkpoint.

Owns the words in which the rest of Octavo speaks of a model's shape. Does not know config.json (config_reader
translates it), weights or torch. Invariant: whatever config_reader lets through can be built by the model that
`Arch.name` names.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """Rotary position embedding of one kind of layer."""

    theta: float = 10000.0
    kind: str = "default"  # none: nothing turns | default | linear | proportional | dynamic | llama3 | yarn | longrope
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position: int = 0  # dynamic, llama3, yarn, longrope
    beta_fast: float = 32.0  # yarn: rotations at the ends of its ramp
    beta_slow: float = 1.0
    truncate: bool = True  # yarn: the ramp's ends are whole channels
    short_factors: tuple[float, ...] = ()  # longrope: per pair of channels, for at most original_max_position tokens
    long_factors: tuple[float, ...] = ()  # for more
    rotary_size: int = 0  # channels that rotate; 0: the whole head
    num_turning: int = 0  # proportional: pairs of channels that rotate, of a whole head's
    interleaved: bool = False  # channel 2i turns with 2i + 1; else channel i with the one half a rotation further
    amplitude: float = 0.0  # of cos and sin; 0: the kind's own


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerKind:
    """What a config.json says of one layer's attention."""

    window: int = 0  # tokens that a query sees, itself included; 0: all
    rope: Rope = Rope()
    mixer: str = "attention"  # attention | delta | mamba | conv | none: what mixes tokens, and what the layer keeps


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Moe:
    """Mixture-of-experts facts."""

    num_experts: int
    experts_per_token: int
    expert_size: int  # intermediate size of one expert
    norm_topk_prob: bool = True
    num_shared: int = 0  # experts that every token meets, run as one
    scoring: str = "softmax"  # softmax | sigmoid
    corrected: bool = False  # a bias per expert that takes part in the choice and not in the weight
    num_groups: int = 1  # experts are chosen within the best `groups_kept` of these
    groups_kept: int = 1
    group_score: int = 1  # a group is as good as the sum of this many of its best experts
    scale: float = 1.0  # of the chosen experts' weights
    added_to_sum: float = 0.0  # to the sum of the chosen scores, by which norm_topk_prob divides
    shared_size: int = 0  # intermediate size of what every token meets; 0: num_shared experts as one
    shared_gate: bool = False  # each token weights it by a gate
    latent_size: int = 0  # experts compute on so many channels, projected from the hidden state and back; 0: on it


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Latent:
    """Latent attention (MLA, DeepSeek-V2, arXiv 2405.04434): one compressed state per token serves every head."""

    latent_size: int  # of the state that K and V are made from
    rope_size: int  # channels of the one key that turns, shared by the heads
    nope_size: int  # channels of each head's query and key that do not turn
    value_size: int  # channels of each head's value
    query_size: int = 0  # of the compressed query; 0: queries are not compressed


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeltaNet:
    """A gated delta net (arXiv 2412.06464): a state per value head, behind a short convolution of q, k and v."""

    num_key_heads: int
    num_value_heads: int
    key_size: int  # of a head
    value_size: int
    conv_size: int  # tokens that the convolution sees


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Mamba:
    """A selective state space: Mamba-2 (arXiv 2405.21060), whose heads decay whole, or Mamba-1 (arXiv 2312.00752)."""

    inner_size: int
    state_size: int  # per channel
    conv_size: int  # tokens that the convolution sees
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    num_heads: int = 0  # 0: Mamba-1, each of whose channels decays by itself
    num_groups: int = 1  # of heads that share what they read and write
    step_rank: int = 0  # Mamba-1: channels that the steps of time are made from
    step_limit: tuple[float, float] = (0.0, float("inf"))  # of the steps of time
    eps: float = 1e-5  # of the norms in it
    norm: str = "gated"  # of the result: gated: behind its gate | before_gate | none
    in_scale: float = 1.0  # of what the mixer takes
    scales: tuple[float, ...] = ()  # of the gate, the values, what is written, what is read, the steps; empty: none


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ShortConv:
    """A gated convolution over a few tokens, each channel by itself."""

    size: int  # tokens that it sees
    bias: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Scales:
    """What parts of a layer are multiplied by."""

    attention_in: float = 1.0
    attention_out: float = 1.0
    mixer_out: float = 1.0  # of the other mixer of a layer that has two
    gate: float = 1.0  # of the MLP, before its activation
    down: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Arch:
    """Facts of one checkpoint. Sizes are counts of elements."""

    name: str  # Hugging Face's architecture, the key of models.ARCHITECTURES, or "package.module:Class"
    dtype: str  # float32 | bfloat16 | float16, as stored
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_position: int
    default_length: int = 0  # tokens of a request where nobody asks for more; 0: max_position
    norm_eps: float
    layers: tuple[LayerKind, ...]
    layers_of_each: int = 1  # of `layers`, what one layer of the published model is: Falcon-H1's are two
    moe_layers: frozenset[int] = frozenset()
    moe: Moe | None = None
    latent: Latent | None = None  # then num_kv_heads is 1 and head_size the state's, latent and rope
    delta: DeltaNet | None = None
    mamba: Mamba | None = None
    conv: ShortConv | None = None
    scales: Scales = Scales()
    tied: bool = False  # the output projection is the embedding
    activation: str = "silu"  # silu | gelu_tanh; relu2: not gated
    attention_bias: bool = False  # bias on q, k and v
    output_bias: bool = False  # bias on the attention's output projection
    mlp_bias: bool = False  # bias on all projections of the MLP
    qk_norm: bool = False
    head_gates: bool = False  # a sigmoid of the hidden state weights each head of the attention
    norms_behind: bool = False  # LFM3: norms of what the mixer and the MLP give, too
    attention_scale: float = 0.0  # config_reader resolves it, never 0 there
    logit_soft_cap: float = 0.0  # 0: none
    embedding_scale: float = 1.0
    stream_unit: float = 1.0  # what 1 in the stream between layers stands for in the published model's
    logit_divisor: float = 1.0
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def num_layers(self) -> int:
        """Count of decoder layers."""
        return len(self.layers)

    @property
    def num_published(self) -> int:
        """Count of layers as the model's config.json and its drafters number them."""
        return len(self.layers) // self.layers_of_each


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DraftArch:
    """Facts of a drafter that reads a target's hidden states: a head, modules of multi-token prediction, or layers."""

    method: str  # eagle | eagle3 | mtp | dflash
    arch: Arch  # of its layers; mtp: the target's, whose last layer a module's is like
    num_modules: int = 1  # mtp: modules, each for one place further ahead
    vocab_size: int = 0  # of the drafts: eagle3 may know fewer tokens than the target
    taps: tuple[int, ...] = ()  # eagle3, dflash: it reads the stream behind so many of the target's layers
    target_size: int = 0  # eagle3, dflash: elements of a tap
    tap_unit: float = 1.0  # eagle3: what 1 in a tap stands for in the published model's stream
    norm_before_residual: bool = False  # eagle3: the stream is the normed state
    fc_bias: bool = False  # eagle
    has_embedding: bool = False  # the checkpoint brings its own
    block_size: int = 0  # dflash: places of a block, the last known token's and those of drafts
    mask_token: int = -1  # dflash: what stands where a draft is asked for
    is_causal: tuple[bool, ...] = ()  # dflash: of each layer, whether places see none behind them
    under_mtp: bool = False  # mtp: weights are called `mtp.`, else as layers behind the last one
