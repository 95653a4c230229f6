"""Knowledge of a model: facts of its configuration, offsets of its keys, guesses."""
