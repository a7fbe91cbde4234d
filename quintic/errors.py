"""Errors a user can act on; the command line prints each as one line and exits with code 2.

    QuinticError
    |- DataError(ValueError)            the text, the tokenizer or the token shards
    |- ConfigError(ValueError)          an option, or a combination of options
    |- CheckpointError(RuntimeError)    a checkpoint that is missing, damaged or does not fit
    |- DivergedError(ArithmeticError)   a training run whose loss or weights are no longer finite
    '- OtherRankError(RuntimeError)     another of several processes has failed; the command line prints nothing

The message says what is wrong, what was given (parameter, file or option) and what to change.
"""

__all__ = ["CheckpointError", "ConfigError", "DataError", "DivergedError", "OtherRankError", "QuinticError"]


class QuinticError(Exception):
    """Base class of the errors that a change of input can mend."""


class DataError(QuinticError, ValueError):
    """The text source, the tokenizer or the prepared token shards cannot be used as asked."""


class ConfigError(QuinticError, ValueError):
    """An option, or a combination of options, cannot be honoured."""


class CheckpointError(QuinticError, RuntimeError):
    """A checkpoint is missing, damaged, or belongs to another configuration."""


class DivergedError(QuinticError, ArithmeticError):
    """The loss or the weights of a training run are no longer finite numbers."""


class OtherRankError(QuinticError, RuntimeError):
    """Another rank has failed, and says why; this one ends with it."""
