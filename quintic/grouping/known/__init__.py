"""Knowledge of the layers of libraries: views of weights that hold several matrices, as data."""
