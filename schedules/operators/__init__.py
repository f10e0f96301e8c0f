"""What operators compute: problems, operands, exact results."""
