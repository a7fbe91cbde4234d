"""Averages of gradients over ranks: in the step, or before it where their norm is asked for."""
