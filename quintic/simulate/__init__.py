"""Simulation of an optimizer's step on a mesh of ranks, which need not exist: `quintic plan --model`."""
