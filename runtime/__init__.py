"""The run on devices and the wall clock: weights in pages, page movement, quantized checkpoints."""
