"""The claims of "ViT as a Cauchy problem", tested on the rows of `digits_cauchy` and `cifar10_cauchy`."""
