"""What touches a forward pass: where the norms are, what goes through them."""
