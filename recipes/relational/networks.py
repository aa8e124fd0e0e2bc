"""The networks that are certified, by name. All take pixels in [0, 1], and are in float64 and eval mode."""
