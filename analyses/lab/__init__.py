"""Small models trained from scratch that differ in nothing but the norm."""
