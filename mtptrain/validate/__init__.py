"""What a trained draft is worth: acceptance, losslessness and speed, measured by decoding."""
