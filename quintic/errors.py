"""Errors that a user can fix; the command line prints each as one line and exits with code 2.

    QuinticError
    |- DataError(ValueError)            the text, the tokenizer or the token shards
    |- ConfigError(ValueError)          an option, or a combination of options
    |- CheckpointError(RuntimeError)    a checkpoint that is missing, damaged or does not fit
    |- DivergedError(ArithmeticError)   a training run whose loss or weights are no longer finite
    '- OtherRankError(RuntimeError)     another of several processes has failed; the command line prints nothing

A message names the parameter, file or option with its value, the problem, and a way to fix it.
"""

__all__ = ["CheckpointError", "ConfigError", "DataError", "DivergedError", "OtherRankError", "QuinticError"]


class QuinticError(Exception):
    """Base class of errors that the user can fix by changing the input."""


class DataError(QuinticError, ValueError):
    """A text source, a tokenizer or prepared token shards cannot be used."""


class ConfigError(QuinticError, ValueError):
    """An option, or a combination of options, is invalid."""


class CheckpointError(QuinticError, RuntimeError):
    """A checkpoint is missing, damaged or of another configuration."""


class DivergedError(QuinticError, ArithmeticError):
    """The loss or the weights of a training run are no longer finite."""


class OtherRankError(QuinticError, RuntimeError):
    """Another rank has failed and reports its error; this rank ends without printing."""
