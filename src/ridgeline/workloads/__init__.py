"""What the verbs are used for: object detection on images, diffusion training."""
