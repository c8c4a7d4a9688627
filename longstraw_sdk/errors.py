"""Every error that a user can meet. One base class, each with a standard-library parent.

All take one message, so they pickle across process boundaries. A message says what was given, what is allowed and what
to do about it.
"""


class LongStrawError(Exception):
    """Base class of every user-facing error."""


class ConfigurationError(LongStrawError, ValueError):
    """An option has a value that cannot work here, alone or beside another."""


class UnsupportedModelError(LongStrawError, ValueError):
    """The adapter cannot serve this model; the message lists everything that was found."""


class RegistryError(LongStrawError, LookupError):
    """No adapter, or more than one, is registered for a model type."""


class InputError(LongStrawError, ValueError):
    """A prompt, response, mask or reward that cannot be used. Nothing was changed."""


class NumericsError(LongStrawError, ArithmeticError):
    """A NaN or infinity where a finite number is needed, or two results that must agree and do not."""


class LifecycleError(LongStrawError, RuntimeError):
    """A call that is out of order: finalize twice, capture on a closed session, a second session on a model."""


class StaleStateError(LifecycleError):
    """The weights, the active LoRA adapter or the positions changed since the prompt was captured."""


class UseAfterReleaseError(LifecycleError):
    """A page or prefix was used after it was released."""


class WitnessError(LongStrawError, RuntimeError):
    """The resident state changed between capture and replay; the message names layer and page."""


class SamplerError(LongStrawError, RuntimeError):
    """A sampler did not answer, or its answer cannot be trained on. The update that asked for it was not begun."""


class PlacementError(LongStrawError, RuntimeError):
    """A cluster is not what a run needs, did not do what was asked in time, or keeps what could not be removed."""


class RankLostError(PlacementError):
    """A rank's process or node is gone. The update was not closed; the last closed one is what the run goes on from."""


def require_at_least(name: str, value: object, least: int) -> None:
    """Raise `ConfigurationError` unless the option `name` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{name} must be an integer of at least {least}, got {value!r}")
