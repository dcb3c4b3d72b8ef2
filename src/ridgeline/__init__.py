"""ridgeline: drive convolutional vision networks to the GPU's roofline."""
