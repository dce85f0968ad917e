"""What the networks train on."""
