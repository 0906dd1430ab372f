"""Models that are a script with `model_fn`, as SageMaker's PyTorch, scikit-learn and Hugging Face containers take them.

`handler.py` is what the engine sees; `host.py` runs the script's functions for one request after another, with those of
`defaults.py` where it defines none; `toolkits.py` is what such scripts import of Amazon's packages. They work in
whatever process they are loaded into, and speak to no other.
"""
