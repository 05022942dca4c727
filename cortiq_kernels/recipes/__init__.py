"""User-level runs: a frozen `Config` with defaults that work, and `run(config) -> Report`.

    heal    distil the source model into a folded one               heal_config.py  heal.py
    score   NLL per split and category; compare models              score_config.py score.py
    capture Grams of the MLPs' activations                          capture_config.py capture.py
    fold    keep the MLP neurons that the data uses, and repair      fold_config.py  fold.py

The config modules import neither torch nor anything that does, so a command line parses in milliseconds. A run refuses
bad input before any work with one `InputError` (or another ValueError) that says what, got, expected and how to fix;
it reports what it does through `progress`, a function that takes one event (a dict with the key "event") at a time.
"""
