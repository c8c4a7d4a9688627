"""Positions beyond those that a model was trained for: YaRN (arXiv 2309.00071), asked for once and the same everywhere.

A `PositionConfig` says how far; a session applies it to the model that captures, replays and samples, `vllm_arguments`
to a sampler outside. Nothing is extended unless it is asked for.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from . import environment
from .errors import ConfigurationError, UnsupportedModelError
from .lora import walk
from .types import CausalLM

_TEXT_ONLY = ("mrope_section", "mrope_interleaved")
"""Keys that deal frequencies to the axes of an image; the three positions of a text token are equal."""

_DEFAULTS = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "partial_rotary_factor": 1.0,
    "rope_type": "default",
    "truncate": True,
}
_LARGEST = 1e300  # an integer of JSON may be too large for a float


@dataclass(frozen=True, kw_only=True)
class PositionConfig:
    """How YaRN extends the positions of a model. Names differ from transformers' `rope_parameters` in one place only.

    Args:
        factor: how many times further than `original_max_positions`, above 1.
        original_max_positions: positions that the model was trained for (`original_max_position_embeddings`). It ends
            at `factor` times as many, which must be a whole number.
        beta_fast, beta_slow: a frequency that turns more than `beta_fast` times over the original positions is left as
            it is, one that turns less than `beta_slow` times is divided by `factor`.
        attention_factor: multiplies cosines and sines, so the logits by its square; None is 0.1 ln(factor) + 1.
        mscale, mscale_all_dim: both or neither, in place of `attention_factor`: cosines and sines are multiplied by
            (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1), and in latent attention (GLM-5.2) the
            softmax scale by the square of that denominator. There cosines and sines reach only the rotary part of a
            logit; 1.0 for both scales all of it, as DeepSeek-V3 does.

    Raises:
        ConfigurationError: a value that cannot work, alone or beside another.
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self) -> None:
        length = self.original_max_positions
        if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length < 2**53:
            raise ConfigurationError(f"original_max_positions must be an integer from 1 to 2**53, got {length!r}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "original_max_positions" or (value is None and field.default is None):
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _LARGEST:
                raise ConfigurationError(f"{field.name} must be a positive finite number, got {value!r}")
            object.__setattr__(self, field.name, float(value))
        if self.factor <= 1:
            raise ConfigurationError(f"factor must be above 1, got {self.factor}; to extend nothing, give no positions")
        if not (self.factor * length).is_integer():
            raise ConfigurationError(
                f"factor={self.factor} times original_max_positions={length} is {self.factor * length}, which is no "
                "number of positions; choose a factor that gives a whole one"
            )
        if self.beta_fast <= self.beta_slow:
            raise ConfigurationError(f"beta_fast={self.beta_fast} must be above beta_slow={self.beta_slow}")
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise ConfigurationError(
                f"mscale={self.mscale} and mscale_all_dim={self.mscale_all_dim}: give both or neither; transformers "
                "would use one alone in some places and ignore it in others"
            )
        if self.attention_factor is not None and self.mscale is not None:
            raise ConfigurationError("attention_factor and mscale say the same thing twice; give one of them")

    @property
    def max_positions(self) -> int:
        return int(self.factor * self.original_max_positions)

    @property
    def attention_scaling(self) -> float:
        """What cosines and sines are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        return self._magnitude(1.0 if self.mscale is None else self.mscale) / self.latent_magnitude

    @property
    def latent_magnitude(self) -> float:
        """Its square multiplies the softmax scale of latent attention."""
        return self._magnitude(self.mscale_all_dim or 0.0)

    def _magnitude(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0

    def frequencies(self, rope_theta: float, n_dims: int) -> list[float]:
        """Radians per position of each of the `n_dims` / 2 rotary pairs, in double precision."""
        # Bounds are rounded outwards and a ramp without width gets one, as in transformers.
        low = max(math.floor(self._pair_turning(self.beta_fast, rope_theta, n_dims)), 0)
        high = min(math.ceil(self._pair_turning(self.beta_slow, rope_theta, n_dims)), n_dims - 1)
        width = high - low or 0.001
        found = []
        for pair, frequency in enumerate(default_frequencies(rope_theta, n_dims)):
            divided = min(max((pair - low) / width, 0.0), 1.0)
            found.append(frequency * (1 - divided) + frequency / self.factor * divided)
        return found

    def _pair_turning(self, n_turns: float, rope_theta: float, n_dims: int) -> float:
        """The pair, as a fraction, that turns `n_turns` times over the original positions."""
        return n_dims * math.log(self.original_max_positions / (n_turns * 2 * math.pi)) / (2 * math.log(rope_theta))

    @property
    def given(self) -> dict[str, Any]:
        """The fields that are not None."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def to_json(self) -> str:
        """One line that `from_json` reads."""
        return json.dumps(self.given)

    @classmethod
    def from_json(cls, text: str) -> PositionConfig:
        """Read an object of the fields by name. Raises `ConfigurationError` for anything else."""
        try:
            given = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_without_repeats)
        except json.JSONDecodeError as error:
            raise ConfigurationError(f"positions must be one JSON object, got {text!r}: {error}") from None
        if not isinstance(given, dict):
            raise ConfigurationError(f"positions must be a JSON object, got {text!r}")
        names = [field.name for field in fields(cls)]
        unknown = sorted(set(given) - set(names))
        missing = sorted({"factor", "original_max_positions"} - set(given))
        if unknown or missing:
            problem = f"unknown {', '.join(unknown)}" if unknown else f"no {' and no '.join(missing)}"
            raise ConfigurationError(f"positions {text!r} have {problem}; fields of YaRN are {', '.join(names)}")
        return cls(**given)


def _refuse_constant(name: str) -> float:
    raise ConfigurationError(f"positions hold {name}, which is no JSON; give finite numbers")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ConfigurationError(f"positions name a field twice: {', '.join(name for name, _ in pairs)}")
    return found


def default_frequencies(rope_theta: float, n_dims: int) -> list[float]:
    """Radians per position of each rotary pair without an extension, in double precision."""
    return [float(rope_theta) ** (-2 * pair / n_dims) for pair in range(n_dims // 2)]


def asked_positions(given: PositionConfig | None) -> PositionConfig | None:
    """`given`, or what the variable LONGSTRAW_POSITIONS says; they must not differ where both are there."""
    if given is not None and not isinstance(given, PositionConfig):
        raise ConfigurationError(
            f"positions must be a PositionConfig, got {given!r}; PositionConfig.from_json reads text"
        )
    text = environment.positions_text()
    if text is None:
        return given
    try:
        asked = PositionConfig.from_json(text)
    except ConfigurationError as error:
        raise ConfigurationError(f"{environment.POSITIONS}: {error}") from None
    if given is not None and given != asked:
        raise ConfigurationError(
            f"positions={given.to_json()} were given, but {environment.POSITIONS} says {asked.to_json()}; unset one"
        )
    return asked


def to_rope_parameters(positions: PositionConfig, config: Any) -> dict[str, Any]:
    """`config.rope_parameters` with YaRN in them; what the model has beside it (rope_theta, sections, ...) stays.

    Raises:
        UnsupportedModelError: the model has no rotary positions of the plain kind.
        ConfigurationError: it has YaRN of its own, or these positions do not extend it.
    """
    own = dict(getattr(config, "rope_parameters", None) or {})
    kind = own.pop("rope_type", own.pop("type", "default"))
    own.pop("type", None)
    if "rope_theta" not in own or any(isinstance(value, dict) for value in own.values()):
        raise UnsupportedModelError(
            f"{type(config).__name__}.rope_parameters={own} is not one set with a rope_theta for all layers; positions "
            "of other models are not extended"
        )
    if kind != "default":
        advice = (
            "it is extended already, so give no positions and let the sampler read the same config; for another factor "
            "load it with rope_parameters of rope_type 'default'"
            if kind == "yarn"
            else "only plain rotary positions (rope_type 'default') are extended: give no positions"
        )
        raise ConfigurationError(f"the model's rope_parameters have rope_type {kind!r}: {advice}")
    limit = config.max_position_embeddings
    if not positions.original_max_positions <= limit < positions.max_positions:
        raise ConfigurationError(
            f"factor={positions.factor} times original_max_positions={positions.original_max_positions} is "
            f"{positions.max_positions} positions, but the model has max_position_embeddings={limit}: the original "
            "must not be above that, and the product must be"
        )
    given = positions.given
    given["original_max_position_embeddings"] = given.pop("original_max_positions")
    return {**own, "rope_type": "yarn", **given}


def rotary_modules(model: CausalLM) -> tuple[nn.Module, ...]:
    return tuple(module for module in walk(model) if "inv_freq" in module._buffers)


def positions_of(model: CausalLM) -> PositionConfig | None:
    """What the positions of `model` are extended by now."""
    return next((extended_by(module) for module in rotary_modules(model)), None)


def extended_by(rotary: nn.Module) -> PositionConfig | None:
    found: PositionConfig | None = vars(rotary).get("extended_by")
    return found


def angles_key(rotary: tuple[Any, ...]) -> tuple[object, ...]:
    """Changes whenever the angles that these modules make do, as `weights_fingerprint` does for weights."""
    return tuple(
        (extended_by(m), m.inv_freq.data_ptr(), m.inv_freq._version, getattr(m, "attention_scaling", None))
        for m in rotary
    )


def positions_identity(config: Any) -> str:
    """SHA-256 over everything in `config.rope_parameters` that moves the angles of a text; equal for equal positions.

    For a model that is extended, and for one that is not.
    """
    given = {key: value for key, value in (config.rope_parameters or {}).items() if value is not None}
    seen = {key: value for key, value in {**_DEFAULTS, **given}.items() if key not in (*_TEXT_ONLY, "type")}
    text = json.dumps({key: _as_float(value) for key, value in seen.items()}, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _as_float(value: Any) -> Any:
    """Checkpoints write the same number as 10000000 and as 10000000.0."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def require_same_positions(trainer: str, sampler: str) -> None:
    """Raise `ConfigurationError` unless two `positions_identity` are equal."""
    if trainer != sampler:
        raise ConfigurationError(
            f"the trainer's positions are {trainer[:12]}... and the sampler's {sampler[:12]}..., so responses would be "
            f"drawn from another model than the one that is trained; start both with the same {environment.POSITIONS} "
            "or positions, and the same checkpoint"
        )


def vllm_arguments(config: Any, positions: PositionConfig) -> dict[str, Any]:
    """Arguments for `vllm.LLM(...)` that give a sampler the positions of a trainer; `config` is the text model's own.

    Read from vLLM's source, not run here. It ties the bounds of YaRN to four times the original positions where it sees
    `mrope_section`, which transformers does not, so that is left out; where vLLM nests the text model's config (a
    multimodal checkpoint) it merges, so remove it from `config.json` there. Versions before its pull request 56446
    ignore `attention_factor`, and `mscale` outside latent attention. Its angles are float32 products, the trainer's are
    exact: towards a million tokens sample from the resident state, or weigh what vLLM drew by importance.
    """
    merged = to_rope_parameters(positions, config)
    rope_parameters = {key: value for key, value in merged.items() if key not in _TEXT_ONLY}
    limit = positions.max_positions
    return {
        "hf_overrides": {"rope_parameters": rope_parameters, "max_position_embeddings": limit},
        "max_model_len": limit,
    }
