"""Scripts with a `model_fn`, as SageMaker's PyTorch, scikit-learn and Hugging Face containers take them."""
